"""Samplers without memory from step to step: Euler, DDIM, DDPM, Heun, LCM, TCD, predictor-corrector."""

from __future__ import annotations

import math

from schedulers.grids import Grid
from schedulers.table import Row

LANGEVIN_SNR = 0.16


def _fresh_noise(sigma: float, sigma_next: float, eta: float) -> float:
    """Standard deviation of the new noise: eta times that of the exact reverse step from sigma to sigma_next."""
    ratio = sigma_next / sigma
    return eta * sigma_next * math.sqrt(max(0.0, 1.0 - ratio * ratio))


def ancestral_row(grid: Grid, i: int, eta: float, draws: bool) -> Row:
    """From step i to i + 1, keeping what the fresh noise leaves room for. eta 0 is Euler and DDIM, eta 1 is DDPM."""
    sigma, sigma_next = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
    n = _fresh_noise(sigma, sigma_next, eta)
    a = math.sqrt(sigma_next * sigma_next - n * n) / sigma
    return Row(i, sigma, float(grid.timesteps[i]), a, (1.0 - a,), n, draws=draws)


def ddim_rows(grid: Grid, eta: float) -> list[Row]:
    """DDIM with any eta (Song et al. 2021, equation 12); diffusers draws at every step once eta is not 0."""
    return [ancestral_row(grid, i, eta, eta > 0.0) for i in range(grid.start, grid.num_steps)]


def ddpm_rows(grid: Grid, eta: float) -> list[Row]:
    """DDPM with the posterior ("fixed_small") variance (Ho et al. 2020); no draw at timestep 0."""
    return [ancestral_row(grid, i, 1.0, grid.timesteps[i] > 0.0) for i in range(grid.start, grid.num_steps)]


def ddpm_large_rows(grid: Grid, eta: float) -> list[Row]:
    """DDPM with the forward ("fixed_large") variance: the mean of ddpm, with more noise than the law allows."""
    rows = []
    for row in ddpm_rows(grid, eta):
        s, t = row.sigma, float(grid.sigmas[row.step + 1])
        n = math.sqrt((1.0 + t * t) * max(0.0, s * s - t * t) / (1.0 + s * s)) if row.draws else 0.0
        rows.append(row._replace(n=n))
    return rows


def euler_rows(grid: Grid, eta: float) -> list[Row]:
    """Euler's method on the probability-flow equation in sigma (Karras et al. 2022, algorithm 1 without churn)."""
    return [ancestral_row(grid, i, 0.0, False) for i in range(grid.start, grid.num_steps)]


def euler_a_rows(grid: Grid, eta: float) -> list[Row]:
    """Euler with ancestral noise; diffusers draws at every step, the last included."""
    return [ancestral_row(grid, i, eta, True) for i in range(grid.start, grid.num_steps)]


def lcm_rows(grid: Grid, eta: float) -> list[Row]:
    """Latent consistency (Luo et al. 2023): jump to the image, put noise back; no draw at the last step."""
    rows = []
    for i in range(grid.start, grid.num_steps):
        n = float(grid.sigmas[i + 1])
        more = i + 1 < grid.num_steps
        rows.append(Row(i, float(grid.sigmas[i]), float(grid.timesteps[i]), 0.0, (1.0,), n, draws=more))
    return rows


def tcd_rows(grid: Grid, eta: float) -> list[Row]:
    """Strategic stochastic sampling of trajectory consistency models (Zheng et al. 2024, arXiv 2402.19159).

    Each step jumps to timestep (1 - eta) * t_next and adds noise up to the level of t_next; ``eta`` is the paper's
    gamma, and ``eta`` in diffusers. The last step ends at training timestep 0 without noise.
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
    """Heun's method (Karras et al. 2022, algorithm 1 without churn): two rows a step, one where it ends at 0 or leaves
    pure noise.

    The first row pushes x moved by half its own slope, so that the second need not undo the predictor.
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
    """Predictor-corrector (Song et al. 2021, algorithm 2): an exact reverse step, then Langevin dynamics at its end.

    Both draw. Song et al. take the Langevin step from the norms of the score and of the draw, 2 (snr |z| / |score|)^2;
    here it is the value of that for a score of the expected norm, 2 snr^2 sigma^2, and the move is the exact
    Ornstein-Uhlenbeck one for a frozen denoised estimate, so that the noise stays book-kept. To first order in the step
    the two agree. Their reverse-diffusion predictor has the same drift and a little more noise, which no law keeps.
    """
    keep = math.exp(-2.0 * LANGEVIN_SNR**2)
    rows = []
    for i in range(grid.start, grid.num_steps):
        rows.append(ancestral_row(grid, i, 1.0, True))
        target = float(grid.sigmas[i + 1])
        if i + 1 < grid.num_steps:
            n = target * math.sqrt(1.0 - keep * keep)
            rows.append(Row(i, target, float(grid.timesteps[i + 1]), keep, (1.0 - keep,), n, draws=True))
    return rows
