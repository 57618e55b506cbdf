"""State of one image in flight: conditioning, noise generators, and inputs of inpainting and ControlNets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from diffserve.runtime.reference_pages import PagedReference
from diffserve.runtime.text.conditioning import AnyConditioning
from diffserve.runtime.text.encoding import Conditioning
from diffserve.runtime.transfer import Fetched, send
from diffserve.runtime.unet.controlnet import ControlNetRunner

LEAST_ARC: Final = 1e-4
"""Sine of the angle below which two noise vectors count as parallel."""


@dataclass(frozen=True)
class InpaintInputs:
    """Inpainting with a 4-channel UNet: each step restores the init image outside the mask, with that step's noise.

    Attributes:
        mask: (1, h, w) float32, 1 = repaint.
        latents: (C, h, w) float32, the encoded init image.
        noise: (C, h, w) float32, the starting noise.
    """

    mask: Tensor
    latents: Tensor
    noise: Tensor


@dataclass(frozen=True)
class ActiveControl:
    """ControlNet of one image, with its encoded control map (C, h, w) and the scale of its residuals."""

    network: ControlNetRunner
    hint: Tensor
    scale: float


@dataclass(frozen=True)
class Health:
    """Whether an image's latent was finite after a step.

    Attributes:
        answers: Results of a whole tick, possibly still on the device.
        place: Index of the image in ``answers``.
        step_index: The step, from 0.
    """

    answers: Fetched
    place: int
    step_index: int

    @property
    def is_finite(self) -> bool:
        """Whether the latent was finite; waits for the device."""
        return bool(self.answers.read()[self.place])


@dataclass(frozen=True)
class RefinerInputs:
    """Conditioning of each of the image's texts, and time ids, for the refiner's UNet."""

    conditionings: tuple[AnyConditioning, ...]
    time_ids: Tensor | None


@dataclass
class NoiseStream:
    """Sequence of noise draws of one seed: first the start latent, then each drawing row, in the order of diffusers.

    Attributes:
        rng: A CPU generator for this stream only.
        next_draw: Index of the next draw where noise is counter-based (``runtime.philox``), else ``None``.
    """

    rng: torch.Generator
    next_draw: int | None = None

    @classmethod
    def of(cls, seed: int, source: NoiseSource) -> NoiseStream:
        """Return the stream of ``seed`` at its first draw."""
        return cls(torch.Generator("cpu").manual_seed(seed), 0 if source == "device" else None)


class Variation(NamedTuple):
    """Noise of another seed, toward which the image's noise is rotated by the share ``strength``."""

    stream: NoiseStream
    strength: float


