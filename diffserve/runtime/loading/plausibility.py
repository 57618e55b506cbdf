"""Plausibility check: whether a model's outputs fit the prediction type in its files.

A white image, which every image model can represent, is noised at three levels and denoised under every reading of the
output. Errors are relative to the best linear estimate, sigma * r / sqrt(sigma^2 + r^2) for latents of root mean square
r. The right reading of a trained network is far below 1 (the embedded model 0.3), wrong readings usually above 1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.runtime.text.encoding import TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import VAERunner
from schedulers import NoiseSchedule, Preconditioning
from schedulers.grids import timesteps_of_sigmas
from schedulers.table import FloatArray

logger = logging.getLogger(__name__)

LEVELS: Final = np.array([1.0, 3.0, 10.0])
WHITE: Final = 240
MOST_CELLS: Final = 32
GOOD: Final = 0.8
"""Relative error below which the best reading is accepted."""

CLEARLY: Final = 0.75
"""Another reading must be better than the declared one by this factor."""

USUAL_BETAS: Final = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
"""Stable Diffusion's schedule, to test whether a model declared with continuous noise expects timesteps."""

PLAUSIBILITY: Final = "plausibility"
LAST_TIMESTEP: Final = 999
PROBE_CELLS: Final = 32
WINDOW_TOKENS: Final = 77


@dataclass(frozen=True)
class Formulation:
    """One way to scale the network's input and to read its output.

    Attributes:
        preconditioning: One of the step tables'; ``None``: flow matching, x = (1 - t) z + t noise at time 1000 t,
            predicting noise - z.
        train_sigmas: (T,) of the training timesteps.
    """

    preconditioning: Preconditioning | None
    train_sigmas: FloatArray

    def scale(self, x: torch.Tensor, sigma: FloatArray) -> tuple[torch.Tensor, FloatArray]:
        """Return the network's input and times for latents ``x`` (3, C, h, w) with noise ``sigma`` (3,)."""
        if self.preconditioning is None:
            return _over(1.0 / (1.0 + sigma)) * x, 1000.0 * sigma / (1.0 + sigma)
        timestep = timesteps_of_sigmas(sigma, self.train_sigmas)
        return _over(self.preconditioning.factors(sigma)[0]) * x, self.preconditioning.time_input(sigma, timestep)

    def read(self, x: torch.Tensor, sigma: FloatArray, output: torch.Tensor) -> torch.Tensor:
        """Return the estimate of the clean latents."""
        if self.preconditioning is None:
            return _over(1.0 / (1.0 + sigma)) * x - _over(sigma / (1.0 + sigma)) * output
        _, c_skip, c_out = self.preconditioning.factors(sigma)
        return _over(c_skip) * x + _over(c_out) * output


@dataclass(frozen=True)
class Plausibility:
    """Relative error of each reading, by name; ``declared`` is the one in the model's files."""

    declared: str
    errors: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.declared not in self.errors:
            raise ValueError(f"no error of the declared reading {self.declared!r}")

    @property
    def best(self) -> str:
        """The reading with the smallest error."""
        return min(self.errors, key=lambda name: self.errors[name])

    @property
    def contradicts(self) -> bool:
        """Whether another reading than the declared one is clearly right."""
        smallest = self.errors[self.best]
        return self.best != self.declared and smallest < min(GOOD, CLEARLY * self.errors[self.declared])

    @property
    def is_plausible(self) -> bool:
        """Whether the network denoises better than a linear estimate under the declared reading."""
        return self.errors[self.declared] < 1.0

    def __str__(self) -> str:
        declared = f"{self.declared} {self.errors[self.declared]:.2f}"
        ranked = sorted((error, name) for name, error in self.errors.items() if name != self.declared)
        return f"{declared}; " + ", ".join(f"{name} {error:.2f}" for error, name in ranked)


def readings(schedule: NoiseSchedule) -> tuple[str, dict[str, Formulation]]:
    """Return the name of the declared reading, and every reading by name, for a model of ``schedule``."""
    betas = NoiseSchedule.from_config(USUAL_BETAS) if schedule.ramp else schedule
    train_sigmas = betas.finite_sigmas()
    by_name = {
        "epsilon": Preconditioning("epsilon"),
        "v_prediction": Preconditioning("v_prediction"),
        "sample": Preconditioning("sample"),
        "continuous v_prediction (CosXL)": Preconditioning("v_prediction", 1.0, True),
        "EDM (Playground 2.5)": Preconditioning("edm", 0.5, True),
    }
    expected = schedule.preconditioning
    declared = next(
        (name for name, how in by_name.items() if how == expected),
        f"{expected.prediction_type} {expected.sigma_data:g}",
    )
    everything = {**by_name, declared: expected, "flow matching": None}
    return declared, {name: Formulation(how, train_sigmas) for name, how in everything.items()}


