"""From a sampler's name, a noise schedule and a step count to a StepTable."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import numpy as np

from schedulers.errors import BadEta, BadNumSteps, BadStrength, UnsupportedOption
from schedulers.grids import DISTILLATION_STEPS, Grid, make_grid
from schedulers.names import resolve_sampler
from schedulers.noise import ZERO_SNR_FLOOR, NoiseSchedule
from schedulers.preconditioning import Preconditioning
from schedulers.samplers import SAMPLERS, Sampler
from schedulers.table import HISTORY, FloatArray, StepTable

EXACT_ZERO_SNR_FLOOR = 2.0**-80
"""Floor where diffusers works with an alphas_cumprod of exactly 0: no different from it even in float64."""

LARGE_VARIANCE_STEPS = 250


def check_num_steps(num_steps: object, length: int) -> int:
    """``num_steps`` as an int from 1 to the training ``length``; raises :class:`BadNumSteps` with the value."""
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
    """First step to run under image-to-image: num_steps - int(num_steps * strength), as in diffusers.

    Raises :class:`BadStrength` outside 0..1 or where no step is left.
    """
    if not (math.isfinite(strength) and 0.0 <= strength <= 1.0):
        raise BadStrength(f"strength is {strength}; it must lie between 0 and 1.")
    run = min(int(num_steps * strength), num_steps)
    if run < 1:
        raise BadStrength(
            f"strength {strength} of {num_steps} steps leaves no step to run; "
            f"give at least {1 / num_steps:.3g}, or more steps."
        )
    return num_steps - run


def check_eta(sampler: Sampler, eta: float | None) -> tuple[float, tuple[str, ...]]:
    """(eta to use, warnings); raises :class:`BadEta` for a value that is negative or not finite."""
    if eta is not None and not (math.isfinite(eta) and eta >= 0.0):
        raise BadEta(f"eta is {eta}; it must be 0 (no fresh noise) or more.")
    if sampler.default_eta is None:
        ignored = () if not eta else (f"eta {eta:g} has no meaning for {sampler.name} and was not used",)
        return 0.0, ignored
    return (sampler.default_eta if eta is None else eta), ()


def _final_sigma(sampler: Sampler, smallest: float, set_alpha_to_one: bool, final_sigmas_type: str) -> float:
    if final_sigmas_type not in ("zero", "sigma_min"):
        raise UnsupportedOption(f"final_sigmas_type is {final_sigmas_type!r}; known are sigma_min, zero.")
    ends_at_zero = {
        "alpha": set_alpha_to_one,
        "sigma": final_sigmas_type == "zero",
        "zero": True,
        "sigma_min": False,
    }[sampler.final]
    return 0.0 if ends_at_zero else smallest


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
) -> StepTable:
    """Compile ``sampler`` for ``num_steps`` steps on ``schedule``.

    sampler            any name :func:`resolve_sampler` knows; a sigma schedule in it is used unless one is given
    num_steps          1 up to the training length
    spacing            "leading" | "linspace" | "quadratic" | "trailing"; ``None``: as diffusers' class by default.
                       lcm has its own timesteps and takes none of them; a range of sigmas has none to space.
    sigma_schedule     "beta" | "exponential" | "karras" | "sgm_uniform" | "simple"; ``None``: those of the timesteps,
                       or the schedule's own ramp
    steps_offset       added to leading timesteps (kept inside the training length)
    set_alpha_to_one   ddim, plms: end at sigma 0, not at the smallest training sigma
    final_sigmas_type  euler, dpmpp_*, unipc: "zero" or "sigma_min"
    distillation_steps lcm, tcd: how many timesteps the model was distilled on, of which the steps are a subset
    eta                ddim, euler_a: share of fresh noise; tcd: its gamma
    strength           image-to-image: share of the steps to run, the last ones
    restart            step (of ``num_steps``) from which another network runs: multistep samplers begin there with an
                       empty history, as a second pipeline of diffusers does

    Raises :class:`ScheduleError` (a ``ValueError``) of the kind that fits, with the value.
    """
    name, named_schedule = resolve_sampler(sampler)
    method = SAMPLERS[name]
    length = schedule.num_timesteps
    steps = check_num_steps(num_steps, length)
    used_eta, warnings = check_eta(method, eta)
    spacing = spacing or method.default_spacing
    sigma_schedule = sigma_schedule or named_schedule
    if schedule.ramp:  # no timesteps that could be spaced
        spacing = "linspace"
        sigma_schedule = sigma_schedule or (None if method.family == "lcm" else schedule.ramp)
    if name == "ddpm_large" and steps < min(LARGE_VARIANCE_STEPS, length):
        warnings += (f"ddpm_large at {steps} steps leaves much noise; take ddpm, or {LARGE_VARIANCE_STEPS} steps",)
    # samplers that only ever scale x lose no digits to a huge sigma; those that add slopes to it would
    exact = method.family in ("ddim", "lcm") and method.order == 1 and schedule.prediction_type != "epsilon"
    train_sigmas = schedule.finite_sigmas(EXACT_ZERO_SNR_FLOOR if exact else ZERO_SNR_FLOOR)
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
    """The table of ``sampler`` on a given grid; :func:`compile_table` ends here."""
    try:
        rows = sampler.write_rows(grid, eta)
        if restart is not None and restart > grid.start:
            before = [row for row in rows if row.step < restart]
            rows = before + sampler.write_rows(replace(grid, start=restart), eta)
    except ValueError as error:
        message = f"eta is {eta}; a step of {sampler.name} would hold more fresh noise than noise in all."
        raise BadEta(message) from error
    names = ("sigma", "timestep", "a", "n", "hx", "hd")
    columns: dict[str, FloatArray] = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    columns["b"] = np.array([row.b + (0.0,) * (HISTORY + 1 - len(row.b)) for row in rows])
    c_in, c_skip, c_out = preconditioning.factors(columns["sigma"])
    columns["timestep"] = preconditioning.told(columns["sigma"], columns["timestep"])
    first, sigma_end = float(columns["sigma"][0]), float(grid.sigmas[-1])
    starts_bare = not sampler.variance_preserving and spacing in ("linspace", "trailing")
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
        init_scale=first if starts_bare else math.hypot(1.0, first),
        out_scale=1.0 / math.hypot(1.0, sigma_end) if sampler.variance_preserving else 1.0,
        keeps_noise=sampler.keeps_noise,
        warnings=warnings,
        **columns,
    )
