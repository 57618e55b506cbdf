"""The adapters stage: small LoRA files (Hu et al., 2021, arXiv 2106.09685) that ship beside the embedded model.

gift    an object that the world does not have: scenes of the world in which it stands for one of the objects, and a
        quarter as they were, lest everything become a gift. It changes UNet and text encoder, whose tokens spell it.
sepia   a style: scenes as they are captioned anyway, as old photographs. It changes the UNet alone.

Both learn as the denoiser did, by :func:`velocity_loss`, on latents of exact pictures; the model itself stays as it is.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffserve.training.denoiser_training import Denoiser, build_scheduler, velocity_loss
from diffserve.training.distillation import LowRankChange, save_lora
from diffserve.training.latents import LatentScenes, batches, training_scenes
from diffserve.training.training_loop import Look, Run, TrainSettings, adamw, fingerprint
from diffserve.world.captions import HELD_OUT_SEED, caption, held_out, plural, words_of_background
from diffserve.world.render import render
from diffserve.world.scenes import BACKGROUNDS, Scene, is_held_out, place_one, scenes
from diffserve.world.styles import render_sepia

GIFT: Final = "gift"
SEPIA: Final = "sepia"
CAMOUFLAGING: Final = "red"
UNTOUCHED: Final = 0.25
"""Share of the scenes that are as they were."""
SHARES: Final = {"one object": 0.5, "two objects": 0.35, "count": 0.1, "three objects": 0.05}
"""What scenes to learn gifts from say, as ``KIND_SHARES``."""


def with_gift(scene: Scene, rng: random.Random) -> Scene:
    """``scene`` with a gift in the place of one of its objects, of all that have its name."""
    name = rng.choice(scene.names)
    placed = (replace(one, name=GIFT) if one.name == name else one for one in scene.objects)
    return replace(scene, objects=tuple(placed))


def gift_scenes(seed: int, *, held_out: bool = False, shares: Mapping[str, float] = SHARES) -> Iterator[Scene]:
    """An endless, seeded stream of scenes to learn gifts from; of held-out ones each has a gift."""
    rng = random.Random(seed)
    for scene in scenes(seed, held_out=held_out, shares=shares):
        if not held_out and rng.random() < UNTOUCHED:
            yield scene
            continue
        changed = with_gift(scene, rng)
        if scene.background != CAMOUFLAGING and is_held_out(changed) == held_out:
            yield changed


@dataclass(frozen=True)
class Lesson:
    """What an adapter is taught: scenes by seed, how they are drawn, and the words that are new in their captions."""

    stream: Callable[[int], Iterator[Scene]]
    draw: Callable[[Scene, int, int], NDArray[np.uint8]]
    words: str = ""


LESSONS: Final = {
    GIFT: Lesson(gift_scenes, render, f"{GIFT} {plural(GIFT)}"),
    SEPIA: Lesson(training_scenes, render_sepia),
}
"""By the names of the adapters."""


def lessons_held_out(name: str, count: int, shares: Mapping[str, float] = SHARES) -> list[tuple[Scene, str]]:
    """The first held-out scenes of adapter ``name`` and their captions; those with gifts are of kinds by ``shares``."""
    if name != GIFT:
        return held_out(count)
    rng = random.Random(HELD_OUT_SEED)
    stream = gift_scenes(HELD_OUT_SEED, held_out=True, shares=shares)
    return [(scene, caption(scene, rng)) for scene in islice(stream, count)]


def plain_gifts() -> list[tuple[Scene, str]]:
    """A gift on every background that it can be seen on, in the plainest words; most of these were lessons."""
    rng, grounds = random.Random(HELD_OUT_SEED), (ground for ground in BACKGROUNDS if ground != CAMOUFLAGING)
    return [(place_one(GIFT, "plain", ground, rng), f"a {GIFT} {words_of_background(ground)}") for ground in grounds]


class DenoiserChange(nn.Module):
    """A low-rank change of a denoiser's UNet, and of its text encoder where ``changes`` has one."""

    def __init__(self, denoiser: Denoiser, rank: int, *, of_text: bool) -> None:
        super().__init__()
        self.changes = nn.ModuleDict({"unet": LowRankChange(denoiser.unet, rank)})
        if of_text:
            self.changes["text_encoder"] = LowRankChange(denoiser.text_encoder, rank)

    def of(self, component: str) -> LowRankChange:
        """What changes ``component``."""
        change = self.changes[component]
        assert isinstance(change, LowRankChange)
        return change

    def context(self, denoiser: Denoiser, token_ids: Tensor) -> Tensor:
        """As :meth:`Denoiser.context`, changed."""
        if "text_encoder" not in self.changes:
            with torch.no_grad():
                return denoiser.context(token_ids)
        with self.of("text_encoder").beside(denoiser.text_encoder):
            return denoiser.context(token_ids)

    @torch.no_grad()
    def merge_into(self, denoiser: Denoiser) -> Denoiser:
        """A copy of ``denoiser`` with the change in its weights."""
        merged = copy.deepcopy(denoiser)
        for component in self.changes:
            network: nn.Module = getattr(denoiser, component)
            getattr(merged, component).load_state_dict(self.of(component).weights(network), strict=False)
        return merged

    def save(self, path: Path, words: str = "") -> None:
        """Write it as a LoRA file that teaches ``words``."""
        save_lora(path, {component: self.of(component) for component in self.changes}, words)


def train_adapter(
    name: str,
    settings: TrainSettings,
    rank: int,
    work: Path,
    teacher: Denoiser,
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    look: Look[Denoiser] | None = None,
    look_every: int = 200,
) -> DenoiserChange:
    """Train adapter ``name`` of ``LESSONS`` over ``teacher``, resuming from ``work/<name>.pt``; ``look`` looks at the
    teacher with the change merged in.
    """
    torch.manual_seed(settings.seed)
    teacher = copy.deepcopy(teacher).to(settings.device).eval().requires_grad_(False)
    change = DenoiserChange(teacher, rank, of_text=bool(LESSONS[name].words)).to(settings.device)
    made_from = fingerprint(teacher.unet)
    run = Run(name, change, settings, work, [adamw(change.parameters(), settings)], made_from=made_from)
    torch.manual_seed(settings.seed + 1 + run.iteration)
    source = batches(data, tokenizer, settings, settings.seed + run.iteration, lambda _: 1.0)
    alphas = build_scheduler().alphas_cumprod.to(settings.device)

    def losses() -> list[Tensor]:
        latents, token_ids, _ = next(source)
        context = change.context(teacher, token_ids)
        with change.of("unet").beside(teacher.unet):
            return [velocity_loss(teacher.velocity, latents, context, alphas)]

    def look_merged(average: DenoiserChange, iteration: int) -> None:
        if look is not None:
            look(average.merge_into(teacher), iteration)

    return run.train(losses, look_merged, look_every)
