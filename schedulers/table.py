"""Compiled samplers: :class:`StepTable` has one row per network evaluation.

Every table is checked for two invariants: a noise-free image does not change (:func:`check_fixed_point`), and the noise
in x matches the noise levels of the table (:func:`check_noise_levels`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedulers.errors import InvalidTable

FloatArray = NDArray[np.float64]
"""Array type of noise levels, timesteps and coefficients."""

HISTORY = 4
"""Number of history entries that a row can read."""

COLUMNS = (
    "c_in", "c_skip", "c_out", "timestep", "a", "b0", "b1", "b2", "b3", "b4", "n", "hx", "hd", "sigma", "sigma_next",
)  # fmt: skip
"""Names of the columns of :attr:`StepTable.packed`, in order."""

NUM_COLUMNS = len(COLUMNS)
"""Number of columns of :attr:`StepTable.packed`."""

_TOLERANCE = 1e-9
_CANCELLATION_TOLERANCE = 1e-12


class Row(NamedTuple):
    """Update coefficients of one network evaluation, as written by a sampler.

    The update is::

        x_next = a * x + b[0] * denoised + b[1] * history[0] + b[2] * history[1] + ... + n * noise
        pushed = hx * x + hd * denoised

    Attributes:
        step: Step that the row belongs to.
        sigma: Noise level at which the network is evaluated.
        timestep: Training timestep at which the network is evaluated.
        a: Weight of x.
        b: Weights of the denoised estimate and of the history; at most HISTORY + 1 numbers.
        n: Standard deviation of the fresh noise.
        hx: Weight of x in the value that is pushed onto the history.
        hd: Weight of the denoised estimate in that value.
        draws: Whether the row draws from the random generator.
    """

    step: int
    sigma: float
    timestep: float
    a: float
    b: tuple[float, ...]
    n: float = 0.0
    hx: float = 0.0
    hd: float = 1.0
    draws: bool = False


@dataclass(frozen=True, eq=False)
class StepTable:
    """Sampler compiled for one noise schedule and step count; immutable, so that images can share it.

    Latents are float32 in sigma coordinates, x = image + sigma * noise. Arrays have one entry per network evaluation
    (row), R = num_rows in total.

    Attributes:
        sampler: Canonical name of the sampler.
        spacing: Name of the timestep spacing.
        sigma_schedule: Name of the sigma schedule, or ``None``.
        eta: Fraction of fresh noise, or gamma for tcd.
        num_steps: Steps to run; fewer than ``requested_steps`` for image-to-image.
        requested_steps: Steps of the whole schedule.
        sigma: Noise level (R,) at which the network is evaluated.
        timestep: Time input (R,) of the network.
        c_in: Input scaling (R,); the network input is c_in * x.
        c_skip: Weight (R,) of x in the denoised estimate c_skip * x + c_out * output.
        c_out: Weight (R,) of the network output in the denoised estimate.
        a: Weight (R,) of x in the update, see :class:`Row`.
        b: Weights (R, HISTORY + 1) of the denoised estimate and of the history.
        n: Standard deviation (R,) of the fresh noise.
        hx: Weight (R,) of x in the value pushed onto the history.
        hd: Weight (R,) of the denoised estimate in that value.
        draws: Whether (R,) the row draws one latent-shaped tensor from the image's generator. Some rows draw although n
            is 0, as in diffusers.
        step_of_row: Step (R,) of each row. Heun and predictor-corrector have two rows per step; PLMS has one extra row.
        sigma_end: Noise level after the last row.
        init_scale: Text-to-image starts from init_scale * noise. Image-to-image starts from latents + sigma[0] * noise.
        out_scale: The final latents are out_scale * x.
        keeps_noise: Whether the noise levels are checked; False for ddpm_large, which adds more noise.
        residual: Largest allowed deviation from the two invariants, in units of the standard deviation of x after the
            row. 0 for exact samplers; a learned table declares its own.
        warnings: Messages for the user.
        packed: All columns as float32 (R, NUM_COLUMNS), see :data:`COLUMNS`.

    Raises:
        InvalidTable: If a row changes a noise-free image, does not match its noise level, or reads an unset history
        entry.
    """

    sampler: str
    spacing: str
    sigma_schedule: str | None
    eta: float
    num_steps: int
    requested_steps: int
    sigma: FloatArray
    timestep: FloatArray
    c_in: FloatArray
    c_skip: FloatArray
    c_out: FloatArray
    a: FloatArray
    b: FloatArray
    n: FloatArray
    hx: FloatArray
    hd: FloatArray
    draws: NDArray[np.bool_]
    step_of_row: NDArray[np.int64]
    sigma_end: float
    init_scale: float
    out_scale: float
    keeps_noise: bool = True
    residual: float = 0.0
    warnings: tuple[str, ...] = ()
    packed: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_shapes()
        check_fixed_point(self)
        if self.keeps_noise:
            check_noise_levels(self)
        object.__setattr__(self, "packed", self.columns.astype(np.float32))
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def _check_shapes(self) -> None:
        rows = self.num_rows
        if rows == 0 or self.b.shape != (rows, HISTORY + 1):
            raise InvalidTable(
                f"b has shape {self.b.shape} in a table of {rows} rows; it must be (rows, {HISTORY + 1})."
            )
        for name in ("sigma", "timestep", "c_in", "c_skip", "c_out", "a", "b", "n", "hx", "hd"):
            value = getattr(self, name)
            if value.shape[0] != rows or not np.isfinite(value).all():
                raise InvalidTable(
                    f"column {name} of {self.sampler} has shape {value.shape}, or a value that is not finite."
                )
        if not (self.sigma > 0.0).all() or self.sigma_end < 0.0:
            raise InvalidTable(f"{self.sampler} has a noise level that is not positive.")

    @property
    def num_rows(self) -> int:
        """Number of network evaluations, without the doubling by guidance."""
        return int(self.sigma.shape[0])

    @property
    def sigma_next(self) -> FloatArray:
        """Noise level (R,) of x after each row: sigma of the next row, or ``sigma_end``."""
        return np.append(self.sigma[1:], self.sigma_end)

    @property
    def scale_next(self) -> FloatArray:
        """Standard deviation (R,) of x after each row, for data of unit variance."""
        return np.hypot(1.0, self.sigma_next)

    @property
    def columns(self) -> FloatArray:
        """All columns as float64 (R, NUM_COLUMNS), see :data:`COLUMNS`."""
        before_b = [self.c_in, self.c_skip, self.c_out, self.timestep, self.a]
        after_b = [self.n, self.hx, self.hd, self.sigma, self.sigma_next]
        return np.column_stack([*before_b, self.b, *after_b])


def check_fixed_point(table: StepTable) -> None:
    """Check that a noise-free image does not change if the network predicts it exactly.

    For each row, a + b0 + the sum of b_j * (hx + hd of the row that pushed history entry j) must be 1, or differ by no
    more than ``residual``.

    Raises:
        InvalidTable: If a row violates this, or reads a history entry that no earlier row pushed.
    """
    total, scale = image_weights(table), np.abs(table.a) + np.abs(table.b).sum(axis=1)
    slack = table.residual * table.scale_next
    wrong = np.flatnonzero(np.abs(total - 1.0) > _TOLERANCE * np.maximum(scale, 1.0) + slack)
    if wrong.size:
        row = int(wrong[0])
        allowed = f"; the factor must be 1 within {slack[row]:g}." if table.residual else "; the factor must be 1."
        raise InvalidTable(f"row {row} of {table.sampler} scales a noise-free image by {total[row]}{allowed}")


def image_weights(table: StepTable) -> FloatArray:
    """Compute the factor (R,) by which each row scales a noise-free image that the network predicts exactly.

    Raises:
        InvalidTable: If a row reads a history entry that no earlier row pushed.
    """
    pushed = table.hx + table.hd
    total = table.a + table.b[:, 0]
    for back in range(1, HISTORY + 1):
        if table.b[:back, back].any():
            row = int(np.flatnonzero(table.b[:back, back])[0])
            raise InvalidTable(
                f"row {row} of {table.sampler} reads history entry {back}, which no earlier row has written."
            )
        total[back:] += table.b[back:, back] * pushed[:-back]
    return total


def check_noise_levels(table: StepTable) -> None:
    """Check that x contains noise of exactly ``sigma_next`` after each row if the denoiser is perfect.

    Without noise in the history the condition is (a * sigma)^2 + n^2 = sigma_next^2. Samplers that push x (hx != 0)
    store noise in the history; for them the noise is propagated through all rows.

    Raises:
        InvalidTable: If the noise after a row differs from ``sigma_next`` by more than ``residual`` allows.
    """
    noise, slack = np.hypot(table.a * table.sigma, table.n), 0.0
    if table.hx.any():
        # Large coefficients that nearly cancel (very small steps) amplify rounding errors.
        scale = (np.abs(table.a) + np.abs(table.b).sum(axis=1)).max()
        noise, slack = propagate_noise(table), _CANCELLATION_TOLERANCE * float(table.sigma[0] * max(scale, 1.0))
    allowed = _TOLERANCE * table.sigma_next + slack + table.residual * table.scale_next
    wrong = np.flatnonzero(np.abs(noise - table.sigma_next) > allowed)
    if wrong.size:
        row = int(wrong[0])
        raise InvalidTable(
            f"row {row} of {table.sampler} leaves noise of {noise[row]}; it must be {table.sigma_next[row]}."
        )


def propagate_noise(table: StepTable) -> FloatArray:
    """Compute the standard deviation (R,) of the noise in x after each row, for a perfect denoiser.

    The state (x and the history) is stored as coefficients of the independent noise sources: the initial noise and each
    draw.
    """
    fresh = np.flatnonzero(table.n)
    column_of = {int(row): 1 + k for k, row in enumerate(fresh)}
    state = np.zeros((1 + HISTORY, 1 + fresh.size))
    state[0, 0] = table.sigma[0]
    noise = np.empty(table.num_rows)
    for row in range(table.num_rows):
        x = table.a[row] * state[0] + table.b[row, 1:] @ state[1:]
        if row in column_of:
            x[column_of[row]] += table.n[row]
        state[2:] = state[1:-1]
        state[1] = table.hx[row] * state[0]
        state[0] = x
        noise[row] = float(np.sqrt(x @ x))
    return noise
