"""Order of convergence on Gaussian data, for which the ideal denoiser and the exact flow are known."""

from __future__ import annotations

import numpy as np
import pytest

from schedulers import SAMPLERS, Preconditioning
from schedulers.compile import table_on_grid
from schedulers.grids import Grid
from schedulers.multistep import lagrange_moves
from schedulers.singlestep import LANGEVIN_SNR
from schedulers.table import HISTORY, StepTable

SPREAD = 0.6
"""Standard deviation of the data."""

HIGH, LOW = 8.0, 0.05
STEPS = (20, 40, 80, 160, 320)


def grid_of(num_steps: int, even_in: str) -> Grid:
    """Return a grid of ``num_steps`` steps from HIGH to LOW, even in log sigma or sigma, and a last step of size 0."""
    space = np.geomspace if even_in == "log" else np.linspace
    sigmas = space(HIGH, LOW, num_steps + 1)
    return Grid(np.append(sigmas, sigmas[-1]), np.arange(num_steps + 1, 0, -1, dtype=np.float64))


def moments(table: StepTable, start_mean: float, start_variance: float) -> tuple[float, float]:
    """Compute the mean and variance of x at LOW for data N(0, SPREAD^2); both are exact because the rows are linear."""
    mean = np.zeros(1 + HISTORY)
    mean[0] = start_mean
    spread = np.zeros((1 + HISTORY, 1 + HISTORY))
    spread[0, 0] = start_variance
    for row in range(int(np.flatnonzero(table.step_of_row == table.num_steps - 1)[0])):
        shrink = SPREAD**2 / (SPREAD**2 + table.sigma[row] ** 2)
        move = np.zeros((1 + HISTORY, 1 + HISTORY))
        move[0] = np.append(table.a[row] + table.b[row, 0] * shrink, table.b[row, 1:])
        move[1, 0] = table.hx[row] + table.hd[row] * shrink
        move[2:, 1:-1] = np.eye(HISTORY - 1)
        mean, spread = move @ mean, move @ spread @ move.T
        spread[0, 0] += table.n[row] ** 2
    return float(mean[0]), float(spread[0, 0])


def orders(errors: list[float]) -> np.ndarray:
    """Return the observed order of convergence for each halving of the step."""
    return -np.diff(np.log2(errors))


def table_of(sampler: str, num_steps: int, even_in: str = "log", eta: float = 0.0) -> StepTable:
    return table_on_grid(SAMPLERS[sampler], grid_of(num_steps, even_in), Preconditioning(), "leading", eta=eta)


@pytest.mark.parametrize(
    ("sampler", "even_in", "min_order", "max_order"),
    [
        ("ddim", "log", 0.9, 1.1),
        ("euler", "log", 0.9, 1.1),
        ("heun", "log", 1.9, 2.2),
        ("dpmpp_2m", "log", 1.9, 2.2),
        ("deis", "log", 1.9, 2.2),
        ("unipc", "log", 2.7, 3.3),
        ("lms", "log", 1.9, 4.5),
        ("plms", "linear", 1.9, 4.5),
    ],
)
def test_deterministic_sampler_converges_at_its_order(
    sampler: str, even_in: str, min_order: float, max_order: float
) -> None:
    exact = np.sqrt((SPREAD**2 + LOW**2) / (SPREAD**2 + HIGH**2))
    errors = [abs(moments(table_of(sampler, n, even_in), 1.0, 0.0)[0] - exact) for n in STEPS]
    observed = orders(errors)[-2:]
    assert (observed > min_order).all()
    assert (observed < max_order).all()


@pytest.mark.parametrize(
    ("sampler", "eta", "min_order"),
    [
        ("ddim", 0.5, 0.9),
        ("ddim", 1.0, 0.9),
        ("ddpm", 1.0, 0.9),
        ("euler_a", 1.0, 0.9),
        ("dpmpp_2m_sde", 1.0, 1.9),
        ("dpmpp_3m_sde", 1.0, 1.9),
    ],
)
def test_stochastic_sampler_converges_in_distribution(sampler: str, eta: float, min_order: float) -> None:
    start = SPREAD**2 + HIGH**2
    exact = SPREAD**2 + LOW**2
    errors = [abs(moments(table_of(sampler, n, eta=eta), 0.0, start)[1] - exact) for n in STEPS]
    assert (orders(errors)[-2:] > min_order).all()
    assert errors[-1] < 0.02 * exact


def test_corrector_reduces_the_error_of_the_predictor_down_to_its_own_bias() -> None:
    start, exact = SPREAD**2 + HIGH**2, SPREAD**2 + LOW**2
    for num_steps in STEPS:
        predictor_error = abs(moments(table_of("ddpm", num_steps), 0.0, start)[1] - exact)
        corrected_error = abs(moments(table_of("pc", num_steps), 0.0, start)[1] - exact)
        assert corrected_error < max(predictor_error, LANGEVIN_SNR**2 * exact)


def test_lms_has_fourth_order_with_a_full_history() -> None:
    def late_step_error(num_steps: int) -> float:
        """Return the error of one LMS step in the middle of the run, given exact earlier slopes."""
        sigmas = np.geomspace(HIGH, LOW, num_steps + 1)
        exact = np.sqrt(SPREAD**2 + sigmas**2)
        slope = sigmas / exact
        i = num_steps // 2
        moves = lagrange_moves(sigmas[i - 3 : i + 1][::-1], float(sigmas[i]), float(sigmas[i + 1]), logarithmic=False)
        return float(abs(exact[i] + np.dot(moves, slope[i - 3 : i + 1][::-1]) - exact[i + 1]))

    assert (orders([late_step_error(n) for n in (32, 64, 128)]) > 4.7).all()
