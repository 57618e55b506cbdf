"""An image's bytes do not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

from diffserve.engine.exactness import SOLO, check_buckets, choose_class, sizes_to_check
from diffserve.types import GenerationRequest, ImageResult
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import asked

STEPS = (4, 10, 20, 50)
SAMPLERS = ("ddim", "euler_a", "heun", "dpmpp_2m")
GUIDANCE = (1.0, 5.0, 7.5)


def sixteen() -> list[GenerationRequest]:
    """Sixteen requests that share nothing but their size."""
    return [
        asked(
            "sd15",
            SAMPLERS[place % 4],
            seed=place,
            num_steps=STEPS[place // 4],
            guidance_scale=GUIDANCE[place % 3],
            prompt=("cat", "the red fox", "dog on the cat")[place % 3],
        )
        for place in range(16)
    ]


def content(result: ImageResult) -> tuple[bytes, bytes]:
    assert result.latents is not None
    return result.latents.data, result.picture.data


@pytest.mark.slow
def test_sixteen_mixed_images_equal_their_solo_runs_byte_for_byte(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    together = engine.generate(sixteen())
    assert max(len(set(tick.request_ids)) for tick in engine.trace) >= 8
    solo = make_engine(max_rows=16)
    for mixed, request in list(zip(together, sixteen(), strict=True))[::3]:
        [alone] = solo.generate(request)
        assert content(alone) == content(mixed)


def test_deterministic_is_the_default_on_a_cpu(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.is_deterministic
    assert engine.tolerance == 0.0


@pytest.mark.parametrize("max_rows", [2, 5, 16])
def test_bytes_do_not_depend_on_the_row_limit(make_engine: MakeEngine, max_rows: int) -> None:
    few = [asked("sd15", "euler_a", seed=seed, num_steps=3) for seed in range(3)]
    reference = make_engine(max_rows=8).generate(few)
    again = [asked("sd15", "euler_a", seed=seed, num_steps=3) for seed in range(3)]
    if max_rows >= 4:
        assert list(map(content, make_engine(max_rows=max_rows).generate(again))) == list(map(content, reference))
    else:
        assert len(make_engine(max_rows=max_rows).generate(again)) == 3


def test_the_free_mode_stays_within_its_stated_tolerance(make_engine: MakeEngine) -> None:
    free = make_engine(deterministic=False, max_rows=16)
    assert free.tolerance > 0.0
    exact = make_engine(max_rows=16)
    ours = [asked("sd15", "dpmpp_2m", seed=seed, num_steps=5) for seed in range(3)]
    again = [asked("sd15", "dpmpp_2m", seed=seed, num_steps=5) for seed in range(3)]
    for one, other in zip(free.generate(ours), exact.generate(again), strict=True):
        assert one.latents is not None
        assert other.latents is not None
        assert abs(one.latents.array - other.latents.array).max() < free.tolerance


def test_image_i_of_a_request_is_the_single_image_with_seed_plus_i(make_engine: MakeEngine) -> None:
    engine = make_engine()
    several = engine.generate(asked("sd15", "ddpm", seed=20, num_images=3, num_steps=4))
    assert [result.seed for result in several] == [20, 21, 22]
    for index, result in enumerate(several):
        [single] = engine.generate(asked("sd15", "ddpm", seed=20 + index, num_steps=4))
        assert content(single) == content(result)


def test_a_reused_lane_holds_nothing_of_its_last_image(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=1)
    first = engine.generate(asked("sd15", "dpmpp_2m", seed=1, num_steps=3))
    engine.generate(asked("sd15", "unipc", seed=2, num_steps=5))
    again = engine.generate(asked("sd15", "dpmpp_2m", seed=1, num_steps=3))
    assert content(again[0]) == content(first[0])


def test_the_check_keeps_only_sizes_that_agree() -> None:
    def predict(rows: range) -> torch.Tensor:
        values = torch.tensor([float(row) for row in rows]).reshape(-1, 1, 1, 1)
        return values + (1e-6 if len(rows) < 4 else 0.0) * (values + 1.0)

    curve = check_buckets(predict, sizes_to_check(16), is_exact=True)
    assert curve.buckets == (4, 8, 16)


def test_the_check_drops_a_size_where_position_matters() -> None:
    def predict(rows: range) -> torch.Tensor:
        values = torch.tensor([float(row) for row in rows]).reshape(-1, 1, 1, 1)
        return values + torch.arange(len(rows)).reshape(-1, 1, 1, 1) * (len(rows) == 8)

    assert check_buckets(predict, (1, 2, 4, 8), is_exact=True).buckets == (1, 2, 4)


def test_rows_run_one_by_one_where_no_two_sizes_agree() -> None:
    assert choose_class({}) == SOLO


def test_a_large_model_is_not_checked_but_run_row_by_row(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffserve.engine.groups.CHECK_LIMIT_CPU", 1.0)
    engine = make_engine()
    together = engine.generate([asked("sd15", "euler", seed=seed, num_steps=2) for seed in range(2)])
    assert set(engine.buckets.values()) == {(1,)}
    assert all(len(call.rows) == 1 for tick in engine.trace for call in tick.calls)
    [alone] = engine.generate(asked("sd15", "euler", seed=1, num_steps=2))
    assert content(alone) == content(together[1])


def test_warming_up_finds_the_buckets_of_the_native_size(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm_up()
    assert [tuple(group) for group in engine.buckets] == [(64, 64, 77)]
