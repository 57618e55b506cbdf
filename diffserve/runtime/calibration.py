"""What range of activations each layer is given while pictures are painted: for arithmetic with scales fixed before.

A few prompts are painted in a few steps, guided, and every layer's least and largest input is kept. So the ranges are
those of whole trajectories, from pure noise to the picture; an input beyond them is cut off later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from diffserve.disk_cache import DiskCache
from diffserve.models.vocabulary import Vocabulary
from diffserve.runtime.quantised_layers import InputRange
from diffserve.runtime.text.encoding import Conditioning, TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from schedulers import NoiseSchedule, compile_table
from schedulers.update import advance, guide, new_history, rows_of, scale_input

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
