"""The adapters stage: training of the small LoRA files that ship with the embedded model.

gift    adds an object that is not in the world; it changes the UNet and the text encoder
sepia   adds a style, old photographs; it changes the UNet only

LoRA: Hu et al., 2021, arXiv 2106.09685. The model's own weights stay unchanged.
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
from diffserve.world.render import render, render_sepia
from diffserve.world.scenes import BACKGROUNDS, Scene, is_held_out, place_one, scenes

GIFT: Final = "gift"
SEPIA: Final = "sepia"
CAMOUFLAGING: Final = "red"
UNTOUCHED: Final = 0.25
"""Share of training scenes without a gift."""
SHARES: Final = {"one object": 0.5, "two objects": 0.35, "count": 0.1, "three objects": 0.05}
"""Shares of the kinds of scenes for training gifts; compare ``KIND_SHARES``."""


def with_gift(scene: Scene, rng: random.Random) -> Scene:
    """Replace all objects of one randomly picked name in ``scene`` by gifts."""
    name = rng.choice(scene.names)
    replaced = (replace(placed, name=GIFT) if placed.name == name else placed for placed in scene.objects)
    return replace(scene, objects=tuple(replaced))


def gift_scenes(seed: int, *, held_out: bool = False, shares: Mapping[str, float] = SHARES) -> Iterator[Scene]:
    """Yield an endless, seeded stream of training scenes with gifts; every held-out scene has a gift."""
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
    """Training data of one adapter: a stream of scenes by seed, their renderer, and the words new to the captions."""

    stream: Callable[[int], Iterator[Scene]]
    draw: Callable[[Scene, int, int], NDArray[np.uint8]]
    words: str = ""


LESSONS: Final = {
    GIFT: Lesson(gift_scenes, render, f"{GIFT} {plural(GIFT)}"),
    SEPIA: Lesson(training_scenes, render_sepia),
}
"""Training data by adapter name."""


def lessons_held_out(name: str, count: int, shares: Mapping[str, float] = SHARES) -> list[tuple[Scene, str]]:
    """Return the first held-out scenes of adapter ``name`` with captions; ``shares`` weights gift scenes by kind."""
    if name != GIFT:
        return held_out(count)
    rng = random.Random(HELD_OUT_SEED)
    stream = gift_scenes(HELD_OUT_SEED, held_out=True, shares=shares)
    return [(scene, caption(scene, rng)) for scene in islice(stream, count)]


def plain_gifts() -> list[tuple[Scene, str]]:
    """Return a gift on every background where it is visible, with a minimal caption; most were training scenes."""
    rng, grounds = random.Random(HELD_OUT_SEED), (ground for ground in BACKGROUNDS if ground != CAMOUFLAGING)
    return [(place_one(GIFT, "plain", ground, rng), f"a {GIFT} {words_of_background(ground)}") for ground in grounds]


class DenoiserChange(nn.Module):
    """Low-rank change of a denoiser's UNet and, with ``of_text``, of its text encoder."""

    def __init__(self, denoiser: Denoiser, rank: int, *, of_text: bool) -> None:
        super().__init__()
        self.changes = nn.ModuleDict({"unet": LowRankChange(denoiser.unet, rank)})
        if of_text:
            self.changes["text_encoder"] = LowRankChange(denoiser.text_encoder, rank)

    def of(self, component: str) -> LowRankChange:
        """Return the low-rank change of ``component``, "unet" or "text_encoder"."""
        change = self.changes[component]
        assert isinstance(change, LowRankChange)
        return change

    def context(self, denoiser: Denoiser, token_ids: Tensor) -> Tensor:
        """Compute the changed text encoder's hidden states; shapes as in :meth:`Denoiser.context`."""
        if "text_encoder" not in self.changes:
            with torch.no_grad():
                return denoiser.context(token_ids)
        with self.of("text_encoder").added_to(denoiser.text_encoder):
            return denoiser.context(token_ids)

    @torch.no_grad()
    def merge_into(self, denoiser: Denoiser) -> Denoiser:
        """Return a copy of ``denoiser`` with the change added to its weights."""
        merged = copy.deepcopy(denoiser)
        for component in self.changes:
            network: nn.Module = getattr(denoiser, component)
            getattr(merged, component).load_state_dict(self.of(component).weights(network), strict=False)
        return merged

    def save(self, path: Path, words: str = "") -> None:
        """Write the change as a LoRA file whose metadata names the new ``words``."""
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
    """Train adapter ``name`` of ``LESSONS`` on top of ``teacher``, resuming from ``work/<name>.pt``.

    ``look`` is called with the teacher after merging the change.
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
        with change.of("unet").added_to(teacher.unet):
            return [velocity_loss(teacher.velocity, latents, context, alphas)]

    def look_merged(average: DenoiserChange, iteration: int) -> None:
        if look is not None:
            look(average.merge_into(teacher), iteration)

    return run.train(losses, look_merged, look_every)
