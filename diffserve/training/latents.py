"""The latents stage: render training scenes, encode them once, and draw training batches from the latents in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffserve.training.training_loop import TrainSettings, fingerprint, keep
from diffserve.training.vae_training import to_unit
from diffserve.world.captions import loose_caption
from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, GRID_PX, OBJECTS, SIZES_PX, Scene, scenes

TUNING_SHARES: Final = {
    "plain": 0.25,
    "small": 0.09,
    "large": 0.17,
    "high": 0.06,
    "two objects": 0.17,
    "count": 0.05,
    "three objects": 0.11,
    "between": 0.10,
}
"""Sampling weight of each kind of scene in the ``tune`` stage; single objects are split by size."""
MAX_DRIFT_PX: Final = GRID_PX // 2
"""Largest offset of a single object from the center of the canvas: left, right and down."""


def tuning_scenes(seed: int) -> Iterator[Scene]:
    """Yield an endless, seeded stream of training scenes by ``TUNING_SHARES`` that pass :func:`suits`.

    A caption that leaves positions open is a mean of many images to the denoiser, which sometimes generates two of them
    at once. So single objects stand near the middle, and objects named in a row stand in that row from left to right.
    The captions stay true, so all scores stay comparable.
    """
    rng = random.Random(seed)
    streams = {name: _suiting(name, rng.getrandbits(32)) for name in TUNING_SHARES}
    while True:
        yield next(streams[rng.choices(list(TUNING_SHARES), weights=list(TUNING_SHARES.values()))[0]])


def _suiting(name: str, seed: int) -> Iterator[Scene]:
    kind = "one object" if name in SIZES_PX else name
    stream = scenes(seed, held_out=False, shares={kind: 1.0})
    return (scene for scene in stream if suits(scene) and (name not in SIZES_PX or scene.size == name))


def suits(scene: Scene) -> bool:
    """Whether the objects of ``scene`` stand where its shortest caption suggests."""
    if scene.kind == "one object":
        return scene.is_high or _is_central(scene)
    if scene.kind == "between":
        middle, *outer = scene.objects
        return _reads_on((outer[0].x_px, middle.x_px, outer[1].x_px)) and _is_level(scene)
    if scene.kind == "three objects":
        return _reads_on([placed.x_px for placed in scene.objects]) and _is_level(scene)
    if scene.relation == "next to":
        return _reads_on([placed.x_px for placed in scene.objects])
    return True


def _is_central(scene: Scene) -> bool:
    across, down = (at - CANVAS_PX // 2 for at in (scene.objects[0].x_px, scene.objects[0].y_px))
    return abs(across) <= MAX_DRIFT_PX and 0 <= down <= MAX_DRIFT_PX


def _reads_on(places: list[int] | tuple[int, ...]) -> bool:
    return list(places) == sorted(places)


def _is_level(scene: Scene) -> bool:
    heights = [placed.y_px for placed in scene.objects]
    return max(heights) - min(heights) <= GRID_PX


DIRECTIONS: Final = frozenset({"left of", "right of", "above", "below"})
UNSAID: Final = (-100, -100)
"""Layout of a caption without a direction; the loss ignores it."""

READ_TOKENS: Final = 4
LAYOUT_WEIGHT: Final = 0.03
_OBJECT_INDEX: Final = {name: index for index, name in enumerate(OBJECTS)}


def layout(scene: Scene) -> tuple[int, int]:
    """Return the indices of the left (or upper) and the right (or lower) object.

    UNSAID if the scene has no direction or an object that is not in OBJECTS.
    """
    if scene.relation not in DIRECTIONS or not _OBJECT_INDEX.keys() >= set(scene.names):
        return UNSAID
    first, second = (_OBJECT_INDEX[name] for name in scene.names)
    return (first, second) if scene.relation in ("left of", "above") else (second, first)


class LayoutHead(nn.Linear):
    """Auxiliary head that predicts both objects of a layout from the last tokens of hidden states (B, tokens, width).

    The denoising loss hardly separates "a fox with a cat on its right" from "a fox to the right of a cat": the encoder
    is causal, so in the first caption neither noun knows where it stands. The last tokens attend to the whole caption,
    and the UNet attends to them; reading the layout off them takes some hundred iterations to learn. The head is not
    exported.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * len(OBJECTS))

    def loss(self, context: Tensor, layouts: Tensor) -> Tensor:
        """Compute the cross-entropy in nats over the layouts (B, 2) that are not UNSAID; zero if there is none."""
        scores = self(context[:, -READ_TOKENS:]).float().mean(dim=1).view(2 * len(layouts), -1)
        num_known = (layouts >= 0).sum().clamp(min=1)
        return F.cross_entropy(scores, layouts.flatten(), reduction="sum") / num_known


CAPTION_DROPOUT = 0.1
# (width, height) in pixels -> share of the training scenes rendered at it
CANVASES: dict[tuple[int, int], float] = {(CANVAS_PX, CANVAS_PX): 0.84, (128, 192): 0.08, (192, 128): 0.08}
# sampling weights of what is learned last: fine lines, several objects at once, large objects
FINE_LINES = {
    "bicycle": 6.0, "basketball": 2.5, "palm tree": 2.0, "crab": 2.0, "rocket": 2.0, "fish": 2.0, "sun": 2.0,
    "duck": 1.5, "octopus": 1.5, "banana": 1.5, "donut": 1.5, "grapes": 1.5,
}  # fmt: skip
FAVOURITES = {"cat": 2.5, "dog": 2.5, "house": 1.5, "car": 1.5, "pine tree": 1.5, "bear": 1.5, "panda": 1.5}
CROWDS = {"three objects": 2.2, "between": 2.2}
DIRECTED = 1.6
LARGE, PLAIN = 2.0, 1.0


