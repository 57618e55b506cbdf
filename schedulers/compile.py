"""Table compiler: turns a sampler name, a noise schedule and a step count into a :class:`StepTable`."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import numpy as np

from schedulers.errors import BadEta, BadNumSteps, BadStrength, UnsupportedOption
from schedulers.grids import DISTILLATION_STEPS, RAMPS, Grid, make_grid
from schedulers.noise import ZERO_SNR_FLOOR, NoiseSchedule, Preconditioning
from schedulers.samplers import SAMPLERS, Sampler, resolve_sampler
from schedulers.table import HISTORY, FloatArray, StepTable

EXACT_ZERO_SNR_FLOOR = 2.0**-80
"""Replacement for an ``alphas_cumprod`` of exactly 0 where diffusers keeps the 0; the results are equal in float64."""

LARGE_VARIANCE_STEPS = 250
"""Number of steps below which ``ddpm_large`` produces a warning about remaining noise."""


def check_num_steps(num_steps: object, length: int) -> int:
    """Validate a step count and return it as an int.

    Args:
        num_steps: Step count from the caller; any integer type except bool.
        length: Number of training timesteps, the largest allowed value.

    Raises:
        BadNumSteps: If the value is not an integer from 1 to ``length``.
    """
    try:
        if isinstance(num_steps, bool):
            raise TypeError
        steps = operator.index(num_steps)  # type: ignore[arg-type]
    except TypeError:
        raise BadNumSteps(f"num_steps is {num_steps!r}; it must be a whole number from 1 to {length}.") from None
    if not 1 <= steps <= length:
        raise BadNumSteps(f"num_steps is {steps}; it must lie between 1 and {length}, the training length.")
    return steps


def start_step(num_steps: int, strength: float) -> int:
    """Return the index of the first step that image-to-image runs, as in diffusers.

    Args:
        num_steps: Number of steps of the whole schedule.
        strength: Fraction of the steps to run, from 0 to 1.

    Returns:
        ``num_steps - int(num_steps * strength)``.

    Raises:
        BadStrength: If ``strength`` is outside 0..1 or leaves no step to run.
    """
    if not (math.isfinite(strength) and 0.0 <= strength <= 1.0):
        raise BadStrength(f"strength is {strength}; it must lie between 0 and 1.")
    steps_to_run = min(int(num_steps * strength), num_steps)
    if steps_to_run < 1:
        raise BadStrength(
            f"strength {strength} of {num_steps} steps leaves no step to run; "
            f"give at least {1 / num_steps:.3g}, or more steps."
        )
    return num_steps - steps_to_run


def check_eta(sampler: Sampler, eta: float | None) -> tuple[float, tuple[str, ...]]:
    """Validate ``eta`` for a sampler and fill in the sampler's default.

    Returns:
        The eta to use, and the warnings to report.

    Raises:
        BadEta: If ``eta`` is negative or not finite.
    """
    if eta is not None and not (math.isfinite(eta) and eta >= 0.0):
        raise BadEta(f"eta is {eta}; it must be 0 (no fresh noise) or more.")
    if sampler.default_eta is None:
        warnings = () if not eta else (f"eta {eta:g} was ignored, because {sampler.name} does not use it",)
        return 0.0, warnings
    return (sampler.default_eta if eta is None else eta), ()


def _final_sigma(sampler: Sampler, smallest: float, set_alpha_to_one: bool, final_sigmas_type: str) -> float:
    if final_sigmas_type not in ("zero", "sigma_min"):
        raise UnsupportedOption(f"final_sigmas_type is {final_sigmas_type!r}; choose from sigma_min, zero.")
    ends_at_zero = {
        "alpha": set_alpha_to_one,
        "sigma": final_sigmas_type == "zero",
        "zero": True,
        "sigma_min": False,
    }[sampler.final]
    return 0.0 if ends_at_zero else smallest


def train_sigmas_of(schedule: NoiseSchedule, *, is_exact: bool) -> FloatArray:
    """Return the noise levels (T,) of the training timesteps, with a finite value at zero terminal SNR.

    ``is_exact`` selects the larger value, which is equivalent to infinity; only for rows that scale x and add nothing
    of its size.
    """
    return schedule.finite_sigmas(EXACT_ZERO_SNR_FLOOR if is_exact else ZERO_SNR_FLOOR)


def compile_table(
    sampler: str,
    schedule: NoiseSchedule,
    num_steps: int,
    *,
    spacing: str | None = "leading",
    sigma_schedule: str | None = None,
    steps_offset: int = 0,
    set_alpha_to_one: bool = True,
    final_sigmas_type: str = "zero",
    distillation_steps: int = DISTILLATION_STEPS,
    eta: float | None = None,
    strength: float = 1.0,
    restart: int | None = None,
    sigma_range: tuple[float | None, float | None] = (None, None),
) -> StepTable:
    """Compile a sampler for a noise schedule and a number of steps.

    Args:
        sampler: Any name that :func:`resolve_sampler` accepts. A sigma schedule in the name ("DPM++ 2M Karras") applies
            unless ``sigma_schedule`` is set.
        schedule: Noise schedule the network was trained with.
        num_steps: Number of sampling steps, from 1 to the training length.
        spacing: "leading", "linspace", "quadratic" or "trailing"; ``None`` selects the default of the sampler's
            diffusers class. Ignored by the lcm family, which has fixed timesteps, and for continuous schedules.
        sigma_schedule: "beta", "exponential", "karras", "sgm_uniform" or "simple"; ``None`` uses the sigmas of the
            timesteps, or ``schedule.ramp`` for continuous schedules.
        steps_offset: Offset added to leading timesteps; lowered if it would exceed the training length.
        set_alpha_to_one: For ddim and plms: end at sigma 0 instead of the smallest training sigma.
        final_sigmas_type: For euler, dpmpp_* and unipc: "zero" or "sigma_min".
        distillation_steps: For lcm and tcd: number of timesteps the model was distilled on. The steps are a subset.
        eta: For ddim and euler_a: fraction of fresh noise. For tcd: gamma.
        strength: For image-to-image: fraction of the steps to run, counted from the end.
        restart: Step from which another network (a refiner) runs. Multistep samplers start there with an empty history,
            as a second diffusers pipeline does.
        sigma_range: Smallest and largest noise level of the schedules beta, exponential and karras, as ``sigma_min``
            and ``sigma_max`` in k-diffusion; ``None``: as without a range. Other schedules ignore it with a warning.

    Returns:
        The compiled table, immutable.

    Raises:
        ScheduleError: A subclass that names the invalid argument and its value. It is a ``ValueError``.

    Example:
        Generate one image::

            from schedulers.update import advance, guide, new_history, rows_of, scale_input

            schedule = NoiseSchedule.from_config(json.load(open("scheduler/scheduler_config.json")))
            table = compile_table("DPM++ 2M Karras", schedule, 20)
            rows = rows_of(table)  # (num_rows, NUM_COLUMNS) float32
            generator = torch.Generator("cpu").manual_seed(seed)
            # Image-to-image starts from latents + table.sigma[0] * torch.randn(...) instead.
            x = table.init_scale * torch.randn(shape, generator=generator)  # (1, C, h, w)
            history, no_noise = new_history(x), torch.zeros_like(x)
            for index in range(table.num_rows):  # a batch stacks one row of each image's table
                row = rows[index : index + 1]
                output = network(scale_input(x, row), table.timestep[index])  # with guidance: guide(...)
                noise = torch.randn(shape, generator=generator) if table.draws[index] else no_noise
                x, denoised, history = advance(x, output, history, noise, row)
            latents = table.out_scale * x
    """
    name, named_schedule = resolve_sampler(sampler)
    method = SAMPLERS[name]
    length = schedule.num_timesteps
    steps = check_num_steps(num_steps, length)
    used_eta, warnings = check_eta(method, eta)
    spacing = spacing or method.default_spacing
    sigma_schedule = sigma_schedule or named_schedule
    if schedule.ramp:  # continuous noise levels: there are no timesteps to space
        spacing = "linspace"
        sigma_schedule = sigma_schedule or (None if method.family == "lcm" else schedule.ramp)
    if name == "ddpm_large" and steps < min(LARGE_VARIANCE_STEPS, length):
        warnings += (f"ddpm_large at {steps} steps leaves much noise; use ddpm, or {LARGE_VARIANCE_STEPS} steps",)
    if sigma_range != (None, None) and sigma_schedule not in RAMPS:
        warnings += (f"sigma_min and sigma_max were ignored, because they need a sigma schedule of {', '.join(RAMPS)}",)
    # First-order samplers that only scale x keep full precision at a huge sigma. Samplers that add slopes do not.
    exact = method.family in ("ddim", "lcm") and method.order == 1 and schedule.prediction_type != "epsilon"
    train_sigmas = train_sigmas_of(schedule, is_exact=exact)
    grid = make_grid(
        method.family,
        train_sigmas,
        steps,
        spacing=spacing,
        sigma_schedule=sigma_schedule,
        steps_offset=steps_offset,
        sigma_end=_final_sigma(method, float(train_sigmas[0]), set_alpha_to_one, final_sigmas_type),
        start=start_step(steps, strength),
        distillation_steps=distillation_steps,
        sigma_range=sigma_range,
    )
    table = table_on_grid(
        method, grid, schedule.preconditioning, spacing, sigma_schedule, used_eta, warnings, restart=restart
    )
    return replace(table, init_scale=math.hypot(1.0, float(table.sigma[0]))) if schedule.ramp else table


def table_on_grid(
    sampler: Sampler,
    grid: Grid,
    preconditioning: Preconditioning,
    spacing: str,
    sigma_schedule: str | None = None,
    eta: float = 0.0,
    warnings: tuple[str, ...] = (),
    *,
    restart: int | None = None,
) -> StepTable:
    """Build the table of a sampler on a given grid; :func:`compile_table` calls this last.

    Args:
        sampler: Sampling method.
        grid: Noise levels and timesteps of the steps.
        preconditioning: Network input and output scaling.
        spacing: Name of the timestep spacing, recorded in the table; also decides ``init_scale``.
        sigma_schedule: Name of the sigma schedule, recorded in the table.
        eta: Fraction of fresh noise, or gamma for tcd.
        warnings: Messages to record in the table.
        restart: Step at which the history of multistep samplers is cleared.

    Raises:
        BadEta: If ``eta`` asks for more noise than a step can hold.
    """
    try:
        rows = sampler.write_rows(grid, eta)
        if restart is not None and restart > grid.start:
            before = [row for row in rows if row.step < restart]
            rows = before + sampler.write_rows(replace(grid, start=restart), eta)
    except ValueError as error:
        message = f"eta is {eta}; a step of {sampler.name} would add more fresh noise than its noise level allows."
        raise BadEta(message) from error
    names = ("sigma", "timestep", "a", "n", "hx", "hd")
    columns: dict[str, Any] = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    columns["b"] = np.array([row.b + (0.0,) * (HISTORY + 1 - len(row.b)) for row in rows])
    c_in, c_skip, c_out = preconditioning.factors(columns["sigma"])
    columns["timestep"] = preconditioning.time_input(columns["sigma"], columns["timestep"])
    first, sigma_end = float(columns["sigma"][0]), float(grid.sigmas[-1])
    starts_at_first_sigma = not sampler.variance_preserving and spacing in ("linspace", "trailing")
    return StepTable(
        sampler=sampler.name,
        spacing="lcm" if sampler.family == "lcm" else spacing,
        sigma_schedule=sigma_schedule,
        eta=eta,
        num_steps=grid.num_steps - grid.start,
        requested_steps=grid.num_steps,
        c_in=c_in,
        c_skip=c_skip,
        c_out=c_out,
        draws=np.array([row.draws for row in rows]),
        step_of_row=np.array([row.step - grid.start for row in rows], dtype=np.int64),
        sigma_end=sigma_end,
        init_scale=first if starts_at_first_sigma else math.hypot(1.0, first),
        out_scale=1.0 / math.hypot(1.0, sigma_end) if sampler.variance_preserving else 1.0,
        keeps_noise=sampler.keeps_noise,
        warnings=warnings,
        **columns,
    )
