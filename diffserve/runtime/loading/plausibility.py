"""Does a model answer as its files say? A known picture is denoised at three noise levels, read by every formulation.

The picture is plain white, which every model of pictures knows. Its latent z is noised to x = z + sigma * noise; the
error of the estimate of z is held against that of the best linear one, sigma * r / sqrt(sigma^2 + r^2) for latents of
root mean square r. Read rightly, a trained network is far better than that (the embedded model 0.3); read as something
else it is worse than 1 as a rule; random weights are worse in every reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
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
"""Relative error below which a reading is taken for the right one, if it is the best."""

CLEARLY: Final = 0.75
"""Another reading must be better than the declared one by this factor before it is believed."""

USUAL_BETAS: Final = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
"""Stable Diffusion's, for asking a model of continuous noise whether it rather knows timesteps."""

KEPT_AS: Final = "plausibility"
LAST_TIMESTEP: Final = 999
PROBE_CELLS: Final = 32
WINDOW_TOKENS: Final = 77


@dataclass(frozen=True)
class Formulation:
    """One way to ask the network and to read its answer.

    preconditioning  one that tables serve; ``None``: flow matching, x = (1 - t) z + t noise, told 1000 t, predicting
                     noise - z
    train_sigmas     (T,) of its training timesteps
    """

    preconditioning: Preconditioning | None
    train_sigmas: FloatArray

    def ask(self, x: torch.Tensor, sigma: FloatArray) -> tuple[torch.Tensor, FloatArray]:
        """(what the network sees, what it is told) of latents ``x`` (3, C, h, w) with noise ``sigma`` (3,)."""
        if self.preconditioning is None:
            return _over(1.0 / (1.0 + sigma)) * x, 1000.0 * sigma / (1.0 + sigma)
        timestep = timesteps_of_sigmas(sigma, self.train_sigmas)
        return _over(self.preconditioning.factors(sigma)[0]) * x, self.preconditioning.told(sigma, timestep)

    def read(self, x: torch.Tensor, sigma: FloatArray, output: torch.Tensor) -> torch.Tensor:
        """The estimate of the clean latents."""
        if self.preconditioning is None:
            return _over(1.0 / (1.0 + sigma)) * x - _over(sigma / (1.0 + sigma)) * output
        _, c_skip, c_out = self.preconditioning.factors(sigma)
        return _over(c_skip) * x + _over(c_out) * output


@dataclass(frozen=True)
class Plausibility:
    """Relative error of each reading, by name; ``declared`` is the one that the files name."""

    declared: str
    errors: Mapping[str, float]

    @property
    def best(self) -> str:
        """The reading of the least error."""
        return min(self.errors, key=lambda name: self.errors[name])

    @property
    def contradicts(self) -> bool:
        """The network answers clearly, and as something else than its files say."""
        least = self.errors[self.best]
        return self.best != self.declared and least < min(GOOD, CLEARLY * self.errors[self.declared])

    @property
    def is_plausible(self) -> bool:
        """As declared, the network denoises better than a straight line does."""
        return self.errors[self.declared] < 1.0

    def __str__(self) -> str:
        said = f"{self.declared} {self.errors[self.declared]:.2f}"
        others = sorted((error, name) for name, error in self.errors.items() if name != self.declared)
        return f"{said}; " + ", ".join(f"{name} {error:.2f}" for error, name in others)


def readings(schedule: NoiseSchedule) -> tuple[str, dict[str, Formulation]]:
    """(name of the declared reading, every reading by name) for a model of ``schedule``."""
    betas = NoiseSchedule.from_config(USUAL_BETAS) if schedule.ramp else schedule
    train_sigmas = betas.finite_sigmas()
    known = {
        "epsilon": Preconditioning("epsilon"),
        "v_prediction": Preconditioning("v_prediction"),
        "sample": Preconditioning("sample"),
        "continuous v_prediction (CosXL)": Preconditioning("v_prediction", 1.0, True),
        "EDM (Playground 2.5)": Preconditioning("edm", 0.5, True),
    }
    own = schedule.preconditioning
    declared = next((name for name, how in known.items() if how == own), f"{own.prediction_type} {own.sigma_data:g}")
    everything = {**known, declared: own, "flow matching": None}
    return declared, {name: Formulation(how, train_sigmas) for name, how in everything.items()}


