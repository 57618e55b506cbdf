"""Stage two: render training scenes, encode them once, and draw training batches from the latents kept in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from rich.progress import track
from torch import Tensor
from transformers import CLIPTokenizer

from diffserve.embedded.layouts import DIRECTIONS, UNSAID, layout
from diffserve.embedded.training import TrainSettings, fingerprint, keep
from diffserve.embedded.vae_training import to_unit
from diffserve.world.captions import loose_caption
from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, Scene, scenes

CAPTION_DROPOUT = 0.1
# (width, height) in pixels -> share of the training scenes painted at it
CANVASES: dict[tuple[int, int], float] = {(CANVAS_PX, CANVAS_PX): 0.84, (128, 192): 0.08, (192, 128): 0.08}
# how much more often a scene is drawn for what is learnt last: fine lines, several things at once, large ones
FINE_LINES = {
    "bicycle": 6.0,
    "basketball": 2.5,
    "palm tree": 2.0,
    "crab": 2.0,
    "rocket": 2.0,
    "fish": 2.0,
    "sun": 2.0,
    "duck": 1.5,
    "octopus": 1.5,
    "banana": 1.5,
    "donut": 1.5,
    "grapes": 1.5,
}
CROWDS = {"three objects": 2.2, "between": 2.2}
DIRECTED = 1.6
LARGE, PLAIN = 2.0, 1.0


@dataclass(frozen=True)
class LatentScenes:
    """Scenes of one canvas and their latents (N, 8, height / 8, width / 8) in 16 bits."""

    scenes: list[Scene]
    latents: Tensor


def training_scenes(seed: int) -> Iterator[Scene]:
    """An endless, seeded stream of all scenes that are trained on."""
    return scenes(seed, held_out=False)


@torch.inference_mode()
def encode_scenes(
    vae: AutoencoderKL,
    work: Path,
    *,
    num_scenes: int,
    seed: int,
    device: str,
    stream: Callable[[int], Iterator[Scene]] = training_scenes,
) -> list[LatentScenes]:
    """Render and encode ``num_scenes`` scenes of ``stream`` (by seed) in the shares of CANVASES, keeping latents in
    ``work`` for as long as the autoencoder and the scenes are the same."""
    shelves, made_from = [], fingerprint(vae)
    suffix = "" if stream is training_scenes else f"-{stream.__name__}"
    for index, ((width, height), share) in enumerate(CANVASES.items()):
        chosen = list(islice(stream(seed + index), round(num_scenes * share)))
        path = work / f"latents-{width}x{height}-{made_from}{suffix}.pt"
        if path.is_file() and len(latents := torch.load(path, weights_only=True)) == len(chosen):
            shelves.append(LatentScenes(chosen, latents))
            continue
        parts = []
        for start in track(range(0, len(chosen), 32), description=f"latents {width} x {height}"):
            pixels = np.stack([render(scene, width, height) for scene in chosen[start : start + 32]])
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                parts.append(vae.encode(to_unit(pixels).to(device)).latent_dist.mode().half().cpu())
        latents = torch.cat(parts)
        keep(latents, path)
        shelves.append(LatentScenes(chosen, latents))
    return shelves


def channel_statistics(latents: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every latent channel, for the autoencoder's config."""
    flat = latents.float().transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).tolist()


def normalise(latents: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Centre and scale every channel to unit variance."""
    shape = (1, -1, 1, 1)
    return (latents.float() - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


FAVOURITES = {"cat": 2.5, "dog": 2.5, "house": 1.5, "car": 1.5, "pine tree": 1.5, "bear": 1.5, "panda": 1.5}


def tuning_emphasis(scene: Scene) -> float:
    """:func:`emphasis` in the last leg: fine lines, and what people ask for first."""
    return max(max(FINE_LINES.get(name, 1.0), FAVOURITES.get(name, 1.0)) for name in scene.names)


def emphasis(scene: Scene, plain: float = PLAIN) -> float:
    """How often a training scene is drawn, 1 being usual; ``plain``: a single object of plain size."""
    size = {"large": LARGE, "plain": plain}.get(scene.size, 1.0) if scene.kind == "one object" else 1.0
    relation = DIRECTED if scene.relation in DIRECTIONS else 1.0
    return size * relation * CROWDS.get(scene.kind, 1.0) * max(FINE_LINES.get(name, 1.0) for name in scene.names)


class Batches:
    """Random training batches of one canvas each: latents with a caption worded anew, a tenth of them empty.

    A larger canvas comes in smaller batches, so that every iteration costs about the same. ``weigh``: how
    often each scene is drawn.
    """

    def __init__(
        self,
        data: list[LatentScenes],
        tokenizer: CLIPTokenizer,
        settings: TrainSettings,
        seed: int,
        weigh: Callable[[Scene], float] = emphasis,
    ) -> None:
        self._data, self._tokenizer, self._settings = data, tokenizer, settings
        self._rng = random.Random(seed)
        self._emphases = [list(accumulate(weigh(scene) for scene in shelf.scenes)) for shelf in data]

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 8, h, w) float32 latents, (B, MAX_TOKENS) token ids and (B, 2) layouts on the training device."""
        totals = [sums[-1] for sums in self._emphases]
        shelf, sums = self._rng.choices(list(zip(self._data, self._emphases, strict=True)), weights=totals)[0]
        smallest = min(one.latents[0].numel() for one in self._data)
        count = max(1, self._settings.batch_size * smallest // shelf.latents[0].numel())
        chosen = self._rng.choices(range(len(shelf.scenes)), cum_weights=sums, k=count)
        words = [
            "" if self._rng.random() < CAPTION_DROPOUT else loose_caption(shelf.scenes[index], self._rng)
            for index in chosen
        ]
        ids = self._tokenizer(words, padding="max_length", truncation=True, return_tensors="pt").input_ids
        layouts = [layout(shelf.scenes[index]) if text else UNSAID for index, text in zip(chosen, words, strict=True)]
        latents = shelf.latents[torch.tensor(chosen)].float()
        device = self._settings.device
        return latents.to(device), ids.to(device), torch.tensor(layouts, device=device)
