"""Noise schedules of trained networks, and the scaling of network input and output by prediction type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedulers.errors import BadNoiseSchedule, UnsupportedOption
from schedulers.formulations import check_formulation, edm_range, is_continuous, is_edm
from schedulers.grids import RAMPS
from schedulers.table import FloatArray

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
"""Names of the beta schedules that :func:`make_betas` computes."""

ZERO_SNR_FLOOR = 2.0**-24
"""Replacement for an ``alphas_cumprod`` of exactly 0, as in the sigma-space schedulers of diffusers."""

_MAX_COSINE_BETA = 0.999
_DISTILLED = ("LCMScheduler", "TCDScheduler")
_SMALL_BETAS = (
    *_DISTILLED, "DPMSolverSDEScheduler", "HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
)  # fmt: skip
"""diffusers classes whose betas run from 0.00085 to 0.012 by default instead of from 0.0001 to 0.02."""


def make_betas(schedule: str, num_timesteps: int, beta_start: float, beta_end: float) -> FloatArray:
    """Compute the betas of a named schedule.

    Args:
        schedule: "linear" (Ho et al. 2020), "scaled_linear" (linear in the square root, Rombach et al. 2022) or
            "squaredcos_cap_v2" (cosine, Nichol & Dhariwal 2021).
        num_timesteps: Number of training timesteps T.
        beta_start: First beta; not used by the cosine schedule.
        beta_end: Last beta; not used by the cosine schedule.

    Returns:
        Betas (T,), float64.

    Raises:
        BadNoiseSchedule: If ``num_timesteps`` is below 1.
        UnsupportedOption: If ``schedule`` is unknown.
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
    raise UnsupportedOption(f"beta_schedule is {schedule!r}; choose from {', '.join(BETA_SCHEDULES)}.")


