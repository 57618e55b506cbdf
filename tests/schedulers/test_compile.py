"""Table compilation: step counts, offsets, strengths and spacings, and the errors for invalid values."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from schedulers import (
    SAMPLERS,
    BadEta,
    BadNoiseSchedule,
    BadNumSteps,
    BadStrength,
    NoiseSchedule,
    UnknownSpacing,
    UnsupportedOption,
    compile_table,
)  # fmt: skip
from schedulers.grids import FAMILIES, SPACINGS, pick_timesteps, symmetric_beta_quantile
from schedulers.noise import make_betas

SD = NoiseSchedule.from_betas(make_betas("scaled_linear", 1000, 0.00085, 0.012))


@pytest.mark.parametrize("num_steps", [0, -3, 1001, 2.0, "20", None, True, float("nan")])
def test_invalid_step_count_is_refused_with_its_value(num_steps: object) -> None:
    with pytest.raises(BadNumSteps, match="num_steps is") as caught:
        compile_table("ddim", SD, num_steps)  # type: ignore[arg-type]
    assert repr(num_steps) in str(caught.value)
    assert "1000" in str(caught.value)


def test_numpy_integer_is_accepted_as_step_count() -> None:
    assert compile_table("ddim", SD, np.int64(7)).num_steps == 7  # type: ignore[arg-type]


@pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan"), 0.0, 0.04])
def test_strength_that_leaves_no_step_is_refused(strength: float) -> None:
    with pytest.raises(BadStrength, match=f"strength (is )?{strength}"):
        compile_table("ddim", SD, 20, strength=strength)


@pytest.mark.parametrize("eta", [-0.5, float("inf"), float("nan")])
def test_negative_or_infinite_eta_is_refused(eta: float) -> None:
    with pytest.raises(BadEta, match=f"eta is {eta}"):
        compile_table("ddim", SD, 20, eta=eta)


def test_eta_that_exceeds_the_noise_of_a_step_is_refused() -> None:
    assert compile_table("ddim", SD, 50, eta=1.2, spacing="trailing").eta == 1.2
    with pytest.raises(BadEta, match="more fresh noise than its noise level allows"):
        compile_table("ddim", SD, 5, eta=3.0)


def test_eta_that_the_sampler_ignores_produces_a_warning() -> None:
    table = compile_table("dpmpp_2m", SD, 5, eta=0.5)
    assert table.warnings == ("eta 0.5 was ignored, because dpmpp_2m does not use it",)
    assert compile_table("dpmpp_2m", SD, 5, eta=0.0).warnings == ()


def test_unknown_spacing_and_sigma_schedule_are_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownSpacing, match="'lagging'; choose from leading, linspace"):
        compile_table("ddim", SD, 5, spacing="lagging")
    with pytest.raises(UnknownSpacing, match="'kerras'; choose from beta"):
        compile_table("ddim", SD, 5, sigma_schedule="kerras")
    with pytest.raises(UnsupportedOption, match="'one'; choose from sigma_min, zero"):
        compile_table("ddim", SD, 5, final_sigmas_type="one")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_timesteps_are_distinct_descending_and_within_range_for_every_step_count(family: str, spacing: str) -> None:
    for length in (1, 7, 60):
        for num_steps in range(1, length + 1):
            for offset in (0, 1, 5):
                timesteps = pick_timesteps(family, spacing, num_steps, length, offset)
                assert timesteps.size == num_steps
                assert (np.diff(timesteps) < 0.0).all()
                assert timesteps[0] <= length - 1
                assert timesteps[-1] >= 0.0


def test_spacings_match_the_papers() -> None:
    assert compile_table("ddim", SD, 4).timestep.tolist() == [750, 500, 250, 0]
    assert compile_table("ddim", SD, 4, steps_offset=1).timestep.tolist() == [751, 501, 251, 1]
    assert compile_table("ddim", SD, 4, spacing="trailing").timestep.tolist() == [999, 749, 499, 249]
    assert compile_table("ddim", SD, 4, spacing="linspace").timestep.tolist() == [999, 666, 333, 0]
    assert compile_table("ddim", SD, 5, spacing="quadratic").timestep.tolist() == [800, 450, 200, 50, 0]
    assert compile_table("lcm", SD, 4).timestep.tolist() == [999, 759, 499, 259]
    assert compile_table("euler", SD, 4, sigma_schedule="simple").timestep.tolist() == [999, 749, 499, 249]


def test_steps_offset_is_lowered_at_the_end_of_training_length() -> None:
    timesteps = compile_table("ddim", SD, 1000, steps_offset=1).timestep
    assert timesteps.tolist() == list(range(999, -1, -1))


def test_image_to_image_runs_the_last_steps_with_two_rows_each_for_heun() -> None:
    full, partial = compile_table("heun", SD, 10), compile_table("heun", SD, 10, strength=0.35)
    assert (partial.num_steps, partial.requested_steps, partial.num_rows) == (3, 10, 5)
    assert partial.step_of_row.tolist() == [0, 0, 1, 1, 2]
    np.testing.assert_array_equal(partial.sigma, full.sigma[-5:])


def test_initial_scale_matches_diffusers() -> None:
    highest = float(SD.sigmas[-1])
    assert compile_table("ddim", SD, 5, spacing="trailing").init_scale == pytest.approx(np.hypot(1.0, highest))
    assert compile_table("euler", SD, 5, spacing="trailing").init_scale == pytest.approx(highest)
    leading = compile_table("euler", SD, 5)
    assert leading.init_scale == pytest.approx(np.hypot(1.0, leading.sigma[0]))


def test_final_latents_are_scaled_to_unit_variance_if_sampling_ends_above_zero() -> None:
    table = compile_table("ddim", SD, 5, set_alpha_to_one=False, steps_offset=1)
    assert table.sigma_end == SD.sigmas[0]
    assert table.out_scale == pytest.approx(np.sqrt(SD.alphas_cumprod[0]))
    assert compile_table("euler", SD, 5, final_sigmas_type="sigma_min").out_scale == 1.0


def test_rows_that_draw_noise_match_diffusers() -> None:
    def rows(name: str, *, eta: float | None = None, steps_offset: int = 0) -> list[int]:
        table = compile_table(name, SD, 4, eta=eta, steps_offset=steps_offset)
        return [int(row) for row in np.flatnonzero(table.draws)]

    assert rows("ddim") == []
    assert rows("ddim", eta=0.5) == [0, 1, 2, 3]
    assert rows("ddpm") == [0, 1, 2]
    assert rows("ddpm", steps_offset=1) == [0, 1, 2, 3]
    assert rows("euler_a") == rows("dpmpp_2m_sde") == [0, 1, 2, 3]
    assert rows("lcm") == [0, 1, 2]


def test_zero_snr_table_starts_from_pure_noise_and_is_finite() -> None:
    schedule = NoiseSchedule.from_betas(make_betas("scaled_linear", 1000, 0.00085, 0.012), zero_terminal_snr=True)
    assert np.isinf(schedule.sigmas[-1])
    assert schedule.alphas_cumprod[0] == SD.alphas_cumprod[0]
    assert compile_table("euler", schedule, 5, spacing="trailing").sigma[0] == pytest.approx(4096.0, rel=1e-6)
    velocity = NoiseSchedule(schedule.alphas_cumprod, "v_prediction")
    table = compile_table("ddim", velocity, 5, spacing="trailing")
    assert np.isfinite(table.packed).all()
    assert table.packed[0, 0] * table.init_scale == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    "values", [[], [[0.9]], [1.0, 0.5], [0.5, 0.5], [0.5, 0.7], [0.5, -0.1], [0.9, float("nan")], [0.0]]
)
def test_invalid_alphas_cumprod_are_refused(values: list[float]) -> None:
    with pytest.raises(BadNoiseSchedule, match="alphas_cumprod"):
        NoiseSchedule(np.array(values))


@pytest.mark.parametrize("betas", [[], [0.0, 0.1], [0.5, 1.0], [float("nan")]])
def test_betas_outside_zero_to_one_are_refused(betas: list[float]) -> None:
    with pytest.raises(BadNoiseSchedule, match="betas"):
        NoiseSchedule.from_betas(betas)


def test_unknown_prediction_type_and_beta_schedule_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="'flow'; choose from epsilon, sample, v_prediction"):
        NoiseSchedule(SD.alphas_cumprod, "flow")
    with pytest.raises(UnsupportedOption, match="'laplace'; choose from linear"):
        make_betas("laplace", 10, 0.1, 0.2)
    with pytest.raises(BadNoiseSchedule, match="num_train_timesteps is 0"):
        make_betas("linear", 0, 0.1, 0.2)


def test_beta_quantiles_match_scipy() -> None:
    p = np.linspace(0.0, 1.0, 501)
    for shape in (0.6, 1.0, 1.7):
        np.testing.assert_allclose(symmetric_beta_quantile(p, shape), stats.beta.ppf(p, shape, shape), atol=1e-12)


def test_prediction_types_differ_only_in_the_scaling_factors() -> None:
    kinds = ("epsilon", "v_prediction", "sample")
    tables = [compile_table("unipc", NoiseSchedule(SD.alphas_cumprod, kind), 6) for kind in kinds]
    sigma, rng = tables[0].sigma, np.random.default_rng(0)
    image, noise = rng.standard_normal(6), rng.standard_normal(6)
    x, scale = image + sigma * noise, 1.0 / np.hypot(1.0, sigma)
    outputs = (noise, scale * noise - sigma * scale * image, image)
    for table, output in zip(tables, outputs, strict=True):
        np.testing.assert_allclose(table.c_skip * x + table.c_out * output, image, atol=1e-12)
        np.testing.assert_array_equal(table.a, tables[0].a)
        np.testing.assert_array_equal(table.b, tables[0].b)


def test_compile_accepts_sampler_labels_with_a_sigma_schedule() -> None:
    table = compile_table("DPM++ 2M Karras", SD, 10)
    assert (table.sampler, table.sigma_schedule) == ("dpmpp_2m", "karras")
    assert compile_table("DPM++ 2M Karras", SD, 10, sigma_schedule="beta").sigma_schedule == "beta"
    assert compile_table("euler", SD, 10, spacing=None).spacing == "linspace"
    assert all(sampler.default_spacing in SPACINGS for sampler in SAMPLERS.values())
