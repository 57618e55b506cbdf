"""Which layers of a network hold fewer bits, in what way, and which do not and why: nothing is left out in silence.

    int8          int8 weights of linear layers, arithmetic in the device's float dtype
    int8_dynamic  linear layers of the UNet multiply in int8, activations with a scale for each token
    int8_static   linear layers and convolutions of the UNet multiply in int8, activations in ranges that were measured
                  (``runtime.calibration``) with the weights in int8 already; CPUs only

Text encoders run once a prompt, so that int8 arithmetic has nothing to win there: they hold int8 weights. VAEs keep
their float dtype: they make the pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from diffserve.disk_cache import DiskCache
from diffserve.models.vocabulary import Vocabulary
from diffserve.runtime.precision import INT8, INT8_DYNAMIC, INT8_STATIC
from diffserve.runtime.quantized_layers import (
    CUBLAS_MULTIPLE,
    InputRange,
    Int8DynamicLinear,
    become,
    become_static,
    hold_int8_weight,
    to_int8,
)
from diffserve.runtime.text.encoding import Conditioning, TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from schedulers import NoiseSchedule, compile_table
from schedulers.update import advance, guide, new_history, rows_of, scale_input

OF_ROWS: Final = re.compile(r"(^|\.)(time_embedding|add_embedding|class_embedding|time_emb_proj)(\.|$)")
"""Layers of a UNet that see one vector for each row, not tokens."""
ONCE_A_PROMPT: Final = "every layer holds its float dtype: it runs once a prompt"
THE_PIXELS: Final = "every layer holds its float dtype: it makes the pixels"
ENDS: Final = ("conv_in", "conv_out")
NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


class LeftLayers(NamedTuple):
    """Layers of one kind that do not hold or do not multiply what was asked for.

    pattern         their name, ``*`` for numbers
    num_parameters  of their weights
    holds           what the weights are held in
    """

    pattern: str
    num_layers: int
    num_parameters: int
    holds: str
    reason: str


def scheme_for(name: str, layer: nn.Module, asked: str) -> tuple[str | None, str]:
    """What the layer ``name`` is to hold where ``asked`` is a precision of this module, ``None``: as it is; and where
    that is not what was asked for, why.
    """
    if asked == INT8_STATIC and isinstance(layer, nn.Conv2d):
        if name in ENDS:
            return None, "is where pictures come in or go out, and every error there is theirs"
        return asked, ""
    if not isinstance(layer, nn.Linear):
        what = "convolutions" if isinstance(layer, nn.Conv2d) else "tables, which are looked up and not multiplied,"
        return None, f"{asked} is for linear layers; {what} stay"
    is_of_rows = OF_ROWS.search(name) is not None
    multiple = CUBLAS_MULTIPLE if asked == INT8_DYNAMIC else 1
    sides = (layer.in_features, layer.out_features)
    if asked != INT8 and is_of_rows:
        why = "sees one vector for each row, too few for a product in 8 bits"
    elif any(side % multiple for side in sides):
        why = f"is {sides[0]} x {sides[1]}, and its kernel wants multiples of {multiple}"
    else:
        return asked, ""
    return INT8, why


def schemes(network: nn.Module, asked: str) -> dict[str, str]:
    """Layer names -> what each is to hold, of those that hold fewer bits."""
    found = ((name, scheme_for(name, layer, asked)[0]) for name, layer in network.named_modules())
    return {name: scheme for name, scheme in found if scheme is not None}


def convert_static(network: nn.Module, ranges: Mapping[str, InputRange]) -> None:
    """Have the layers that ``ranges`` names, which hold int8 already, multiply in it, one after the other."""
    for name, known in ranges.items():
        become_static(network.get_submodule(name), known)


def quantize_layer(layer: nn.Module, scheme: str) -> None:
    """Give ``layer``, which has its weight in a float dtype, the weight that ``scheme`` says; one of int8_static
    multiplies in float until ``convert_static``.
    """
    if scheme in (INT8, INT8_STATIC):
        hold_int8_weight(layer)
    else:
        become(layer, Int8DynamicLinear, to_int8(layer.get_parameter("weight").detach()))


def layers_left(network: nn.Module, asked: str) -> list[LeftLayers]:
    """Of a loaded network every layer with a matrix or filters that is not as ``asked``: kinds, the largest first."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for name, layer, weight in _weighted(network):
        scheme, reason = scheme_for(name, layer, asked)
        is_int8 = weight.dtype == torch.int8
        if is_int8 and scheme == asked:
            continue
        holds = INT8 if is_int8 else str(weight.dtype).removeprefix("torch.")
        kinds.setdefault((NUMBER.sub(".*", name), holds, reason), []).append(weight.numel())
    found = [LeftLayers(pattern, len(sizes), sum(sizes), *rest) for (pattern, *rest), sizes in kinds.items()]
    return sorted(found, key=lambda one: -one.num_parameters)


