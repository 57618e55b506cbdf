"""The noise schedule a network was trained with: how much of the image is left at each training timestep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedulers.errors import BadNoiseSchedule, UnsupportedOption
from schedulers.formulations import check_formulation, edm_range, is_continuous, is_edm
from schedulers.grids import RAMPS
from schedulers.preconditioning import EDM, Preconditioning
from schedulers.table import FloatArray

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")

ZERO_SNR_FLOOR = 2.0**-24
"""What diffusers' sigma-space schedulers put in place of an ``alphas_cumprod`` of exactly 0."""

_MAX_COSINE_BETA = 0.999
_DISTILLED = ("LCMScheduler", "TCDScheduler")
_SMALL_BETAS = (
    *_DISTILLED, "DPMSolverSDEScheduler", "HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
)  # fmt: skip
"""Classes of diffusers whose betas run from 0.00085 to 0.012 by default, not from 0.0001 to 0.02."""


def make_betas(schedule: str, num_timesteps: int, beta_start: float, beta_end: float) -> FloatArray:
    """Betas (T,) of a named schedule: "linear", "scaled_linear" (linear in the root) or "squaredcos_cap_v2" (cosine).

    Raises :class:`UnsupportedOption` for another name, :class:`BadNoiseSchedule` for fewer than one timestep.
    Source: Ho et al. 2020 (linear), Rombach et al. 2022 (scaled_linear), Nichol & Dhariwal 2021 (cosine).
    """
    if num_timesteps < 1:
        raise BadNoiseSchedule(f"num_train_timesteps is {num_timesteps}; a schedule needs at least 1.")
    if schedule == "linear":
        return np.linspace(beta_start, beta_end, num_timesteps, dtype=np.float64)
    if schedule == "scaled_linear":
        roots = np.linspace(math.sqrt(beta_start), math.sqrt(beta_end), num_timesteps, dtype=np.float64)
        return np.asarray(roots * roots, dtype=np.float64)
    if schedule == "squaredcos_cap_v2":
        edges = np.arange(num_timesteps + 1, dtype=np.float64) / num_timesteps
        remaining = np.cos((edges + 0.008) / 1.008 * math.pi / 2) ** 2
        return np.asarray(np.minimum(1.0 - remaining[1:] / remaining[:-1], _MAX_COSINE_BETA), dtype=np.float64)
    raise UnsupportedOption(f"beta_schedule is {schedule!r}; known are {', '.join(BETA_SCHEDULES)}.")


def to_zero_terminal_snr(alphas_cumprod: FloatArray) -> FloatArray:
    """Shift and scale the root of ``alphas_cumprod`` (T,) so that the last is exactly 0 and the first stays.

    Source: Lin et al. 2023, "Common diffusion noise schedules and sample steps are flawed", algorithm 1.
    """
    root = np.sqrt(alphas_cumprod)
    moved = (root - root[-1]) * (root[0] / (root[0] - root[-1]))
    moved[-1] = 0.0
    return np.asarray(moved**2, dtype=np.float64)


