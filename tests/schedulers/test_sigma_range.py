"""Tests of ``sigma_range``, against the formulas of k-diffusion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from schedulers import SAMPLERS, BadSigmaRange, NoiseSchedule, compile_table
from schedulers.grids import RAMPS

SCHEDULE = NoiseSchedule.from_config(
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
)


def expected_sigmas(name: str, low: float, high: float, count: int) -> list[float]:
    """Return k-diffusion's ``get_sigmas_karras`` (rho 7) or ``get_sigmas_exponential``, without the final 0."""
    ramp = np.linspace(0, 1, count)
    if name == "karras":
        return list((high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))) ** 7)
    return list(np.exp(math.log(high) + ramp * (math.log(low) - math.log(high))))


@pytest.mark.parametrize("name", ["karras", "exponential"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_the_range_gives_the_sigmas_of_k_diffusion(sampler: str, name: str) -> None:
    table = compile_table(sampler, SCHEDULE, 12, sigma_schedule=name, sigma_range=(0.1, 9.0))
    np.testing.assert_allclose(table.sigma, expected_sigmas(name, 0.1, 9.0, 12), rtol=1e-12)


@pytest.mark.parametrize("name", RAMPS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_single_bound_leaves_the_other_end(sampler: str, name: str) -> None:
    plain = compile_table(sampler, SCHEDULE, 8, sigma_schedule=name)
    bounded = compile_table(sampler, SCHEDULE, 8, sigma_schedule=name, sigma_range=(None, 7.0))
    assert bounded.sigma[0] == pytest.approx(7.0)
    assert bounded.sigma[-1] == pytest.approx(plain.sigma[-1])


def test_other_schedules_ignore_the_range_with_a_warning() -> None:
    plain = compile_table("euler", SCHEDULE, 8)
    bounded = compile_table("euler", SCHEDULE, 8, sigma_range=(0.1, None))
    np.testing.assert_array_equal(bounded.sigma, plain.sigma)
    assert "sigma_min and sigma_max were ignored" in bounded.warnings[-1]


def test_a_range_in_the_wrong_order_is_refused_with_its_values() -> None:
    with pytest.raises(BadSigmaRange, match="sigma_min is 9 and sigma_max 2"):
        compile_table("euler", SCHEDULE, 8, sigma_schedule="karras", sigma_range=(9.0, 2.0))