@dataclass(frozen=True)
class LatentScenes:
    """Scenes of one canvas and their latents (N, 8, height / 8, width / 8) in 16 bits."""

    scenes: list[Scene]
    latents: Tensor


def training_scenes(seed: int) -> Iterator[Scene]:
    """Yield an endless, seeded stream of all training scenes."""
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
    draw: Callable[[Scene, int, int], NDArray[np.uint8]] = render,
) -> list[LatentScenes]:
    """Render and encode ``num_scenes`` scenes of ``stream``, with the canvases in the shares of CANVASES.

    Latents are cached in ``work`` by the fingerprint of the autoencoder, the stream and the renderer.

    Args:
        vae: the autoencoder.
        work: directory of the cached latents.
        num_scenes: total over all canvases.
        seed: of the first canvas; the next canvases count up from it.
        device: where to encode.
        stream: scenes by seed.
        draw: renders a scene at (width, height) in pixels.
    """
    shelves, made_from = [], fingerprint(vae)
    suffix = "" if stream is training_scenes else f"-{stream.__name__}"
    suffix += "" if draw is render else f"-{draw.__name__}"
    for index, ((width, height), share) in enumerate(CANVASES.items()):
        selected = list(islice(stream(seed + index), round(num_scenes * share)))
        path = work / f"latents-{width}x{height}-{made_from}{suffix}.pt"
        if path.is_file() and len(latents := torch.load(path, weights_only=True)) == len(selected):
            shelves.append(LatentScenes(selected, latents))
            continue
        parts = []
        for start in track(range(0, len(selected), 32), description=f"latents {width} x {height}"):
            pixels = np.stack([draw(scene, width, height) for scene in selected[start : start + 32]])
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                parts.append(vae.encode(to_unit(pixels).to(device)).latent_dist.mode().half().cpu())
        latents = torch.cat(parts)
        keep(latents, path)
        shelves.append(LatentScenes(selected, latents))
    return shelves


def channel_statistics(latents: Tensor) -> tuple[list[float], list[float]]:
    """Compute mean and standard deviation of every latent channel, for the autoencoder's config."""
    flat = latents.float().transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).tolist()


def normalise(latents: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Center and scale every channel to unit variance."""
    shape = (1, -1, 1, 1)
    return (latents.float() - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


def tuning_emphasis(scene: Scene) -> float:
    """Return the sampling weight of a scene in the tune stage; fine lines and common objects are drawn more often."""
    return max(max(FINE_LINES.get(name, 1.0), FAVOURITES.get(name, 1.0)) for name in scene.names)


def emphasis(scene: Scene, plain: float = PLAIN) -> float:
    """Return the sampling weight of a training scene, usually 1; ``plain`` is that of a single object of plain size."""
    size = {"large": LARGE, "plain": plain}.get(scene.size, 1.0) if scene.kind == "one object" else 1.0
    relation = DIRECTED if scene.relation in DIRECTIONS else 1.0
    return size * relation * CROWDS.get(scene.kind, 1.0) * max(FINE_LINES.get(name, 1.0) for name in scene.names)


def draw_rows(
    rng: random.Random,
    canvases: Sequence[Tensor],
    batch_size: int,
    cum_weights: Sequence[Sequence[float]] | None = None,
    *,
    min_rows: int = 1,
) -> tuple[int, list[int]]:
    """Draw one canvas and rows of it for a batch.

    A larger canvas comes in smaller batches, so that every iteration costs about the same.

    Args:
        rng: source of randomness.
        canvases: each (N, ...).
        batch_size: rows of the smallest canvas.
        cum_weights: cumulative weights of the rows of each canvas; without them all rows are equally likely.
        min_rows: minimum number of rows.

    Returns:
        Index of the canvas and indices of its rows.
    """
    sums = cum_weights or [range(1, len(rows) + 1) for rows in canvases]
    canvas = rng.choices(range(len(canvases)), weights=[of[-1] for of in sums])[0]
    smallest = min(rows[0].numel() for rows in canvases)
    count = max(min_rows, batch_size * smallest // canvases[canvas][0].numel())
    return canvas, rng.choices(range(len(canvases[canvas])), cum_weights=sums[canvas], k=count)


def batches(
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    settings: TrainSettings,
    seed: int,
    weigh: Callable[[Scene], float] = emphasis,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield endless training batches of one canvas each, on the training device.

    ``weigh`` returns the sampling weight of a scene.

    Yields:
        Latents (B, 8, h, w) in float32, token ids (B, MAX_TOKENS) of newly worded captions, a tenth of them empty, and
        layouts (B, 2).
    """
    rng, canvases = random.Random(seed), [shelf.latents for shelf in data]
    sums = [list(accumulate(weigh(scene) for scene in shelf.scenes)) for shelf in data]
    while True:
        canvas, rows = draw_rows(rng, canvases, settings.batch_size, sums)
        selected = [data[canvas].scenes[row] for row in rows]
        words = ["" if rng.random() < CAPTION_DROPOUT else loose_caption(scene, rng) for scene in selected]
        ids = tokenizer(words, padding="max_length", truncation=True, return_tensors="pt").input_ids
        layouts = [layout(scene) if text else UNSAID for scene, text in zip(selected, words, strict=True)]
        latents = canvases[canvas][torch.tensor(rows)].float()
        yield latents.to(settings.device), ids.to(settings.device), torch.tensor(layouts, device=settings.device)
