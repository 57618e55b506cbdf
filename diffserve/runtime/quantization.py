"""Quantization of networks: which layers are quantized and how, and the calibration of activation ranges.

int8: int8 weights of linear layers, float arithmetic. int8_dynamic: linear layers of the UNet multiply in int8, with a
scale per token. int8_static: also convolutions, with measured activation ranges; CPUs only. Text encoders run once per
prompt, so only their weights are int8. VAEs stay in float, because they make the pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

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
"""Layers of a UNet that process one vector per row instead of tokens."""
ONCE_A_PROMPT: Final = "every layer keeps its float dtype, because it runs once per prompt"
THE_PIXELS: Final = "every layer keeps its float dtype, because it creates the pixels"
ENDS: Final = ("conv_in", "conv_out")
NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


class UnquantizedLayers(NamedTuple):
    """Layers of one kind that are not quantized as configured.

    Attributes:
        pattern: Their name, ``*`` for numbers.
        num_layers: How many there are.
        num_parameters: Number of their weights.
        holds: Dtype of the weights.
        reason: Why they are not quantized.
    """

    pattern: str
    num_layers: int
    num_parameters: int
    holds: str
    reason: str


def scheme_for(name: str, layer: nn.Module, target: str) -> tuple[str | None, str]:
    """Return the scheme of the layer ``name`` for the precision ``target``, and the reason for a difference.

    A scheme of ``None`` leaves the layer unchanged.
    """
    if target == INT8_STATIC and isinstance(layer, nn.Conv2d):
        if name in ENDS:
            return None, "reads the input or writes the output, where errors are visible directly"
        return target, ""
    if not isinstance(layer, nn.Linear):
        what = "convolutions" if isinstance(layer, nn.Conv2d) else "embedding tables, which are not multiplied,"
        return None, f"{target} is for linear layers; {what} stay"
    is_of_rows = OF_ROWS.search(name) is not None
    multiple = CUBLAS_MULTIPLE if target == INT8_DYNAMIC else 1
    sides = (layer.in_features, layer.out_features)
    if target != INT8 and is_of_rows:
        why = "reads one vector per row, too few for an int8 product"
    elif any(side % multiple for side in sides):
        why = f"is {sides[0]} x {sides[1]}, and the kernel needs multiples of {multiple}"
    else:
        return target, ""
    return INT8, why


def schemes(network: nn.Module, target: str) -> dict[str, str]:
    """Return the scheme of each layer that is quantized, by name."""
    by_layer = ((name, scheme_for(name, layer, target)[0]) for name, layer in network.named_modules())
    return {name: scheme for name, scheme in by_layer if scheme is not None}


def convert_static(network: nn.Module, ranges: Mapping[str, InputRange]) -> None:
    """Convert the named layers with int8 weights to int8 products with inputs in ``ranges``, one by one."""
    for name, input_range in ranges.items():
        become_static(network.get_submodule(name), input_range)


def quantize_layer(layer: nn.Module, scheme: str) -> None:
    """Quantize the float weight of ``layer``; int8_static layers multiply in float until ``convert_static``."""
    if scheme in (INT8, INT8_STATIC):
        hold_int8_weight(layer)
    else:
        become(layer, Int8DynamicLinear, to_int8(layer.get_parameter("weight").detach()))


def find_unquantized(network: nn.Module, target: str) -> list[UnquantizedLayers]:
    """Return the layers with matrix weights that are not as ``target``, by kind, the largest first."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for name, layer, weight in _weighted(network):
        scheme, reason = scheme_for(name, layer, target)
        is_int8 = weight.dtype == torch.int8
        if is_int8 and scheme == target:
            continue
        holds = INT8 if is_int8 else str(weight.dtype).removeprefix("torch.")
        kinds.setdefault((NUMBER.sub(".*", name), holds, reason), []).append(weight.numel())
    layers = [
        UnquantizedLayers(pattern, len(sizes), sum(sizes), holds, reason)
        for (pattern, holds, reason), sizes in kinds.items()
    ]
    return sorted(layers, key=lambda left: -left.num_parameters)