def probe(
    unet: UNetRunner, vae: VAERunner, text: TextEncoderRunner, schedule: NoiseSchedule, native_px: tuple[int, int]
) -> Plausibility:
    """Denoise the known picture in every reading; networks that are asked the same are asked once."""
    side_px = vae.factor * min(MOST_CELLS, min(native_px) // vae.factor)
    latents = vae.encode(np.full((1, side_px, side_px, 3), WHITE, dtype=np.uint8)).cpu()
    noise = torch.randn(latents.shape, generator=torch.Generator("cpu").manual_seed(0))
    x = latents + _over(LEVELS) * noise
    size = float(latents.square().mean().sqrt())
    linear = LEVELS * size / np.hypot(LEVELS, size)
    declared, known = readings(schedule)
    answers: dict[bytes, torch.Tensor] = {}
    errors = {}
    for name, reading in known.items():
        shown, told = reading.ask(x, LEVELS)
        key = told.tobytes() + shown.numpy().tobytes()
        if key not in answers:
            answers[key] = _answer(unet, text, shown, told, side_px)
        wrong = (reading.read(x, LEVELS, answers[key]) - latents).square().mean((1, 2, 3)).sqrt().double().numpy()
        error = float(np.exp(np.log(np.maximum(wrong / linear, 1e-9)).mean()))
        errors[name] = error if np.isfinite(error) else 1e9
    return Plausibility(declared, errors)


def _answer(
    unet: UNetRunner, text: TextEncoderRunner, shown: torch.Tensor, told: FloatArray, side_px: int
) -> torch.Tensor:
    """The network's output (3, C, h, w) for an empty prompt."""
    empty, rows = text.encode("", width_px=side_px, height_px=side_px), len(shown)
    extra = None
    if unet.extra_channels:
        extra = torch.zeros((rows, unet.extra_channels, *shown.shape[-2:]))
        extra[:, 0] = 1.0  # all of it is to be painted

    def repeat(vector: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector is None else vector.expand(rows, *vector.shape)

    return unet.predict(
        shown,
        torch.tensor(told, dtype=torch.float32),
        empty.cond.expand(rows, *empty.cond.shape),
        pooled=repeat(empty.pooled_cond),
        time_ids=repeat(empty.time_ids),
        extra=extra,
    ).cpu()


def _over(values: FloatArray) -> torch.Tensor:
    """(3,) as a column over latents (3, C, h, w)."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


def judge(found: Plausibility, location: Path) -> None:
    """Raise ModelLoadError where ``found`` contradicts the files; log a warning where no reading is plausible."""
    if found.contradicts:
        raise ModelLoadError(
            f"{location}: its files say {found.declared}, its UNet answers like {found.best} (errors in denoising a "
            f"known picture: {found}); mend the scheduler's configuration, or set model.probe to false."
        )
    if not found.is_plausible:
        logger.warning(
            "%s denoises a known picture no better than a straight line (%s): random, damaged or distilled weights?",
            location,
            found,
        )


def kept_or_probed(cache: DiskCache | None, key: str, run: Callable[[], Plausibility]) -> Plausibility:
    """What was kept for ``key``, or else ``run()``, kept from then on."""
    kept = cache.read(KEPT_AS, key) if cache else None
    if isinstance(kept, dict) and isinstance(kept.get("errors"), dict) and kept.get("declared") in kept["errors"]:
        return Plausibility(kept["declared"], {name: float(error) for name, error in kept["errors"].items()})
    found = run()
    if cache:
        cache.write(KEPT_AS, key, {"declared": found.declared, "errors": dict(found.errors)})
    return found


def predicts_velocity(unet: UNetRunner, context_width: int) -> bool:
    """Whether the UNet predicts velocity, from its answer to pure noise at the last timestep.

    There the noise is nearly the whole input: a UNet that predicts noise gives its input back (cosine near 1), one that
    predicts velocity gives minus the picture it imagines (cosine near 0).
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((1, unet.latent_channels, PROBE_CELLS, PROBE_CELLS), generator=generator)
    extra = torch.zeros((1, unet.extra_channels, PROBE_CELLS, PROBE_CELLS)) if unet.extra_channels else None
    contexts = torch.zeros((1, WINDOW_TOKENS, context_width))
    output = unet.predict(noise, torch.tensor([LAST_TIMESTEP]), contexts, extra=extra).cpu()
    return bool(F.cosine_similarity(noise.flatten(), output.flatten(), dim=0) < 0.5)