def probe(
    unet: UNetRunner, vae: VAERunner, text: TextEncoderRunner, schedule: NoiseSchedule, native_px: tuple[int, int]
) -> Plausibility:
    """Denoise the test image under every reading; readings with the same network input share a call."""
    side_px = vae.factor * min(MOST_CELLS, min(native_px) // vae.factor)
    latents = vae.encode(np.full((1, side_px, side_px, 3), WHITE, dtype=np.uint8)).cpu()
    noise = torch.randn(latents.shape, generator=torch.Generator("cpu").manual_seed(0))
    x = latents + _over(LEVELS) * noise
    size = float(latents.square().mean().sqrt())
    linear = LEVELS * size / np.hypot(LEVELS, size)
    declared, formulations = readings(schedule)
    answers: dict[bytes, torch.Tensor] = {}
    errors = {}
    for name, reading in formulations.items():
        shown, times = reading.scale(x, LEVELS)
        key = times.tobytes() + shown.numpy().tobytes()
        if key not in answers:
            answers[key] = _answer(unet, text, shown, times, side_px)
        wrong = (reading.read(x, LEVELS, answers[key]) - latents).square().mean((1, 2, 3)).sqrt().double().numpy()
        error = float(np.exp(np.log(np.maximum(wrong / linear, 1e-9)).mean()))
        errors[name] = error if np.isfinite(error) else 1e9
    return Plausibility(declared, errors)


def _answer(
    unet: UNetRunner, text: TextEncoderRunner, shown: torch.Tensor, times: FloatArray, side_px: int
) -> torch.Tensor:
    """Return the network's output (3, C, h, w) for an empty prompt."""
    empty, rows = text.encode("", width_px=side_px, height_px=side_px), len(shown)
    extra = None
    if unet.extra_channels:
        extra = torch.zeros((rows, unet.extra_channels, *shown.shape[-2:]))
        extra[:, 0] = 1.0  # the mask covers everything

    def repeat(vector: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector is None else vector.expand(rows, *vector.shape)

    return unet.predict(
        shown,
        torch.tensor(times, dtype=torch.float32),
        empty.cond.expand(rows, *empty.cond.shape),
        pooled=repeat(empty.pooled_cond),
        time_ids=repeat(empty.time_ids),
        extra=extra,
    ).cpu()


def _over(values: FloatArray) -> torch.Tensor:
    """Return (3,) values broadcastable over latents (3, C, h, w)."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


def judge(result: Plausibility, location: Path) -> None:
    """Raise ModelLoadError if ``result`` contradicts the files; log a warning if no reading is plausible."""
    if result.contradicts:
        raise ModelLoadError(
            f"{location}: its files say {result.declared}, its UNet behaves like {result.best} (errors in denoising a "
            f"known image: {result}); correct the scheduler's configuration, or set model.probe to false."
        )
    if not result.is_plausible:
        logger.warning(
            "%s denoises a known image no better than a straight line (%s): random, damaged or distilled weights?",
            location,
            result,
        )


def predicts_velocity(unet: UNetRunner, context_width: int) -> bool:
    """Return whether the UNet predicts velocity, from its output for pure noise at the last timestep.

    There the noise is nearly the whole input: a UNet that predicts noise returns its input (cosine near 1), one that
    predicts velocity returns minus the image (cosine near 0).
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((1, unet.latent_channels, PROBE_CELLS, PROBE_CELLS), generator=generator)
    extra = torch.zeros((1, unet.extra_channels, PROBE_CELLS, PROBE_CELLS)) if unet.extra_channels else None
    contexts = torch.zeros((1, WINDOW_TOKENS, context_width))
    output = unet.predict(noise, torch.tensor([LAST_TIMESTEP]), contexts, extra=extra).cpu()
    return bool(F.cosine_similarity(noise.flatten(), output.flatten(), dim=0) < 0.5)
