"""Network input and output scaling, by prediction type (Karras et al. 2022, table 1).

The network input is ``c_in(sigma) * x``, with the training timestep or ``c_noise(sigma) = ln(sigma) / 4``. The denoised
estimate is ``c_skip(sigma) * x + c_out(sigma) * output``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedulers.errors import UnsupportedOption
from schedulers.table import FloatArray

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
                f"prediction_type is {self.prediction_type!r}; known are {', '.join(PREDICTION_TYPES)}."
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

    def told(self, sigma: FloatArray, timestep: FloatArray) -> FloatArray:
        """Return the time input of the network: ``timestep``, or ln(sigma) / 4 for a continuous schedule.

        Args:
            sigma: Noise levels (R,).
            timestep: Training timesteps (R,) of these noise levels.
        """
        return np.asarray(0.25 * np.log(sigma)) if self.is_continuous else timestep
