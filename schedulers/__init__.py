"""Samplers of diffusion models, compiled to tables: one row per network evaluation, one update for every sampler.

    import json, torch
    from schedulers import NoiseSchedule, compile_table
    from schedulers.update import advance, guide, new_history, rows_of, scale_input

    schedule = NoiseSchedule.from_config(json.load(open("scheduler/scheduler_config.json")))
    table = compile_table("DPM++ 2M Karras", schedule, 20)
    rows = rows_of(table)                                             # (num_rows, NUM_COLUMNS) float32
    generator = torch.Generator("cpu").manual_seed(seed)
    x = table.init_scale * torch.randn(shape, generator=generator)    # text-to-image, shape (1, C, h, w)
    # image-to-image (strength=...):  x = latents + table.sigma[0] * torch.randn(shape, generator=generator)
    history, silent = new_history(x), torch.zeros_like(x)
    for row in range(table.num_rows):                                 # a batch stacks one row of each image's own table
        at = rows[row : row + 1]
        output = network(scale_input(x, at), table.timestep[row])     # guide(uncond, cond, scale) under guidance
        noise = torch.randn(shape, generator=generator) if table.draws[row] else silent
        x, denoised, history = advance(x, output, history, noise, at)
    latents = table.out_scale * x

x lives in sigma coordinates (image + sigma * noise, float32). ``step_of_row`` and ``ends_step`` say which of the user's
steps a row belongs to: heun and pc take two rows for one step, plms one row more than steps. Draws come in diffusers'
order.
Only :mod:`schedulers.update` needs torch; the rest is numpy. Nothing of diffserve is imported here.
"""

from __future__ import annotations

from schedulers.compile import compile_table
from schedulers.errors import (
    BadEta,
    BadNoiseSchedule,
    BadNumSteps,
    BadStrength,
    LawBroken,
    ScheduleError,
    UnknownSampler,
    UnknownSpacing,
    UnsupportedOption,
)
from schedulers.grids import SIGMA_SCHEDULES, SPACINGS
from schedulers.names import resolve_sampler
from schedulers.noise import NoiseSchedule
from schedulers.options import TableOptions
from schedulers.preconditioning import PREDICTION_TYPES, Preconditioning
from schedulers.samplers import SAMPLERS, Sampler
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
    "BadStrength",
    "LawBroken",
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
