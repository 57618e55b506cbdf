"""Single-step samplers, without history across steps: Euler, DDIM, DDPM, Heun, LCM, TCD, predictor-corrector."""

from __future__ import annotations

import math

from schedulers.grids import Grid
from schedulers.table import Row

LANGEVIN_SNR = 0.16
"""Signal-to-noise ratio of the Langevin step of the predictor-corrector sampler (Song et al. 2021)."""


def _fresh_noise(sigma: float, sigma_next: float, eta: float) -> float:
    """Return the standard deviation of new noise: ``eta`` times that of the exact reverse step."""
    ratio = sigma_next / sigma
    return eta * sigma_next * math.sqrt(max(0.0, 1.0 - ratio * ratio))


def ancestral_row(grid: Grid, i: int, eta: float, draws: bool) -> Row:
    """Build the row of a step that replaces part of the noise in x by fresh noise.

    Args:
        grid: Noise levels and timesteps.
        i: Index of the step.
        eta: Fraction of fresh noise: 0 is Euler and DDIM, 1 is DDPM.
        draws: Whether the row draws from the random generator.

    Raises:
        ValueError: If the fresh noise exceeds the noise level at the end of the step.
    """
    sigma, sigma_next = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
    n = _fresh_noise(sigma, sigma_next, eta)
    a = math.sqrt(sigma_next * sigma_next - n * n) / sigma
    return Row(i, sigma, float(grid.timesteps[i]), a, (1.0 - a,), n, draws=draws)


def ddim_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of DDIM (Song et al. 2021, equation 12); it draws at every step if eta is not 0."""
    return [ancestral_row(grid, i, eta, eta > 0.0) for i in range(grid.start, grid.num_steps)]


def ddpm_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of DDPM with posterior ("fixed_small") variance (Ho et al. 2020), without a draw at timestep 0."""
    return [ancestral_row(grid, i, 1.0, grid.timesteps[i] > 0.0) for i in range(grid.start, grid.num_steps)]


def ddpm_large_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of DDPM with forward ("fixed_large") variance: the mean of ddpm, with more noise."""
    rows = []
    for row in ddpm_rows(grid, eta):
        s, t = row.sigma, float(grid.sigmas[row.step + 1])
        n = math.sqrt((1.0 + t * t) * max(0.0, s * s - t * t) / (1.0 + s * s)) if row.draws else 0.0
        rows.append(row._replace(n=n))
    return rows


def euler_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of Euler's method on the probability-flow ODE (Karras et al. 2022, algorithm 1 without churn)."""
    return [ancestral_row(grid, i, 0.0, False) for i in range(grid.start, grid.num_steps)]


def euler_a_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of Euler with ancestral noise; it draws at every step including the last, as in diffusers."""
    return [ancestral_row(grid, i, eta, True) for i in range(grid.start, grid.num_steps)]


def lcm_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of LCM (Luo et al. 2023): predict the clean image and add noise again, except at the last step."""
    rows = []
    for i in range(grid.start, grid.num_steps):
        n = float(grid.sigmas[i + 1])
        is_last = i + 1 == grid.num_steps
        rows.append(Row(i, float(grid.sigmas[i]), float(grid.timesteps[i]), 0.0, (1.0,), n, draws=not is_last))
    return rows


def tcd_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of TCD: strategic stochastic sampling (Zheng et al. 2024, arXiv 2402.19159).

    Each step moves to timestep (1 - eta) * t_next and adds noise up to the level of t_next. ``eta`` is gamma in the
    paper and ``eta`` in diffusers. The last step ends at training timestep 0 and adds no noise.

    Raises:
        ValueError: If ``eta`` is above 1.
    """
    assert grid.train_sigmas is not None
    rows = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        draws = eta > 0.0 and i + 1 < grid.num_steps
        level = target
        if draws:
            timestep = math.floor((1.0 - eta) * float(grid.timesteps[i + 1]))
            if timestep < 0:
                raise ValueError(f"eta {eta} is above 1")
            level = min(target, float(grid.train_sigmas[timestep]))
        a = level / sigma
        n = math.sqrt(target * target - level * level)
        rows.append(Row(i, sigma, float(grid.timesteps[i]), a, (1.0 - a,), n, draws=draws))
    return rows


def heun_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of Heun's method (Karras et al. 2022, algorithm 1 without churn).

    A step has two rows, or one if it is the last, ends at sigma 0 or starts from pure noise. The first row pushes x
    moved by half of the slope, so the second row does not have to undo the full Euler step.
    """
    rows = []
    for i in range(grid.start, grid.num_steps):
        first = ancestral_row(grid, i, 0.0, False)
        target = float(grid.sigmas[i + 1])
        if target == 0.0 or i + 1 == grid.num_steps or grid.leaves_pure_noise(i):
            rows.append(first)
            continue
        half = 0.5 * (target - first.sigma)
        rows.append(first._replace(hx=1.0 + half / first.sigma, hd=-half / first.sigma))
        slope = half / target
        rows.append(Row(i, target, float(grid.timesteps[i + 1]), slope, (-slope, 1.0)))
    return rows


def pc_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of predictor-corrector sampling (Song et al. 2021, algorithm 2).

    Each step is an exact reverse step, followed by a Langevin step at its end. Both draw noise. There are two
    differences from the paper, so that the noise levels of the table are exact:

    * The Langevin step size is 2 snr^2 sigma^2, the paper's 2 (snr |z| / |score|)^2 for a score of the expected norm.
      The update is the exact Ornstein-Uhlenbeck step for a constant denoised estimate. Both agree to first order.
    * The paper's reverse-diffusion predictor has the same drift and slightly more noise.
    """
    decay = math.exp(-2.0 * LANGEVIN_SNR**2)
    rows = []
    for i in range(grid.start, grid.num_steps):
        rows.append(ancestral_row(grid, i, 1.0, True))
        target = float(grid.sigmas[i + 1])
        if i + 1 < grid.num_steps:
            n = target * math.sqrt(1.0 - decay * decay)
            rows.append(Row(i, target, float(grid.timesteps[i + 1]), decay, (1.0 - decay,), n, draws=True))
    return rows
