"""What the runner keeps for one image in flight: its conditioning, its generator, and what inpainting needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.fields import NoiseSource
from diffserve.runtime.low_rank import LoRASet
from diffserve.runtime.philox import WORD, Draw, normals
from diffserve.runtime.text.conditioning import AnyConditioning
from diffserve.runtime.text.encoding import Conditioning
from diffserve.runtime.transfer import Fetched, send
from diffserve.runtime.unet.controlnet import ControlNetRunner

LEAST_ARC: Final = 1e-4
"""Sine of the angle below which two noises are taken to point the same way."""


@dataclass(frozen=True)
class Repaint:
    """Inpainting with a 4-channel UNet: outside the mask the init image, at the noise level of the moment, is put back.

    mask             (1, h, w) float32, 1 = repaint
    latents, noise   (C, h, w) float32: the encoded init image and the starting noise
    """

    mask: Tensor
    latents: Tensor
    noise: Tensor


@dataclass(frozen=True)
class HeldControl:
    """A ControlNet of one image: what it makes of its picture (C, h, w), and how much of what it adds is taken."""

    network: ControlNetRunner
    hint: Tensor
    scale: float


@dataclass(frozen=True)
class Health:
    """Whether an image's latent was finite after a step (0-based): its place among a tick's answers."""

    answers: Fetched
    place: int
    step_index: int

    @property
    def is_finite(self) -> bool:
        """Waits for the answer."""
        return bool(self.answers.read()[self.place])


@dataclass(frozen=True)
class Refined:
    """What an image takes up when the refiner's UNet goes on with it: what that is told."""

    conditioning: AnyConditioning
    time_ids: Tensor | None


@dataclass
class NoiseStream:
    """The draws of a seed, one after the other: for the start latent first, then for each drawing row, in diffusers'
    order.

    rng        a CPU generator of its own
    next_draw  where noise is counted off on the device instead (``runtime.philox``), the number of the next draw
    """

    rng: torch.Generator
    next_draw: int | None = None

    @classmethod
    def of(cls, seed: int, source: NoiseSource) -> NoiseStream:
        """That of ``seed``, from its beginning."""
        return cls(torch.Generator("cpu").manual_seed(seed), 0 if source == "device" else None)


class Variation(NamedTuple):
    """Draws of another seed, towards which an image's own are turned, by ``strength`` of the way."""

    stream: NoiseStream
    strength: float


@dataclass
class ImageState:
    """What one image holds, given back when it leaves.

    stream  the draws of its seed
    shape   (C, h, w) of its latent
    variation  what these are turned towards, ``None`` where they are left as they are
    extra   (1 + C, h, w) mask and masked image latents, for 9-channel inpainting UNets
    health  of its last step, once it made one
    embedding  (D,) of the prompt, where the finished latents are to be kept for similar ones
    loras   what changes the model for its rows, ``None`` where nothing does
    time_ids  (2, 6) sizes that its conditional and its unconditional row are told instead of the picture's own; (2, 5)
              for SDXL's refiner
    controls  the ControlNets of its recipe, in their order
    texts   what they are told of its prompts, embeddings; ``None`` where there are none
    features  by whether they are of the unconditional row: what the last full call left (F, h, w) for shallow ones
    refined   what is ready for the refiner, until it goes on
    """

    conditioning: AnyConditioning
    stream: NoiseStream
    shape: tuple[int, int, int]
    variation: Variation | None = None
    repaint: Repaint | None = None
    extra: Tensor | None = None
    health: Health | None = None
    embedding: NDArray[np.float32] | None = None
    loras: LoRASet | None = None
    time_ids: Tensor | None = None
    controls: tuple[HeldControl, ...] = ()
    texts: Conditioning | None = None
    features: dict[bool, Tensor] = field(default_factory=dict)
    refined: Refined | None = None

    @property
    def streams(self) -> tuple[NoiseStream, ...]:
        """From which it draws: its own, and that of its variation."""
        return (self.stream,) if self.variation is None else (self.stream, self.variation.stream)

    def mark(self) -> tuple[tuple[Tensor, int | None], ...]:
        """What has been drawn so far, for ``go_back``."""
        return tuple((stream.rng.get_state(), stream.next_draw) for stream in self.streams)

    def go_back(self, mark: tuple[tuple[Tensor, int | None], ...]) -> None:
        """As if nothing had been drawn since ``mark``."""
        for stream, (drawn, next_draw) in zip(self.streams, mark, strict=True):
            stream.rng.set_state(drawn)
            stream.next_draw = next_draw

    def switch(self) -> None:
        """From now on the refiner's UNet evaluates it; what only the base was told is given back, adapters among it."""
        assert self.refined is not None
        self.conditioning.close()
        self.features.clear()
        self.conditioning, self.time_ids = self.refined.conditioning, self.refined.time_ids
        self.loras = self.refined = None

    def close(self) -> None:
        """Give the conditioning's pages back."""
        self.conditioning.close()
        if self.refined is not None:
            self.refined.conditioning.close()


def draw_noise(states: Sequence[ImageState], device: torch.device) -> Tensor:
    """(len(states), C, h, w) float32 on ``device``: the next draw of each, of one shape, in one transfer for
    each source; where there are both, one more brings each to its place. Those that are varied are turned one by one,
    so that nobody's bytes depend on who else is.
    """
    varied = [(place, state.variation) for place, state in enumerate(states) if state.variation is not None]
    streams = [*(state.stream for state in states), *(variation.stream for _, variation in varied)]
    noise = _draws(streams, states[0].shape, device)
    for other, (place, variation) in enumerate(varied, start=len(states)):
        noise[place] = slerp(variation.strength, noise[place], noise[other])
    return noise[: len(states)]


def _draws(streams: Sequence[NoiseStream], shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """(len(streams), C, h, w) float32 on ``device``: the next draw of each."""
    places: tuple[list[int], list[int]] = ([], [])  # of those counted off, and of those from generators
    draws, drawn = [], []
    for place, stream in enumerate(streams):
        if stream.next_draw is not None:
            draws.append(Draw(stream.rng.initial_seed() & WORD, stream.next_draw))  # what the CPU's generator takes
            stream.next_draw += 1
        else:
            drawn.append(torch.randn((1, *shape), generator=stream.rng))
        places[stream.next_draw is None].append(place)
    noise = [normals(draws, math.prod(shape), device).view(-1, *shape)] if draws else []
    noise += [send(torch.cat(drawn), device)] if drawn else []
    if len(noise) == 1:
        return noise[0]
    order = send(torch.argsort(torch.tensor([*places[0], *places[1]])), device)
    return torch.cat(noise).index_select(0, order)


def slerp(share: float, start: Tensor, end: Tensor) -> Tensor:
    """(C, h, w) that lies ``share`` of the way from ``start`` to ``end`` on the arc between them (Shoemake, "Animating
    Rotation with Quaternion Curves", 1985), each column of a channel a vector by itself, as A1111 does it.

    Columns that point the same way stay what they are.
    """
    cosine = (F.normalize(start, dim=1) * F.normalize(end, dim=1)).sum(1, keepdim=True).clamp(-1.0, 1.0)
    angle = torch.acos(cosine)
    whole = torch.sin(angle)
    is_arc = whole > LEAST_ARC
    whole = torch.where(is_arc, whole, 1.0)
    first = torch.where(is_arc, torch.sin((1.0 - share) * angle) / whole, 1.0 - share)
    second = torch.where(is_arc, torch.sin(share * angle) / whole, share)
    return first * start + second * end
