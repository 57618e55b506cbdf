"""How a network is asked and how its answer is read: the three factors and the number that stands for the noise level.

the network sees  c_in(sigma) * x  and  the timestep, or c_noise(sigma) = ln(sigma) / 4
denoised        = c_skip(sigma) * x + c_out(sigma) * output
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedulers.errors import UnsupportedOption
from schedulers.table import FloatArray

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
"""What a network of discrete timesteps may predict."""

EDM = "edm"
"""The network's answer where Karras et al. 2022 write F: minus velocity, in units of ``sigma_data``."""


@dataclass(frozen=True)
class Preconditioning:
    """The only place where prediction types differ.

    prediction_type  "epsilon" | "sample" | "v_prediction" | "edm"
    sigma_data       standard deviation of the data that the factors were chosen for; other than 1 for "v_prediction"
                     and "edm" only
    is_continuous    the network is told ln(sigma) / 4 (Karras et al. 2022, table 1), not a training timestep

    Raises :class:`UnsupportedOption` for a prediction type or a ``sigma_data`` that it does not have.
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
                "and 1 but for velocity and EDM."
            )

    def factors(self, sigma: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(c_in, c_skip, c_out), each (R,), at ``sigma`` (R,)."""
        c_in = 1.0 / np.hypot(self.sigma_data, sigma)
        if self.prediction_type == "epsilon":
            return c_in, np.ones_like(sigma), -sigma
        if self.prediction_type == "sample":
            return c_in, np.zeros_like(sigma), np.ones_like(sigma)
        slope = self.sigma_data * sigma * c_in
        return c_in, (self.sigma_data * c_in) ** 2, slope if self.prediction_type == EDM else -slope

    def told(self, sigma: FloatArray, timestep: FloatArray) -> FloatArray:
        """What the network is told (R,) of rows at ``sigma`` (R,), whose training timesteps are ``timestep`` (R,)."""
        return np.asarray(0.25 * np.log(sigma)) if self.is_continuous else timestep