def describe_left(network: nn.Module, asked: str) -> Iterator[str]:
    """A sentence for each reason, with the layers it is about and their share of the network's weights."""
    left = layers_left(network, asked)
    total = sum(weight.numel() for _, _, weight in _weighted(network))
    for reason in dict.fromkeys(one.reason for one in left):
        about = [one for one in left if one.reason == reason]
        num_layers, share = sum(one.num_layers for one in about), sum(one.num_parameters for one in about) / total
        holds = ", ".join(dict.fromkeys(one.holds for one in about))
        names = ", ".join(f"{one.pattern} ({one.num_layers})" for one in about)
        yield f"{num_layers} layers, {100 * share:.1f} % of the weights, hold {holds}: {reason}: {names}"


def _weighted(network: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for name, layer in network.named_modules():
        weight: Any = layer._parameters.get("weight")
        if weight is not None and weight.ndim > 1:
            yield name, layer, weight


PROMPTS: Final = (
    "a photograph of a red fox in the snow",
    "an oil painting of a harbour at sunset",
    "a portrait of an old man, studio light",
    "a plate of fruit on a wooden table",
)
NUM_STEPS: Final = 10
GUIDANCE_SCALE: Final = 5.0
KEPT_AS: Final = "input-ranges"
CALIBRATION_EDITION: Final = 3
"""Another number whenever other ranges would be found, so that kept ones are measured anew."""


def prompts_of(world: Vocabulary | None) -> tuple[str, ...]:
    """What is painted: plain prompts, or of a model that knows a closed world some of its own."""
    if world is None:
        return PROMPTS
    pairs = zip(world.objects[::9], world.places[::3], strict=False)
    return tuple(f"a {name} in the {place}" for name, place in pairs)[: len(PROMPTS)]


def kept_or_measured(
    cache: DiskCache | None, key: str, measure: Callable[[], Mapping[str, InputRange]]
) -> Mapping[str, InputRange]:
    """What was kept for ``key``, or else ``measure()``, kept from then on."""
    kept = cache.read(KEPT_AS, key) if cache else None
    if isinstance(kept, dict) and kept:
        return {name: InputRange(float(low), float(high)) for name, (low, high) in kept.items()}
    found = measure()
    if cache:
        cache.write(KEPT_AS, key, {name: [*known] for name, known in found.items()})
    return found


@torch.inference_mode()
def measure_ranges(
    names: Iterable[str],
    unet: UNetRunner,
    text: TextEncoderRunner,
    schedule: NoiseSchedule,
    prompts: Iterable[str],
    size_px: tuple[int, int],
    factor: int,
) -> dict[str, InputRange]:
    """The range of each layer of ``names`` over whole trajectories of ``prompts`` at ``size_px`` (width, height)."""
    reach: dict[str, list[Tensor]] = {name: [] for name in names}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, given: reach[name].append(torch.stack(torch.aminmax(given[0].float())))

    with ExitStack() as stack:
        for name in reach:
            hook = unet.network.get_submodule(name).register_forward_pre_hook(watch(name))
            stack.callback(hook.remove)
        for number, prompt in enumerate(prompts):
            width_px, height_px = size_px
            told = text.encode(prompt, width_px=width_px, height_px=height_px)
            _paint(unet, told, schedule, (height_px // factor, width_px // factor), seed=number)
    found = {}
    for name, seen in reach.items():
        ends = torch.stack(seen)
        found[name] = InputRange(min(0.0, float(ends[:, 0].min())), max(0.0, float(ends[:, 1].max())))
    return found


def _paint(unet: UNetRunner, told: Conditioning, schedule: NoiseSchedule, cells: tuple[int, int], *, seed: int) -> None:
    """One guided trajectory by DDIM, for what the layers see on the way."""
    table = compile_table("ddim", schedule, min(NUM_STEPS, schedule.num_timesteps))
    rows = rows_of(table)
    noise = torch.randn((1, unet.latent_channels, *cells), generator=torch.Generator().manual_seed(seed))
    latents = noise * table.init_scale
    history, contexts = new_history(latents), torch.stack([told.uncond, told.cond])
    pooled = (
        None
        if told.pooled_cond is None or told.pooled_uncond is None
        else torch.stack([told.pooled_uncond, told.pooled_cond])
    )
    time_ids = None if told.time_ids is None else told.time_ids.expand(2, -1)
    extra = torch.zeros((2, unet.extra_channels, *cells)) if unet.extra_channels else None
    for number, timestep in enumerate(table.timestep):
        row = rows[number : number + 1]
        both = scale_input(latents, row).expand(2, -1, -1, -1)
        told_at = torch.full((2,), float(timestep))
        output = unet.predict(both, told_at, contexts, pooled=pooled, time_ids=time_ids, extra=extra).cpu()
        guided = guide(output[:1], output[1:], torch.tensor([GUIDANCE_SCALE]))
        latents, _, history = advance(latents, guided, history, torch.zeros_like(latents), row)
