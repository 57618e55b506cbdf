"""StepTable: a compiled sampler, one row per evaluation of the network, and the two laws that every table keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedulers.errors import LawBroken

FloatArray = NDArray[np.float64]
"""The array that everything here is made of."""


HISTORY = 4
"""How many earlier pushes a row can read."""

COLUMNS = (
    "c_in", "c_skip", "c_out", "timestep", "a", "b0", "b1", "b2", "b3", "b4", "n", "hx", "hd", "sigma", "sigma_next",
)  # fmt: skip
"""Names of the columns of :attr:`StepTable.packed`, in order."""

NUM_COLUMNS = len(COLUMNS)

_TOLERANCE = 1e-9
_CANCELLATION = 1e-12


class Row(NamedTuple):
    """What a sampler writes for one evaluation; ``b`` may be shorter than ``HISTORY + 1``.

    x_next = a * x + b[0] * denoised + b[1] * history[0] + b[2] * history[1] + ... + n * noise
    pushed = hx * x + hd * denoised              (x as it was before this row)
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
    """A sampler compiled for one noise schedule and step count; immutable, shared freely between images.

    Latents live in sigma coordinates: x = image + sigma * noise. R = num_rows evaluations, in order.

        sigma, timestep     (R,) where the network is evaluated
        c_in, c_skip, c_out (R,) network input = c_in * x; denoised = c_skip * x + c_out * output
        a, b, n             (R,), (R, HISTORY + 1), (R,) the update, see :class:`Row`
        hx, hd              (R,) what is pushed onto the history after the row
        draws               (R,) bool: one latent-shaped draw from the image's generator belongs to this row (even
                            where n is 0: diffusers draws there too)
        step_of_row         (R,) int: which of the ``num_steps`` steps the row belongs to
        sigma_end           noise level after the last row
        init_scale          text-to-image starts from init_scale * noise; image-to-image from latents + sigma[0] * noise
        out_scale           final latents = out_scale * x
        requested_steps     the step count asked for; ``num_steps`` of them are run (fewer under image-to-image)
        keeps_noise         False only where the method itself breaks the noise law (ddpm_large)

    Raises :class:`LawBroken` when a row moves an image at rest, loses count of the noise, or reads what nobody wrote.
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
    warnings: tuple[str, ...] = ()
    packed: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_shapes()
        check_rest_law(self)
        if self.keeps_noise:
            check_noise_law(self)
        object.__setattr__(self, "packed", self.columns.astype(np.float32))
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def _check_shapes(self) -> None:
        rows = self.num_rows
        if rows == 0 or self.b.shape != (rows, HISTORY + 1):
            raise LawBroken(f"a table of {rows} rows with b of shape {self.b.shape}; (rows, {HISTORY + 1}) is needed.")
        for name in ("sigma", "timestep", "c_in", "c_skip", "c_out", "a", "b", "n", "hx", "hd"):
            value = getattr(self, name)
            if value.shape[0] != rows or not np.isfinite(value).all():
                raise LawBroken(f"column {name} of {self.sampler}: shape {value.shape}, or a value that is not finite.")
        if not (self.sigma > 0.0).all() or self.sigma_end < 0.0:
            raise LawBroken(f"{self.sampler} evaluates at a noise level that is not positive.")

    @property
    def num_rows(self) -> int:
        """Evaluations of the network in all (guidance doubles them again)."""
        return int(self.sigma.shape[0])

    @property
    def sigma_next(self) -> FloatArray:
        """(R,) noise level of x after each row: the next row's sigma, at last ``sigma_end``."""
        return np.append(self.sigma[1:], self.sigma_end)

    @property
    def columns(self) -> FloatArray:
        """(R, NUM_COLUMNS) float64, as :data:`COLUMNS` names them; ``packed`` is this in float32."""
        before_b = [self.c_in, self.c_skip, self.c_out, self.timestep, self.a]
        after_b = [self.n, self.hx, self.hd, self.sigma, self.sigma_next]
        return np.column_stack([*before_b, self.b, *after_b])

    @property
    def ends_step(self) -> NDArray[np.bool_]:
        """(R,) bool: the row completes its step, so progress may be reported after it."""
        return np.append(self.step_of_row[1:] != self.step_of_row[:-1], True)


def check_rest_law(table: StepTable) -> None:
    """An image without noise stays: a + b0 + sum of b_j times the rest value (hx + hd) of what it reads is 1."""
    rest = table.hx + table.hd
    total = table.a + table.b[:, 0]
    scale = np.abs(table.a) + np.abs(table.b).sum(axis=1)
    for back in range(1, HISTORY + 1):
        if table.b[:back, back].any():
            row = int(np.flatnonzero(table.b[:back, back])[0])
            raise LawBroken(f"row {row} of {table.sampler} reads history entry {back}, which nobody has written yet.")
        total[back:] += table.b[back:, back] * rest[:-back]
    wrong = np.flatnonzero(np.abs(total - 1.0) > _TOLERANCE * np.maximum(scale, 1.0))
    if wrong.size:
        row = int(wrong[0])
        raise LawBroken(f"row {row} of {table.sampler} scales an image at rest by {total[row]}, not by 1.")


def check_noise_law(table: StepTable) -> None:
    """With a perfect denoiser x holds noise of exactly ``sigma_next`` after each row.

    Without noise in the history this is (a * sigma)^2 + n^2 = sigma_next^2. A sampler that pushes x itself (hx != 0)
    keeps some of the noise there, so it is propagated through the rows, one component for each independent source.
    """
    carried, slack = np.hypot(table.a * table.sigma, table.n), 0.0
    if table.hx.any():
        scale = (np.abs(table.a) + np.abs(table.b).sum(axis=1)).max()  # of what cancels: steps that all but stand still
        carried, slack = propagate_noise(table), _CANCELLATION * float(table.sigma[0] * max(scale, 1.0))
    wrong = np.flatnonzero(np.abs(carried - table.sigma_next) > _TOLERANCE * table.sigma_next + slack)
    if wrong.size:
        row = int(wrong[0])
        raise LawBroken(
            f"row {row} of {table.sampler} leaves noise of {carried[row]}, not of {table.sigma_next[row]} as it says."
        )


def propagate_noise(table: StepTable) -> FloatArray:
    """(R,) standard deviation of the noise in x after each row, for a denoiser that always finds the true image.

    The state (x, then HISTORY pushes) is kept as coefficients of the independent sources: the start and each draw.
    """
    fresh = np.flatnonzero(table.n)
    column_of = {int(row): 1 + k for k, row in enumerate(fresh)}
    state = np.zeros((1 + HISTORY, 1 + fresh.size))
    state[0, 0] = table.sigma[0]
    carried = np.empty(table.num_rows)
    for row in range(table.num_rows):
        x = table.a[row] * state[0] + table.b[row, 1:] @ state[1:]
        if row in column_of:
            x[column_of[row]] += table.n[row]
        state[2:] = state[1:-1]
        state[1] = table.hx[row] * state[0]
        state[0] = x
        carried[row] = float(np.sqrt(x @ x))
    return carried