def to_zero_terminal_snr(alphas_cumprod: FloatArray) -> FloatArray:
    """Rescale ``alphas_cumprod`` (T,) to zero terminal SNR.

    The square roots are shifted and scaled such that the last is exactly 0 and the first is unchanged. Source: Lin et
    al. 2023, "Common diffusion noise schedules and sample steps are flawed", algorithm 1.
    """
    root = np.sqrt(alphas_cumprod)
    rescaled = (root - root[-1]) * (root[0] / (root[0] - root[-1]))
    rescaled[-1] = 0.0
    return np.asarray(rescaled**2, dtype=np.float64)


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise schedule and prediction type of a trained network.

    Attributes:
        alphas_cumprod: Signal fractions (T,), float64, strictly descending from near 1 to near 0. The last one may be 0
            (zero terminal SNR); :func:`schedulers.compile_table` clamps it. For a continuous schedule without training
            timesteps the values are 1 / (1 + sigma^2) of T sigmas that cover its range.
        prediction_type: Quantity that the network predicts, see :class:`Preconditioning`.
        sigma_data: Standard deviation of the training data, see there.
        is_continuous: Whether the network takes ln(sigma) / 4 as input instead of a timestep.
        ramp: Default sigma schedule of a range of sigmas; ``None`` for a schedule with timesteps.

    Raises:
        BadNoiseSchedule: If the values do not form a noise schedule.
        UnsupportedOption: If the prediction type is unknown.
    """

    alphas_cumprod: FloatArray
    prediction_type: str = "epsilon"
    sigma_data: float = 1.0
    is_continuous: bool = False
    ramp: str | None = None

    def __post_init__(self) -> None:
        values = np.array(self.alphas_cumprod, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise BadNoiseSchedule(
                f"alphas_cumprod has shape {values.shape}; it must be a list with one number per timestep."
            )
        if not (np.isfinite(values).all() and values[0] < 1.0 and values[-1] >= 0.0 and (np.diff(values) < 0.0).all()):
            raise BadNoiseSchedule(
                f"alphas_cumprod runs from {values[0]} to {values[-1]}; it must decrease strictly and lie in [0, 1)."
            )
        if values.size == 1 and values[0] == 0.0:
            raise BadNoiseSchedule("alphas_cumprod is [0.0]; at least one value must be above 0.")
        _ = self.preconditioning  # validates prediction_type and sigma_data
        values.setflags(write=False)
        object.__setattr__(self, "alphas_cumprod", values)

    @classmethod
    def from_betas(
        cls, betas: Any, prediction_type: str = "epsilon", *, zero_terminal_snr: bool = False
    ) -> NoiseSchedule:
        """Create a schedule from betas.

        Args:
            betas: Betas (T,), each in (0, 1).
            prediction_type: Quantity that the network predicts.
            zero_terminal_snr: Rescale the schedule such that the last timestep is pure noise.

        Raises:
            BadNoiseSchedule: If the betas are empty or outside (0, 1).
        """
        values = np.asarray(betas, dtype=np.float64)
        if values.ndim != 1 or values.size == 0 or not ((values > 0.0) & (values < 1.0)).all():
            raise BadNoiseSchedule("betas must be a list of numbers between 0 and 1, one for each training timestep.")
        products = np.cumprod(1.0 - values, dtype=np.float64)
        return cls(to_zero_terminal_snr(products) if zero_terminal_snr else products, prediction_type)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """Create the schedule that a diffusers ``scheduler_config.json`` describes.

        Args:
            config: Content of the file. Missing fields have the defaults of the class in ``_class_name``.

        Raises:
            UnsupportedOption: If the noise formulation is not supported.
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
        """Create the schedule of a range of sigmas: EDM, or continuous velocity prediction."""
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
        """Input and output scaling of the network."""
        return Preconditioning(self.prediction_type, self.sigma_data, self.is_continuous)

    @property
    def num_timesteps(self) -> int:
        """Number of training timesteps T."""
        return int(self.alphas_cumprod.size)

    @property
    def sigmas(self) -> FloatArray:
        """Noise levels (T,) relative to unit signal, ascending; the last is infinite at zero terminal SNR."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.sqrt((1.0 - self.alphas_cumprod) / self.alphas_cumprod), dtype=np.float64)

    def finite_sigmas(self, floor: float = ZERO_SNR_FLOOR) -> FloatArray:
        """Return the noise levels (T,) with ``floor`` in place of an ``alphas_cumprod`` of exactly 0."""
        clamped = np.where(self.alphas_cumprod == 0.0, floor, self.alphas_cumprod)
        return np.asarray(np.sqrt((1.0 - clamped) / clamped), dtype=np.float64)


PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
"""Prediction types of networks with discrete timesteps."""

EDM = "edm"
"""Prediction type of EDM networks: F in Karras et al. 2022, the negative velocity in units of ``sigma_data``."""


@dataclass(frozen=True)
class Preconditioning:
    """Scaling of the network input and output for one prediction type.

    Attributes:
        prediction_type: "epsilon", "sample", "v_prediction" or "edm".
        sigma_data: Standard deviation of the training data. Values other than 1 are for "v_prediction" and "edm" only.
        is_continuous: Whether the network takes ln(sigma) / 4 as input instead of a training timestep.

    Raises:
        UnsupportedOption: If the prediction type is unknown, or ``sigma_data`` is not valid for it.
    """

    prediction_type: str = "epsilon"
    sigma_data: float = 1.0
    is_continuous: bool = False

    def __post_init__(self) -> None:
        if self.prediction_type not in (*PREDICTION_TYPES, EDM):
            raise UnsupportedOption(
                f"prediction_type is {self.prediction_type!r}; choose from {', '.join(PREDICTION_TYPES)}."
            )
        scaled = self.prediction_type in ("v_prediction", EDM)
        if not (np.isfinite(self.sigma_data) and self.sigma_data > 0.0 and (scaled or self.sigma_data == 1.0)):
            raise UnsupportedOption(
                f"sigma_data is {self.sigma_data} with {self.prediction_type}; it must be positive, "
                "and 1 for types other than v_prediction and edm."
            )

    def factors(self, sigma: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the factors c_in, c_skip and c_out, each (R,), at noise levels ``sigma`` (R,)."""
        c_in = 1.0 / np.hypot(self.sigma_data, sigma)
        if self.prediction_type == "epsilon":
            return c_in, np.ones_like(sigma), -sigma
        if self.prediction_type == "sample":
            return c_in, np.zeros_like(sigma), np.ones_like(sigma)
        slope = self.sigma_data * sigma * c_in
        return c_in, (self.sigma_data * c_in) ** 2, slope if self.prediction_type == EDM else -slope

    def time_input(self, sigma: FloatArray, timestep: FloatArray) -> FloatArray:
        """Return the time input of the network: ``timestep``, or ln(sigma) / 4 for a continuous schedule.

        Args:
            sigma: Noise levels (R,).
            timestep: Training timesteps (R,) of these noise levels.
        """
        return np.asarray(0.25 * np.log(sigma)) if self.is_continuous else timestep