@dataclass(frozen=True)
class NoiseSchedule:
    """``alphas_cumprod`` (T,) float64, falling from near 1 to near 0, and what the network predicts.

    The last value may be exactly 0 (zero terminal SNR); samplers clamp it when they compile a table. A model of
    continuous noise has no training timesteps: there the values are 1 / (1 + sigma^2) of T sigmas through its range.

    sigma_data, is_continuous  see :class:`~schedulers.preconditioning.Preconditioning`
    ramp                       sigma schedule by which a range without timesteps is walked, unless one is asked for

    Raises :class:`BadNoiseSchedule` for values that are no schedule, :class:`UnsupportedOption` for a prediction type
    that is not known.
    """

    alphas_cumprod: FloatArray
    prediction_type: str = "epsilon"
    sigma_data: float = 1.0
    is_continuous: bool = False
    ramp: str | None = None

    def __post_init__(self) -> None:
        values = np.array(self.alphas_cumprod, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise BadNoiseSchedule(f"alphas_cumprod has shape {values.shape}; one number for each timestep is needed.")
        if not (np.isfinite(values).all() and values[0] < 1.0 and values[-1] >= 0.0 and (np.diff(values) < 0.0).all()):
            raise BadNoiseSchedule(
                f"alphas_cumprod runs from {values[0]} to {values[-1]}; it must fall strictly, starting below 1."
            )
        if values.size == 1 and values[0] == 0.0:
            raise BadNoiseSchedule("alphas_cumprod is [0.0]; nothing of the image is left at any timestep.")
        _ = self.preconditioning  # raises
        values.setflags(write=False)
        object.__setattr__(self, "alphas_cumprod", values)

    @classmethod
    def from_betas(
        cls, betas: Any, prediction_type: str = "epsilon", *, zero_terminal_snr: bool = False
    ) -> NoiseSchedule:
        """From betas (T,), each in (0, 1); ``zero_terminal_snr`` rescales so that the last timestep is pure noise."""
        values = np.asarray(betas, dtype=np.float64)
        if values.ndim != 1 or values.size == 0 or not ((values > 0.0) & (values < 1.0)).all():
            raise BadNoiseSchedule("betas must be a list of numbers between 0 and 1, one for each training timestep.")
        products = np.cumprod(1.0 - values, dtype=np.float64)
        return cls(to_zero_terminal_snr(products) if zero_terminal_snr else products, prediction_type)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """From the dict of a diffusers ``scheduler_config.json``; what is absent has that class's default.

        Raises :class:`UnsupportedOption` for a formulation that is not served.
        """
        check_formulation(config)
        if is_continuous(config) and (is_edm(config) or config.get("sigma_max") is not None):
            return cls._from_range(config)
        small = config.get("_class_name") in _SMALL_BETAS
        scaled = config.get("_class_name") in _DISTILLED
        name = config.get("beta_schedule", "scaled_linear" if scaled else "linear")
        betas = config.get("trained_betas")
        if betas is None:
            betas = make_betas(
                str(name),
                int(config.get("num_train_timesteps", 1000)),
                float(config.get("beta_start", 0.00085 if small else 0.0001)),
                float(config.get("beta_end", 0.012 if small else 0.02)),
            )
        schedule = cls.from_betas(
            betas,
            str(config.get("prediction_type", "epsilon")),
            zero_terminal_snr=bool(config.get("rescale_betas_zero_snr", False)),
        )
        return replace(schedule, is_continuous=is_continuous(config))

    @classmethod
    def _from_range(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """A range of sigmas: EDM's, or that of continuous velocity prediction."""
        low, high = edm_range(config)
        ramp = "exponential" if config.get("use_exponential_sigmas") else str(config.get("sigma_schedule", "karras"))
        sigmas = RAMPS[ramp](high, low, int(config.get("num_train_timesteps", 1000)))[::-1]
        velocity = config.get("prediction_type", "epsilon") == "v_prediction"
        return cls(
            1.0 / (1.0 + sigmas * sigmas),
            "v_prediction" if velocity else EDM,
            sigma_data=float(config.get("sigma_data", 0.5)) if is_edm(config) else 1.0,
            is_continuous=True,
            ramp=ramp,
        )

    @property
    def preconditioning(self) -> Preconditioning:
        """How the network is asked and its answer read."""
        return Preconditioning(self.prediction_type, self.sigma_data, self.is_continuous)

    @property
    def num_timesteps(self) -> int:
        """The training length T."""
        return int(self.alphas_cumprod.size)

    @property
    def sigmas(self) -> FloatArray:
        """(T,) noise standard deviation over unit signal, rising; infinite at the end of a zero-SNR schedule."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.sqrt((1.0 - self.alphas_cumprod) / self.alphas_cumprod), dtype=np.float64)

    def finite_sigmas(self, floor: float = ZERO_SNR_FLOOR) -> FloatArray:
        """:attr:`sigmas` with a last ``alphas_cumprod`` of exactly 0 taken to be ``floor``."""
        kept = np.where(self.alphas_cumprod == 0.0, floor, self.alphas_cumprod)
        return np.asarray(np.sqrt((1.0 - kept) / kept), dtype=np.float64)
