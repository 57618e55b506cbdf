"""Invariants of every table: a noise-free image does not change, and the noise matches the noise levels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import (
    COLUMNS,
    HISTORY,
    NUM_COLUMNS,
    SAMPLERS,
    SIGMA_SCHEDULES,
    SPACINGS,
    InvalidTable,
    NoiseSchedule,
    StepTable,
    compile_table,
)  # fmt: skip
from schedulers.noise import make_betas
from schedulers.table import propagate_noise

SD = NoiseSchedule.from_betas(make_betas("scaled_linear", 1000, 0.00085, 0.012))
COSINE = NoiseSchedule.from_betas(make_betas("squaredcos_cap_v2", 1000, 0.0, 0.0), "v_prediction")
ZERO_SNR = NoiseSchedule.from_betas(
    make_betas("scaled_linear", 1000, 0.00085, 0.012), "v_prediction", zero_terminal_snr=True
)
SHORT = NoiseSchedule.from_betas(make_betas("linear", 7, 0.05, 0.5), "sample")


def simulate(table: StepTable) -> tuple[np.ndarray, np.ndarray]:
    """Compute the image coefficient and noise of x after each row for a perfect denoiser, by simulation."""
    state = np.zeros((1 + HISTORY, 2 + table.num_rows))
    state[0, :2] = 1.0, table.sigma[0]
    image, noise = [], []
    for row in range(table.num_rows):
        denoised = np.zeros(2 + table.num_rows)
        denoised[0] = 1.0
        x = table.a[row] * state[0] + table.b[row, 0] * denoised + table.b[row, 1:] @ state[1:]
        x[2 + row] += table.n[row]
        pushed = table.hx[row] * state[0] + table.hd[row] * denoised
        state = np.vstack([x, pushed, state[1:-1]])
        image.append(x[0])
        noise.append(np.sqrt(x[1:] @ x[1:]))
    return np.array(image), np.array(noise)


def check(table: StepTable) -> None:
    """Assert both invariants, and that the packed columns are finite."""
    image, noise = simulate(table)
    scale = max(1.0, (np.abs(table.a) + np.abs(table.b).sum(axis=1)).max())  # bound on the terms that cancel
    assert (np.abs(image - 1.0) <= 1e-9 * scale).all()
    if table.keeps_noise:
        slack = 1e-12 * table.sigma[0] * scale if table.hx.any() else 0.0
        assert (np.abs(noise - table.sigma_next) <= 1e-9 * table.sigma_next + slack).all()
    assert table.packed.shape == (table.num_rows, NUM_COLUMNS)
    assert np.isfinite(table.packed).all()


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_invariants_hold_for_every_sampler_spacing_and_sigma_schedule(sampler: str, spacing: str) -> None:
    for sigma_schedule in (None, *SIGMA_SCHEDULES):
        for schedule, counts in ((SD, (1, 3)), (COSINE, (2,)), (ZERO_SNR, (1, 17))):
            for num_steps in counts:
                table = compile_table(sampler, schedule, num_steps, spacing=spacing, sigma_schedule=sigma_schedule)
                check(table)
                assert table.num_steps == num_steps
                assert len(set(table.step_of_row)) == num_steps


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_tables_of_the_full_training_length_hold_the_invariants(sampler: str) -> None:
    turn = sorted(SAMPLERS).index(sampler)  # adjacent samplers alternate the schedules
    for index, spacing in enumerate(SPACINGS):
        schedule = (SD, ZERO_SNR)[(turn + index) % 2]
        table = compile_table(sampler, schedule, 1000, spacing=spacing, steps_offset=1)
        assert table.num_steps == 1000
        assert (np.diff(table.sigma) <= 0.0).all()
    for num_steps in range(1, 8):
        check(compile_table(sampler, SHORT, num_steps))


@settings(max_examples=60, deadline=None)
@given(
    sampler=st.sampled_from(sorted(SAMPLERS)),
    spacing=st.sampled_from(SPACINGS),
    sigma_schedule=st.sampled_from((None, *SIGMA_SCHEDULES)),
    num_steps=st.integers(1, 120),
    steps_offset=st.integers(0, 3),
    strength=st.floats(0.01, 1.0),
    to_one=st.booleans(),
    final=st.sampled_from(("zero", "sigma_min")),
    eta=st.sampled_from((None, 0.0, 0.4, 1.0)),
)
def test_invariants_hold_for_any_options(
    sampler: str, spacing: str, sigma_schedule: str | None, num_steps: int, steps_offset: int, strength: float,
    to_one: bool, final: str, eta: float | None,
) -> None:  # fmt: skip
    share = min(1.0, max(strength, 1.0 / num_steps + 1e-9))
    table = compile_table(
        sampler, SD, num_steps, spacing=spacing, sigma_schedule=sigma_schedule, steps_offset=steps_offset,
        strength=share, set_alpha_to_one=to_one, final_sigmas_type=final, eta=eta,
    )  # fmt: skip
    check(table)
    assert (table.sigma_next <= table.sigma * (1.0 + 1e-12)).all()
    assert not table.n[~table.draws].any()


@settings(max_examples=25, deadline=None)
@given(
    betas=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=30),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    share=st.floats(0.0, 1.0),
)
def test_invariants_hold_for_any_betas(betas: list[float], sampler: str, share: float) -> None:
    num_steps = 1 + int(share * (len(betas) - 1))
    check(compile_table(sampler, NoiseSchedule.from_betas(betas), num_steps))


def test_only_ddpm_large_exceeds_the_noise_levels() -> None:
    assert [name for name, sampler in SAMPLERS.items() if not sampler.keeps_noise] == ["ddpm_large"]
    table = compile_table("ddpm_large", SD, 10)
    assert "noise" in table.warnings[0]
    assert (np.hypot(table.a * table.sigma, table.n) >= table.sigma_next).all()


def test_noise_is_propagated_through_the_history() -> None:
    table = compile_table("lms", SD, 30)
    np.testing.assert_allclose(propagate_noise(table), table.sigma_next, rtol=0.0, atol=1e-9 * table.sigma[0])


def test_table_that_scales_the_image_is_refused() -> None:
    table = compile_table("euler", SD, 5)
    with pytest.raises(InvalidTable, match=r"scales a noise-free image by 1\.5"):
        replace(table, a=table.a + 0.5)


def test_table_that_loses_noise_is_refused() -> None:
    table = compile_table("ddpm", SD, 5)
    with pytest.raises(InvalidTable, match="leaves noise of"):
        replace(table, n=table.n * 0.9)


def test_table_that_reads_unset_history_is_refused() -> None:
    table = compile_table("dpmpp_2m", SD, 5)
    b = table.b.copy()
    b[0, 0] -= 0.5
    b[0, 1] += 0.5
    with pytest.raises(InvalidTable, match="no earlier row has written"):
        replace(table, b=b)


def test_table_with_a_non_finite_number_is_refused() -> None:
    table = compile_table("euler", SD, 5)
    with pytest.raises(InvalidTable, match="not finite"):
        replace(table, n=np.full(5, np.nan))


def test_table_is_read_only() -> None:
    table = compile_table("euler", SD, 5)
    with pytest.raises(ValueError, match="read-only"):
        table.packed[0, 0] = 1.0


def test_packed_columns_match_their_names() -> None:
    table = compile_table("unipc", SD, 6)
    for name in ("c_in", "c_skip", "c_out", "timestep", "a", "n", "hx", "hd", "sigma", "sigma_next"):
        np.testing.assert_array_equal(table.packed[:, COLUMNS.index(name)], getattr(table, name).astype(np.float32))
    first = COLUMNS.index("b0")
    np.testing.assert_array_equal(table.packed[:, first : first + HISTORY + 1], table.b.astype(np.float32))
