"""Agreement of every sampler with its diffusers scheduler over whole trajectories, with equal noise and network.

Float32 comparisons have the bound that users see. Float64 comparisons cover cases in which diffusers loses precision in
float32: sigmas of 4096 (zero SNR) and 20000 (cosine schedule), and Heun steps over the full noise range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import diffusers
import pytest
import torch

from schedulers import PREDICTION_TYPES, SAMPLERS, NoiseSchedule, TableOptions
from tests.schedulers.diffusers_samplers import (
    COMPARED,
    COSINE,
    EXCLUDED,
    HO,
    MENDED,
    SD,
    Case,
    WideTorch,
    config_of,
    make_scheduler,
    mend,
)  # fmt: skip
from tests.schedulers.trajectories import SHAPE, make_network, run_diffusers, run_table

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

FLOAT32_BOUND = 1e-4
FLOAT64_BOUND = 1e-5
LCM_BOUNDARY = 1e-4
"""Row "lcm-boundary" of docs/parity.md: diffusers adds up to 7e-6 of the input to the denoised estimate."""

SPACINGS = ("leading", "trailing", "linspace")
FEW_STEPS = (1, 2, 3, 7, 14, 15, 20)
SIGMAS = ("karras", "exponential", "beta")
BETAS = (SD, HO, COSINE)


def third(*axes: Sequence[Any], turn: int) -> Iterator[tuple[Any, ...]]:
    """Iterate over a third of the product of ``axes``, as in a Latin square.

    Yields the points whose indices and ``turn`` add up to a multiple of three. Turns 0, 1 and 2 cover the product.
    """
    for point in product(*(tuple(enumerate(axis)) for axis in axes)):
        if (turn + sum(index for index, _ in point)) % 3 == 0:
            yield tuple(value for _, value in point)


def compare(
    case: Case, betas: dict[str, Any], *, exact: bool = False, mended: bool = True, eta: float | None = None
) -> float:
    """Return the largest error over a trajectory; infinite if the generators end in different states."""
    dtype = torch.float64 if exact else torch.float32
    scheduler = make_scheduler(case, betas)
    scheduler.set_timesteps(case.num_steps)
    config = config_of(scheduler, case)
    schedule = NoiseSchedule.from_config(config)
    if exact:
        scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
        schedule = NoiseSchedule(scheduler.alphas_cumprod.numpy(), case.prediction_type)
        if hasattr(scheduler, "final_alpha_cumprod"):
            scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    table = TableOptions.from_config(config).compile(schedule, case.num_steps, eta=eta, strength=case.strength)
    assert table.sampler == case.sampler
    if mended:
        mend(scheduler, case, table, exact=exact)
    image = None if case.strength == 1.0 else torch.linspace(-1.0, 1.0, 18).reshape(SHAPE)
    network = make_network(schedule)
    trajectory = run_table(table, network, image=image, dtype=dtype)
    true_strides = mended and MENDED["uniform-stride"].applies(case)
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(f"{getattr(diffusers, SAMPLERS[case.sampler].diffusers_class).__module__}.torch", WideTorch())
        expected = run_diffusers(
            scheduler, table, network, eta=eta, image=image, dtype=dtype, true_strides=true_strides
        )
    same_draws = torch.equal(trajectory.generator_state, expected.generator_state)
    return trajectory.error(expected) if same_draws else float("inf")


def left_out(case: Case) -> bool:
    """Return whether an excluded bug of diffusers affects this case."""
    return any(bug.applies(case) for bug in EXCLUDED.values())


def check(cases: list[Case], betas: dict[str, Any], **options: Any) -> None:
    """Assert that at least one case is not left out, and that all of these agree with diffusers."""
    compared = [case for case in cases if not left_out(case)]
    assert compared
    bound = FLOAT64_BOUND if options.get("exact") else FLOAT32_BOUND
    if compared[0].sampler == "lcm":
        bound = max(bound, LCM_BOUNDARY)
    errors = {case: compare(case, betas, **options) for case in compared}
    wrong = {case: error for case, error in errors.items() if not error < bound}
    assert not wrong, wrong


def needs_float64(case: Case) -> bool:
    """Return whether rounding dominates in float32: long Heun steps amplify it by the ratio of their sigmas."""
    return case.sampler == "heun" and case.num_steps <= 3


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("sampler", COMPARED)
def test_trajectories_agree_for_every_spacing_step_count_and_prediction_type(sampler: str, spacing: str) -> None:
    cases = [
        Case(sampler, spacing, n, prediction, steps_offset=offset)
        for n, prediction in third(FEW_STEPS, PREDICTION_TYPES, turn=SPACINGS.index(spacing))
        for offset in ((0, 1) if spacing == "leading" else (0,))
    ]
    check([case for case in cases if not needs_float64(case)], SD)


@pytest.mark.parametrize("betas", BETAS, ids=["scaled_linear", "linear", "cosine"])
@pytest.mark.parametrize("sampler", COMPARED)
def test_trajectories_agree_in_float64_on_every_beta_schedule(sampler: str, betas: dict[str, Any]) -> None:
    cases = [
        Case(sampler, spacing, n, prediction)
        for n, prediction, spacing in third((1, 2, 10, 20), PREDICTION_TYPES, SPACINGS, turn=BETAS.index(betas))
    ]
    if betas is COSINE and sampler in ("heun", "plms"):
        cases = [
            case for case in cases if case.num_steps == 1
        ]  # see test_pure_noise: diffusers generates garbage otherwise
    check(cases, betas, exact=True)


@pytest.mark.parametrize("sigmas", SIGMAS)
@pytest.mark.parametrize(
    "sampler", ["euler", "heun", "lms", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "deis", "unipc"]
)
def test_trajectories_agree_on_sigma_schedules(sampler: str, sigmas: str) -> None:
    extra = ((f"use_{sigmas}_sigmas", True),)
    points = third((1, 2, 3, 7, 15, 20), SPACINGS, turn=SIGMAS.index(sigmas))
    cases = [Case(sampler, spacing, n, extra=extra) for n, spacing in points]
    check([case for case in cases if not needs_float64(case)], SD)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["deis", "heun", "lms"])
def test_trajectories_agree_in_float64_on_sigma_schedules(sampler: str) -> None:
    for turn, sigmas in enumerate(SIGMAS):
        extra = ((f"use_{sigmas}_sigmas", True),)
        cases = [Case(sampler, spacing, n, extra=extra) for n, spacing in third((1, 2, 3, 20), SPACINGS, turn=turn)]
        check(cases, SD, exact=True)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m_sde", "unipc"])
def test_trajectories_agree_when_they_end_at_sigma_min(sampler: str) -> None:
    ends = ("final_sigmas_type", "sigma_min")
    plain = [Case(sampler, spacing, n, extra=(ends,)) for n in (1, 5, 14, 15, 30) for spacing in SPACINGS]
    karras = [case._replace(extra=(ends, ("use_karras_sigmas", True))) for case in plain]
    if sampler == "unipc":
        karras = []
    check(plain + karras, SD)


@pytest.mark.parametrize("sampler", ["ddim", "plms"])
@pytest.mark.parametrize("to_one", [True, False])
def test_trajectories_agree_for_both_values_of_set_alpha_to_one(sampler: str, to_one: bool) -> None:
    extra = (("set_alpha_to_one", to_one),)
    check([Case(sampler, "leading", n, steps_offset=k, extra=extra) for n in (1, 2, 10, 50) for k in (0, 1)], SD)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_ddim_agrees_for_any_eta(eta: float) -> None:
    check([Case("ddim", spacing, n, steps_offset=1) for n in (1, 2, 20) for spacing in SPACINGS], SD, eta=eta)


@pytest.mark.parametrize("prediction", PREDICTION_TYPES)
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.75, 1.0])
def test_tcd_agrees_for_any_gamma(eta: float, prediction: str) -> None:
    check([Case("tcd", "leading", n, prediction) for n in (1, 2, 4, 8, 20, 50)], SD, eta=eta)
    check([Case("tcd", "leading", n, prediction, strength=0.5) for n in (4, 10)], SD, eta=eta)


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "deis", "unipc"])
@pytest.mark.parametrize("sigmas", SIGMAS)
def test_timesteps_of_sigma_schedules_match_diffusers_at_every_step_count(sampler: str, sigmas: str) -> None:
    """Allow for 17 of 15150 timesteps at which diffusers rounds differently in float32; none for beta sigmas."""
    case = Case(sampler, "leading", extra=((f"use_{sigmas}_sigmas", True),))
    scheduler = make_scheduler(case, SD)
    config = config_of(scheduler, case)
    options, schedule, differing = TableOptions.from_config(config), NoiseSchedule.from_config(config), []
    for num_steps in range(1, 101):
        scheduler.set_timesteps(num_steps)
        table = options.compile(schedule, num_steps)
        differing += [num_steps] * int((scheduler.timesteps.numpy() != table.timestep).sum())
        mend(scheduler, case, table)  # asserts that these timesteps are close to a rounding edge
    assert len(differing) <= {"karras": 8, "exponential": 9, "beta": 0}[sigmas]


@pytest.mark.parametrize(
    "sampler", ["ddim", "ddpm", "euler", "euler_a", "dpmpp_2m", "dpmpp_2m_sde", "unipc", "lcm", "tcd"]
)
def test_trajectories_agree_at_zero_terminal_snr(sampler: str) -> None:
    extra = (("rescale_betas_zero_snr", True),)
    cases = [
        Case(sampler, spacing, n, prediction, extra=extra)
        for n in (1, 2, 5, 20)
        for prediction in ("v_prediction", "sample")
        for spacing in SPACINGS
    ]
    check(cases, SD, exact=True)
    rounded = sampler in ("euler", "euler_a")
    check([case for case in cases if not (rounded and case.num_steps < 20)], SD)


@pytest.mark.parametrize("sampler", COMPARED)
def test_image_to_image_agrees_at_every_strength(sampler: str) -> None:
    cases = [Case(sampler, "leading", n, strength=s) for n in (4, 10, 20) for s in (0.3, 0.5, 0.75, 0.999)]
    if sampler in ("lms", "plms"):
        assert all(left_out(case) for case in cases)
        return
    check(cases, SD)


@pytest.mark.parametrize("sampler", ["lms", "plms"])
def test_image_to_image_equals_diffusers_on_the_remaining_timesteps(sampler: str) -> None:
    case = Case(sampler, "leading", 20, strength=0.5)
    scheduler = make_scheduler(case, SD)
    config = config_of(scheduler, case)
    schedule = NoiseSchedule.from_config(config)
    table = TableOptions.from_config(config).compile(schedule, 20, strength=0.5)
    full_table = TableOptions.from_config(config).compile(schedule, 20)
    scheduler.set_timesteps(20)
    scheduler.timesteps = torch.tensor(table.timestep).to(scheduler.timesteps.dtype)
    if sampler == "lms":
        scheduler.sigmas = scheduler.sigmas[-table.num_rows - 1 :]
    network = make_network(schedule)
    trajectory = run_table(table, network)
    expected = run_diffusers(scheduler, replace(table, requested_steps=table.num_steps), network)
    assert trajectory.error(expected) < FLOAT32_BOUND
    assert table.num_rows < full_table.num_rows


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [name for name in COMPARED if name != "lms"])
def test_trajectories_agree_up_to_the_training_length(sampler: str) -> None:
    turn = COMPARED.index(sampler)  # each sampler runs a part of the lengths and offsets; together they cover all
    n, offset = ((501, 0), (501, 1), (1000, 0))[turn % 3]
    cases = [
        Case(sampler, "leading", n, steps_offset=offset),
        Case(sampler, "trailing", (501, 1000)[turn % 2]),
        Case(sampler, "linspace", 999),
    ]
    if sampler in ("lcm", "tcd"):
        assert all(left_out(case) for case in cases)
        return
    check(cases, SD, exact=sampler in ("deis", "dpmpp_3m_sde", "heun"))


@pytest.mark.parametrize("name", [*MENDED, *EXCLUDED])
def test_known_bug_still_exists_in_diffusers(name: str) -> None:
    bug = {**MENDED, **EXCLUDED}[name]
    assert bug.applies(bug.example)
    try:
        error = compare(bug.example, SD, mended=False)
    except (IndexError, NotImplementedError, ValueError):
        return
    assert not error < FLOAT32_BOUND


def test_predictor_corrector_agrees_with_song_et_al_to_first_order() -> None:
    """Row "predictor-corrector" of docs/parity.md."""
    scheduler = diffusers.ScoreSdeVeScheduler(num_train_timesteps=4000, snr=0.02, sigma_min=0.01, sigma_max=50.0)
    scheduler.set_timesteps(4000)
    sigma, sigma_next = (float(scheduler.discrete_sigmas[k]) for k in (2000, 1999))
    x = torch.randn((1, 4, 64, 64), generator=torch.Generator().manual_seed(0)) * sigma
    score = -x / sigma**2
    generator = torch.Generator().manual_seed(1)
    out = scheduler.step_pred(score, 2000 / 3999, x, generator=generator)
    decay = (sigma_next / sigma) ** 2
    assert torch.allclose(out.prev_sample_mean, decay * x, rtol=1e-4, atol=1e-6)
    added = float((out.prev_sample - out.prev_sample_mean).std())
    assert added == pytest.approx(sigma_next * (1.0 - decay) ** 0.5, rel=0.02)
    corrected = scheduler.step_correct(score, x, generator=torch.Generator().manual_seed(2)).prev_sample
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    decay = math.exp(-2.0 * 0.02**2)
    exact = decay * x + sigma * math.sqrt(1.0 - decay * decay) * noise
    assert torch.allclose(corrected, exact, atol=0.02 * 0.05 * sigma)