@dataclass
class ImageState:
    """State of one image while it has a slot.

    Attributes:
        conditionings: Conditioning of each of the image's texts (``task.texts_of``), for the UNet that evaluates the
            image now.
        stream: Noise of the image's seed.
        shape: (C, h, w) of the latent.
        variation: Noise to rotate toward, or ``None``.
        repaint: Inputs of inpainting with a 4-channel UNet.
        extra: (1 + C, h, w) mask and masked image latents, for 9-channel inpainting UNets.
        health: Result of the latest step, ``None`` before the first.
        embedding: (D,) prompt embedding, where the finished latents are cached for similar prompts.
        loras: Adapters of the image's rows, or ``None``.
        time_ids: (2, 6) sizes for the conditional and the unconditional row that replace the image's size; (2, 5) for
            SDXL's refiner; (tiles, 2, 6 or 5) for tiled images.
        controls: ControlNets of the request, in its order.
        texts: Embeddings of each of the image's texts for ControlNets; empty without ControlNets.
        references: Reference images of the request, in its order.
        features: Features (F, h, w) of the latest full call for shallow calls, by part and view of the row.
        refined: Inputs of the refiner, until the image switches to it.
        outputs: (rows, C, h, w) UNet outputs of the next step's rows, while a part of them is evaluated.
    """

    conditionings: tuple[AnyConditioning, ...]
    stream: NoiseStream
    shape: tuple[int, int, int]
    variation: Variation | None = None
    repaint: InpaintInputs | None = None
    extra: Tensor | None = None
    health: Health | None = None
    embedding: NDArray[np.float32] | None = None
    loras: LoRASet | None = None
    time_ids: Tensor | None = None
    controls: tuple[ActiveControl, ...] = ()
    texts: tuple[Conditioning, ...] = ()
    references: tuple[PagedReference, ...] = ()
    features: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    refined: RefinerInputs | None = None
    outputs: Tensor | None = None

    @property
    def streams(self) -> tuple[NoiseStream, ...]:
        """Streams the image draws from: that of its seed and that of its variation."""
        return (self.stream,) if self.variation is None else (self.stream, self.variation.stream)

    def mark(self) -> tuple[tuple[Tensor, int | None], ...]:
        """Return the positions of all noise streams, for ``go_back``."""
        return tuple((stream.rng.get_state(), stream.next_draw) for stream in self.streams)

    def go_back(self, mark: tuple[tuple[Tensor, int | None], ...]) -> None:
        """Reset all noise streams to ``mark``."""
        for stream, (drawn, next_draw) in zip(self.streams, mark, strict=True):
            stream.rng.set_state(drawn)
            stream.next_draw = next_draw

    def switch(self) -> None:
        """Switch to the refiner's UNet, and release the base model's conditioning, references and adapters."""
        assert self.refined is not None
        self._close_base()
        self.features.clear()
        self.conditionings, self.time_ids = self.refined.conditionings, self.refined.time_ids
        self.loras = self.refined = None

    def close(self) -> None:
        """Release the pages of conditioning and references."""
        self._close_base()
        if self.refined is not None:
            close_all(self.refined.conditionings)

    def _close_base(self) -> None:
        close_all(self.conditionings)
        for reference in self.references:
            reference.close()
        self.references = ()


def close_all(conditionings: Iterable[AnyConditioning]) -> None:
    """Release the pages of all ``conditionings``."""
    for conditioning in conditionings:
        conditioning.close()


def draw_noise(states: Sequence[ImageState], device: torch.device) -> Tensor:
    """Draw the next noise of each state, all of one latent shape.

    Each noise source needs one transfer; with both sources one more restores the order. Variations are computed one by
    one, so that the bytes of an image do not depend on the other images.

    Returns:
        (len(states), C, h, w) float32 on ``device``.
    """
    varied = [(place, state.variation) for place, state in enumerate(states) if state.variation is not None]
    streams = [*(state.stream for state in states), *(variation.stream for _, variation in varied)]
    noise = _draws(streams, states[0].shape, device)
    for other, (place, variation) in enumerate(varied, start=len(states)):
        noise[place] = slerp(variation.strength, noise[place], noise[other])
    return noise[: len(states)]


def _draws(streams: Sequence[NoiseStream], shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Draw the next noise of each stream, (len(streams), C, h, w) float32 on ``device``."""
    places: tuple[list[int], list[int]] = ([], [])  # counter-based streams, then generator streams
    draws, drawn = [], []
    for place, stream in enumerate(streams):
        if stream.next_draw is not None:
            draws.append(Draw(stream.rng.initial_seed() & WORD, stream.next_draw))  # as the CPU generator truncates it
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
    """Return the point (C, h, w) at ``share`` of the arc from ``start`` to ``end``.

    Each column of a channel is a vector of its own, as in A1111. Parallel columns are interpolated linearly. See
    Shoemake, "Animating Rotation with Quaternion Curves", 1985.
    """
    cosine = (F.normalize(start, dim=1) * F.normalize(end, dim=1)).sum(1, keepdim=True).clamp(-1.0, 1.0)
    angle = torch.acos(cosine)
    sine = torch.sin(angle)
    is_arc = sine > LEAST_ARC
    sine = torch.where(is_arc, sine, 1.0)
    first = torch.where(is_arc, torch.sin((1.0 - share) * angle) / sine, 1.0 - share)
    second = torch.where(is_arc, torch.sin(share * angle) / sine, share)
    return first * start + second * end
