"""Learned step tables: deterministic multistep samplers whose rows were optimized for one model.

A table is a small JSON file. It names the model by the digest of its weights, because the numbers are only good for the
network that they were optimized for. The two invariants of :mod:`schedulers.table` hold approximately: the file
declares by how much, and :class:`schedulers.StepTable` checks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np

from schedulers.errors import InvalidTable
from schedulers.noise import EDM, PREDICTION_TYPES
from schedulers.table import HISTORY, StepTable, image_weights

LEARNED = "learned:"
"""Prefix of the names of learned samplers in requests."""

MAX_RESIDUAL = 1.0
"""Largest deviation from the invariants that a file may declare; a larger one is no sampler of images."""

MAX_ROWS = 1000
MAX_FILE_BYTES = 1 << 20

_COLUMNS = ("sigma", "timestep", "c_in", "c_skip", "c_out", "a", *(f"b{back}" for back in range(HISTORY + 1)))
_SLACK = 1e-6
"""Added to computed residuals before they are declared, because the columns are rounded."""


def is_learned(sampler: str | None) -> TypeGuard[str]:
    """Return whether a sampler name is that of a learned table."""
    return sampler is not None and sampler.startswith(LEARNED)


@dataclass(frozen=True, kw_only=True)
class LearnedSampler:
    """Contents of a learned table's file.

    Attributes:
        name: Name in requests, without the prefix.
        model: Name of the model, for messages.
        model_digest: SHA-256 of the model's weights, 64 hexadecimal digits.
        prediction_type: Prediction type of the network.
        guidance_scale: Guidance scale at which the table was optimized.
        columns: Columns of the table by name: sigma, timestep, c_in, c_skip, c_out, a, b0 to b4; one number per
            evaluation. Rows add no noise and store the denoised estimate in the history.
        residuals: Declared deviations from the two invariants, "image" and "noise", in units of the standard deviation
            of x after the row.
        search: Settings and duration of the search, for the record.
        measured: Results on test prompts and seeds, for the record.

    Raises:
        InvalidTable: A value is missing, malformed or out of range.
    """

    name: str
    model: str
    model_digest: str
    prediction_type: str
    guidance_scale: float
    columns: Mapping[str, list[float]]
    residuals: Mapping[str, float]
    search: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidTable(f"name is {self.name!r}; it must be the name of the learned sampler.")
        if self.prediction_type not in (*PREDICTION_TYPES, EDM):
            raise InvalidTable(f"prediction_type is {self.prediction_type!r}; known are {', '.join(PREDICTION_TYPES)}.")
        digest = self.model_digest
        if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise InvalidTable(f"model_digest is {str(digest)[:80]!r}; it must have 64 hexadecimal digits.")
        if not _is_number(self.guidance_scale) or self.guidance_scale < 1.0:
            raise InvalidTable(f"guidance_scale is {self.guidance_scale!r}; it must be a number of at least 1.")
        self._check_columns()
        for law in ("image", "noise"):
            value = self.residuals.get(law) if isinstance(self.residuals, Mapping) else None
            if value is None or not _is_number(value) or not 0.0 <= value <= MAX_RESIDUAL:
                raise InvalidTable(f"residual {law} is {value!r}; it must lie between 0 and {MAX_RESIDUAL:g}.")
        self.table()

    def _check_columns(self) -> None:
        columns = self.columns
        if not isinstance(columns, Mapping) or set(columns) != set(_COLUMNS):
            column_names = ", ".join(map(str, columns)) if isinstance(columns, Mapping) else repr(columns)[:80]
            raise InvalidTable(f"the columns are {column_names}; they must be {', '.join(_COLUMNS)}.")
        num_rows = self.num_rows
        for name, values in columns.items():
            if not isinstance(values, list) or len(values) != num_rows or not all(map(_is_number, values)):
                raise InvalidTable(f"column {name} must have {num_rows} finite numbers.")
        if not 1 <= num_rows <= MAX_ROWS:
            raise InvalidTable(f"the table has {num_rows} rows; it must have 1 to {MAX_ROWS}.")
        sigmas = columns["sigma"]
        if any(later >= earlier for earlier, later in pairwise(sigmas)):
            raise InvalidTable("column sigma does not fall from row to row.")

    @property
    def num_rows(self) -> int:
        """Number of network evaluations, which is the number of steps."""
        sigmas = self.columns["sigma"]
        return len(sigmas) if isinstance(sigmas, list) else 0

    @property
    def sampler(self) -> str:
        """Name in requests."""
        return LEARNED + self.name

    def table(self, *, warnings: tuple[str, ...] = (), residual: float | None = None) -> StepTable:
        """Return the step table.

        Args:
            warnings: Messages to record in the table.
            residual: Allowed deviation from the invariants; by default the declared one.

        Raises:
            InvalidTable: The table violates an invariant by more than that.
        """
        columns: dict[str, Any] = {name: np.array(self.columns[name], dtype=np.float64) for name in _COLUMNS[:6]}
        num_rows, sigma = self.num_rows, columns["sigma"]
        return StepTable(
            sampler=self.sampler,
            spacing="learned",
            sigma_schedule=None,
            eta=0.0,
            num_steps=num_rows,
            requested_steps=num_rows,
            b=np.column_stack([self.columns[f"b{back}"] for back in range(HISTORY + 1)]).astype(np.float64),
            n=np.zeros(num_rows),
            hx=np.zeros(num_rows),
            hd=np.ones(num_rows),
            draws=np.zeros(num_rows, dtype=np.bool_),
            step_of_row=np.arange(num_rows, dtype=np.int64),
            sigma_end=0.0,
            init_scale=math.hypot(1.0, float(sigma[0])),
            out_scale=1.0,
            residual=max(self.residuals.values()) if residual is None else residual,
            warnings=warnings,
            **columns,
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, list[float]], **facts: Any) -> LearnedSampler:
        """Create a learned sampler and compute its residuals.

        Raises:
            InvalidTable: A residual is larger than ``MAX_RESIDUAL``, or a value is malformed.
        """
        columns = {name: [float(f"{value:.9g}") + 0.0 for value in columns[name]] for name in _COLUMNS}
        widest = cls(columns=columns, residuals=dict.fromkeys(("image", "noise"), MAX_RESIDUAL), **facts)
        return cls(columns=columns, residuals=widest._residuals(), **facts)

    def _residuals(self) -> dict[str, float]:
        table = self.table()
        image = np.abs(image_weights(table) - 1.0) / table.scale_next
        noise = np.abs(np.abs(table.a) * table.sigma - table.sigma_next) / table.scale_next
        return {"image": float(image.max()) + _SLACK, "noise": float(noise.max()) + _SLACK}

    @classmethod
    def from_json(cls, text: str) -> LearnedSampler:
        """Read the contents of a file.

        Raises:
            InvalidTable: The text is not a learned table.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidTable(f"it is not JSON ({error}).") from None
        names = [each.name for each in fields(cls)]
        if not isinstance(content, dict) or not set(content) <= set(names):
            unknown = (
                ", ".join(sorted(set(content) - set(names)))[:200] if isinstance(content, dict) else repr(content)[:80]
            )
            raise InvalidTable(f"it has {unknown}; the fields of a learned sampler are {', '.join(names)}.")
        try:
            return cls(**content)
        except TypeError as error:
            raise InvalidTable(f"it lacks a field of a learned sampler ({error}).") from None

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
