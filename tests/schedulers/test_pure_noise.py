"""Schedules that start from pure noise (sigma in the thousands): samplers must not amplify the first estimate.

Higher-order steps there generate garbage in diffusers: Heun below 25 steps, PLMS, and Karras sigmas below 10 steps.
"""

from __future__ import annotations

import diffusers
import numpy as np
import pytest

from schedulers import SAMPLERS, SPACINGS, NoiseSchedule, StepTable, compile_table
from schedulers.grids import PURE_NOISE_SIGMA
from tests.schedulers.diffusers_samplers import COSINE, HO, SD

ZERO_SNR = NoiseSchedule.from_config({**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"})
COSINE_SCHEDULE = NoiseSchedule.from_config(COSINE)
ORDINARY = tuple(NoiseSchedule.from_config(betas) for betas in (SD, HO))
STEPS = (1, 2, 3, 4, 5, 7, 10, 14, 15, 24, 50)
SLIP = 0.02
"""Error of the network's estimate at pure noise, in units of the standard deviation of the image."""


def largest_error(table: StepTable) -> float:
    """Compute the largest error of x caused by estimates that are off by SLIP at pure noise and by -SLIP afterwards.

    The error is in units of the noise in x or of the image, whichever is larger.
    """
    error, history, largest = 0.0, np.zeros(table.b.shape[1] - 1), 0.0
    for row in range(table.num_rows):
        slip = SLIP if table.sigma[row] > PURE_NOISE_SIGMA else -SLIP
        pushed = table.hx[row] * error + table.hd[row] * slip
        error = float(table.a[row] * error + table.b[row, 0] * slip + table.b[row, 1:] @ history)
        history = np.append(pushed, history[:-1])
        largest = max(largest, abs(error) / max(1.0, float(table.sigma_next[row])))
    return largest


@pytest.mark.parametrize("sigma_schedule", [None, "karras", "exponential", "beta"])
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in ("plms", "lcm", "ddpm_large")])
def test_error_at_pure_noise_is_not_amplified(sampler: str, sigma_schedule: str | None) -> None:
    for schedule, counts in ((ZERO_SNR, STEPS), (COSINE_SCHEDULE, STEPS[2::4])):
        for num_steps in counts:
            table = compile_table(sampler, schedule, num_steps, spacing="trailing", sigma_schedule=sigma_schedule)
            assert largest_error(table) < 5.0 * SLIP, (num_steps, largest_error(table))


def test_plms_has_one_row_for_a_first_step_from_pure_noise() -> None:
    table = compile_table("plms", ZERO_SNR, 8, spacing="trailing")
    assert table.num_rows == 8
    assert np.abs(table.b).max() < 5.0
    assert compile_table("plms", ORDINARY[0], 8, spacing="trailing").num_rows == 9


def test_heun_has_one_row_for_a_first_step_from_pure_noise() -> None:
    table = compile_table("heun", ZERO_SNR, 8, spacing="trailing")
    assert np.bincount(table.step_of_row).tolist() == [1, 2, 2, 2, 2, 2, 2, 1]
    assert np.abs(table.b).max() < 2.0


@pytest.mark.parametrize("sigma_schedule", ["karras", "exponential", "beta"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "ddim"])
def test_sigma_schedule_spends_one_step_on_pure_noise(sampler: str, sigma_schedule: str) -> None:
    for spacing in SPACINGS:
        for num_steps in STEPS[1:]:
            table = compile_table(sampler, ZERO_SNR, num_steps, spacing=spacing, sigma_schedule=sigma_schedule)
            assert (table.sigma > PURE_NOISE_SIGMA).sum() <= 1
            assert (np.diff(table.sigma_next) < 0.0).all()
            assert len(table.sigma) == num_steps


def test_first_step_of_a_sigma_schedule_from_pure_noise_matches_trailing_spacing() -> None:
    table = compile_table("dpmpp_2m", ZERO_SNR, 10, sigma_schedule="karras")
    plain = compile_table("dpmpp_2m", ZERO_SNR, 10, spacing="trailing")
    np.testing.assert_allclose(table.sigma[:2], plain.sigma[:2])
    roots = table.sigma[1:] ** (1 / 7)
    np.testing.assert_allclose(np.diff(roots), np.diff(roots)[0])


def test_ordinary_schedules_do_not_reach_pure_noise() -> None:
    for schedule in ORDINARY:
        assert schedule.finite_sigmas()[-1] < PURE_NOISE_SIGMA
    assert np.bincount(compile_table("heun", ORDINARY[1], 4).step_of_row).tolist() == [2, 2, 2, 1]


def test_tables_from_pure_noise_hold_the_invariants() -> None:
    for turn, sampler in enumerate(SAMPLERS):
        for index, sigma_schedule in enumerate((None, "karras", "beta")):
            short_runs = [(schedule, num_steps) for schedule in (ZERO_SNR, COSINE_SCHEDULE) for num_steps in (1, 2, 3)]
            long_run = ((ZERO_SNR, COSINE_SCHEDULE)[(turn + index) % 2], 1000)
            for schedule, num_steps in (*short_runs, long_run):
                compile_table(sampler, schedule, num_steps, spacing="trailing", sigma_schedule=sigma_schedule)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_diffusers_still_evaluates_heun_twice_at_pure_noise() -> None:
    scheduler = diffusers.HeunDiscreteScheduler(**COSINE)
    scheduler.set_timesteps(8)
    assert len(scheduler.timesteps) == 15
    assert float(scheduler.sigmas[0] / scheduler.sigmas[1]) > 1000
