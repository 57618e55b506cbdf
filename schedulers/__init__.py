"""Diffusion samplers compiled to tables: one row per network evaluation and one update rule for every sampler.

Call :func:`compile_table` to get a :class:`StepTable`, then run it with :mod:`schedulers.update`, the only module that
needs torch. The package does not import diffserve. Random draws happen in the same order as in diffusers.
"""

from __future__ import annotations

from schedulers.compile import compile_table
from schedulers.errors import (
    BadEta,
    BadNoiseSchedule,
    BadNumSteps,
    BadSigmaRange,
    BadStrength,
    InvalidTable,
    ScheduleError,
    UnknownSampler,
    UnknownSpacing,
    UnsupportedOption,
)
from schedulers.grids import SIGMA_SCHEDULES, SPACINGS
from schedulers.noise import PREDICTION_TYPES, NoiseSchedule, Preconditioning
from schedulers.options import TableOptions
from schedulers.samplers import SAMPLERS, Sampler, resolve_sampler
from schedulers.table import COLUMNS, HISTORY, NUM_COLUMNS, StepTable

__all__ = [
    "COLUMNS",
    "HISTORY",
    "NUM_COLUMNS",
    "PREDICTION_TYPES",
    "SAMPLERS",
    "SIGMA_SCHEDULES",
    "SPACINGS",
    "BadEta",
    "BadNoiseSchedule",
    "BadNumSteps",
    "BadSigmaRange",
    "BadStrength",
    "InvalidTable",
    "NoiseSchedule",
    "Preconditioning",
    "Sampler",
    "ScheduleError",
    "StepTable",
    "TableOptions",
    "UnknownSampler",
    "UnknownSpacing",
    "UnsupportedOption",
    "compile_table",
    "resolve_sampler",
]