def describe_unquantized(network: nn.Module, target: str) -> Iterator[str]:
    """Yield a sentence for each reason, with its layers and their share of the network's weights."""
    left = find_unquantized(network, target)
    total = sum(weight.numel() for _, _, weight in _weighted(network))
    for reason in dict.fromkeys(layers.reason for layers in left):
        kinds = [layers for layers in left if layers.reason == reason]
        num_layers, share = sum(kind.num_layers for kind in kinds), sum(kind.num_parameters for kind in kinds) / total
        holds = ", ".join(dict.fromkeys(kind.holds for kind in kinds))
        names = ", ".join(f"{kind.pattern} ({kind.num_layers})" for kind in kinds)
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
INPUT_RANGES: Final = "input-ranges"
CALIBRATION_EDITION: Final = 3
"""Increase it whenever the measured ranges would change, so that cached ones are measured again."""


def prompts_of(world: Vocabulary | None) -> tuple[str, ...]:
    """Return the calibration prompts: plain ones, or for a model of a closed world some of its own."""
    if world is None:
        return PROMPTS
    pairs = zip(world.objects[::9], world.places[::3], strict=False)
    return tuple(f"a {name} in the {place}" for name, place in pairs)[: len(PROMPTS)]


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
    """Return the input range of each layer of ``names`` over trajectories at ``size_px`` (width, height)."""
    reach: dict[str, list[Tensor]] = {name: [] for name in names}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: reach[name].append(torch.stack(torch.aminmax(args[0].float())))

    with ExitStack() as stack:
        for name in reach:
            hook = unet.network.get_submodule(name).register_forward_pre_hook(watch(name))
            stack.callback(hook.remove)
        for number, prompt in enumerate(prompts):
            width_px, height_px = size_px
            conditioning = text.encode(prompt, width_px=width_px, height_px=height_px)
            _denoise(unet, conditioning, schedule, (height_px // factor, width_px // factor), seed=number)
    ranges = {}
    for name, extremes in reach.items():
        ends = torch.stack(extremes)
        ranges[name] = InputRange(min(0.0, float(ends[:, 0].min())), max(0.0, float(ends[:, 1].max())))
    return ranges


def _denoise(
    unet: UNetRunner, conditioning: Conditioning, schedule: NoiseSchedule, cells: tuple[int, int], *, seed: int
) -> None:
    """Run one guided DDIM trajectory, so that hooks observe the layers' inputs."""
    table = compile_table("ddim", schedule, min(NUM_STEPS, schedule.num_timesteps))
    rows = rows_of(table)
    noise = torch.randn((1, unet.latent_channels, *cells), generator=torch.Generator().manual_seed(seed))
    latents = noise * table.init_scale
    history, contexts = new_history(latents), torch.stack([conditioning.uncond, conditioning.cond])
    pooled = (
        None
        if conditioning.pooled_cond is None or conditioning.pooled_uncond is None
        else torch.stack([conditioning.pooled_uncond, conditioning.pooled_cond])
    )
    time_ids = None if conditioning.time_ids is None else conditioning.time_ids.expand(2, -1)
    extra = torch.zeros((2, unet.extra_channels, *cells)) if unet.extra_channels else None
    for number, timestep in enumerate(table.timestep):
        row = rows[number : number + 1]
        both = scale_input(latents, row).expand(2, -1, -1, -1)
        timesteps = torch.full((2,), float(timestep))
        output = unet.predict(both, timesteps, contexts, pooled=pooled, time_ids=time_ids, extra=extra).cpu()
        guided = guide(output[:1], output[1:], torch.tensor([GUIDANCE_SCALE]))
        latents, _, history = advance(latents, guided, history, torch.zeros_like(latents), row)
