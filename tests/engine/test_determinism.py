"""An image's bytes do not depend on its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from diffserve.api.types import GenerationRequest, ImageFinished, ImageResult
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.task import GroupKey
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet.batch_invariance import (
    SHARED,
    SOLO,
    GroupFacts,
    Predict,
    Trial,
    end_of,
    first_look,
    study,
    timed,
)
from diffserve.settings.config import POLICIES
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

STEPS = (4, 10, 20, 50)
SAMPLERS = ("ddim", "euler_a", "heun", "dpmpp_2m")
GUIDANCE = (1.0, 5.0, 7.5)


def sixteen() -> list[GenerationRequest]:
    """Sixteen requests that share nothing but their size."""
    return [
        image_request(
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


def test_clients_decide_who_is_next_and_never_what_is_painted(make_engine: MakeEngine) -> None:
    """One client has thirty requests in the engine before another comes with one, which is painted among the first."""
    engine = make_engine(max_rows=8)
    crowd = [
        engine.submit(replace(image_request("sd15", "euler_a", seed=seed, num_steps=4), client="a"))
        for seed in range(30)
    ]
    engine.tick()
    guest = image_request("sd15", "euler_a", seed=99, num_steps=4)
    engine.submit(replace(guest, client="b"))
    painted = [event.result for event in engine.events() if isinstance(event, ImageFinished)]
    order = [result.request_id for result in painted]
    assert order.index(guest.request_id) <= 8
    assert set(order) == {*crowd, guest.request_id}
    solo = make_engine(max_rows=8)
    for request, result in ((guest, painted[order.index(guest.request_id)]), (None, painted[-1])):
        again = request or image_request("sd15", "euler_a", seed=result.seed, num_steps=4)
        [alone] = solo.generate(replace(again, request_id="again"))
        assert content(alone) == content(result)


def test_pictures_are_the_same_bytes_under_every_policy(make_engine: MakeEngine) -> None:
    outputs: dict[str, list[tuple[bytes, bytes]]] = {}
    for policy in POLICIES:
        engine = make_engine(max_rows=4, policy=policy)
        requests = [replace(request, request_id=f"{place}") for place, request in enumerate(sixteen()[:8:2])]
        outputs[policy] = [content(result) for result in engine.generate(requests)]
    assert all(pictures == outputs["latency"] for pictures in outputs.values())


def test_deterministic_is_the_default_on_a_cpu(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.is_deterministic
    assert engine.tolerance == 0.0


@pytest.mark.parametrize("max_rows", [2, 5, 16])
def test_bytes_do_not_depend_on_the_row_limit(make_engine: MakeEngine, max_rows: int) -> None:
    few = [image_request("sd15", "euler_a", seed=seed, num_steps=3) for seed in range(3)]
    reference = make_engine(max_rows=8).generate(few)
    again = [image_request("sd15", "euler_a", seed=seed, num_steps=3) for seed in range(3)]
    if max_rows >= 4:
        assert list(map(content, make_engine(max_rows=max_rows).generate(again))) == list(map(content, reference))
    else:
        assert len(make_engine(max_rows=max_rows).generate(again)) == 3


def test_the_free_mode_stays_within_its_stated_tolerance(make_engine: MakeEngine) -> None:
    free = make_engine(deterministic=False, max_rows=16)
    assert free.tolerance > 0.0
    exact = make_engine(max_rows=16)
    requests = [image_request("sd15", "dpmpp_2m", seed=seed, num_steps=5) for seed in range(3)]
    again = [image_request("sd15", "dpmpp_2m", seed=seed, num_steps=5) for seed in range(3)]
    for result, other in zip(free.generate(requests), exact.generate(again), strict=True):
        assert result.latents is not None
        assert other.latents is not None
        assert abs(result.latents.array - other.latents.array).max() < free.tolerance


def test_image_i_of_a_request_is_the_single_image_with_seed_plus_i(make_engine: MakeEngine) -> None:
    engine = make_engine()
    several = engine.generate(image_request("sd15", "ddpm", seed=20, num_images=3, num_steps=4))
    assert [result.seed for result in several] == [20, 21, 22]
    for index, result in enumerate(several):
        [single] = engine.generate(image_request("sd15", "ddpm", seed=20 + index, num_steps=4))
        assert content(single) == content(result)


def test_a_reused_slot_holds_nothing_of_its_last_image(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=1)
    first = engine.generate(image_request("sd15", "dpmpp_2m", seed=1, num_steps=3))
    engine.generate(image_request("sd15", "unipc", seed=2, num_steps=5))
    again = engine.generate(image_request("sd15", "dpmpp_2m", seed=1, num_steps=3))
    assert content(again[0]) == content(first[0])


def outcome(predict: Predict, reference: int | None, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> GroupFacts:
    """Return the result of a study of ``predict``."""
    return end_of(study(timed(predict), sizes, reference=reference))


def few_rows_differ(rows: range) -> torch.Tensor:
    values = torch.tensor([float(row) for row in rows]).reshape(-1, 1, 1, 1)
    return values + (1e-6 if len(rows) < 4 else 0.0) * (values + 1.0)


def test_a_study_keeps_only_sizes_that_agree_with_the_reference() -> None:
    assert first_look(timed(few_rows_differ), (1,)).buckets == (SHARED,)
    assert outcome(few_rows_differ, SHARED).buckets == (4, 8, 16)
    assert outcome(few_rows_differ, SOLO).buckets == (1, 2)
    assert outcome(few_rows_differ, SHARED, sizes=(1, 2)).buckets == (4,)


def test_a_study_drops_a_size_where_position_matters() -> None:
    def predict(rows: range) -> torch.Tensor:
        values = torch.tensor([float(row) for row in rows]).reshape(-1, 1, 1, 1)
        return values + torch.arange(len(rows)).reshape(-1, 1, 1, 1) * (len(rows) == 8)

    assert first_look(timed(predict), (1,)).buckets == (1, 2, 4)
    assert outcome(predict, SOLO, sizes=(1, 2, 4, 8)).buckets == (1, 2, 4)


def test_rows_run_one_by_one_where_no_two_sizes_agree_and_where_even_the_reference_minds_the_place() -> None:
    def predict(rows: range) -> torch.Tensor:
        return torch.arange(len(rows)).reshape(-1, 1, 1, 1) + float(len(rows))

    assert first_look(timed(predict), (1,)).buckets == (SOLO,)
    assert outcome(predict, SOLO).buckets == (SOLO,)
    minded = outcome(predict, SHARED)
    assert minded.is_alone
    assert CostCurve.of(minded, is_exact=True).calls(3) == [(0, 1, 4), (1, 2, 4), (2, 3, 4)]


def test_a_study_makes_one_call_a_slice_and_leaves_out_what_would_take_too_long() -> None:
    called: list[int] = []

    def attempt(rows: range, _num_threads: int) -> Trial:
        called.append(len(rows))
        return Trial(few_rows_differ(rows), 0.2 * len(rows))

    going = study(attempt, (1, 2, 4, 8, 16), reference=SHARED)
    for num_calls in range(1, 7):
        next(going)
        assert len(called) == num_calls
    with pytest.raises(StopIteration) as end:
        next(going)
    assert max(called) == 4
    assert not end.value.value.is_complete


def test_threads_that_round_differently_are_not_taken_into_use() -> None:
    def attempt(rows: range, num_threads: int) -> Trial:
        return Trial(few_rows_differ(rows) + (num_threads == 3), 0.001)

    assert end_of(study(attempt, (4, 8), reference=SHARED, counts=(4, 3, 1))).counts == (4, 1)


def test_a_first_look_that_finds_no_memory_settles_nothing() -> None:
    def attempt(rows: range, _num_threads: int) -> Trial:
        raise torch.OutOfMemoryError("no room")

    outcome = first_look(attempt, (2, 1))
    assert (outcome.buckets, outcome.counts, outcome.seconds) == ((SOLO,), (2,), {})


@pytest.mark.parametrize("reference", [SOLO, SHARED])
def test_pictures_keep_their_bytes_when_their_shape_is_measured(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, reference: int
) -> None:
    look = GroupFacts(
        buckets=(reference,), counts=(torch.get_num_threads(),), seconds={reference: 0.1}, is_complete=False
    )
    monkeypatch.setattr("diffserve.engine.image.shape_groups.first_look", lambda *_: look)
    monkeypatch.setattr("diffserve.runtime.unet.batch_invariance.LONGEST_CALL_S", 1e9)
    engine = make_engine(cache_dir="")

    def requests() -> list[GenerationRequest]:
        odd = {"width_px": 72, "height_px": 64, "num_steps": 3, "guidance_scale": 5.0}
        return [image_request("sd15", "euler_a", seed=seed, **odd) for seed in range(4)]

    few = requests()
    cautious = [engine.generate(request)[0] for request in few]
    assert set(engine.buckets.values()) == {(reference,)}
    while engine.study():
        pass
    assert all(reference in buckets for buckets in engine.buckets.values())
    assert list(map(content, engine.generate(requests()))) == list(map(content, cautious))


def test_engines_that_look_at_the_same_time_use_the_look_that_is_stored_first(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (make_engine(cache_dir=str(tmp_path)) for _ in range(2))
    odd = image_request("sd15", "ddim", seed=1, num_steps=2, width_px=72)
    counts, waiting_engines = (torch.get_num_threads(),), [second]

    def look(*_: object) -> GroupFacts:
        if not waiting_engines:
            return GroupFacts(buckets=(SHARED,), counts=counts, seconds={SHARED: 0.1}, is_complete=False)
        waiting_engines.pop().generate(odd)
        return GroupFacts(buckets=(SOLO,), counts=counts, seconds={SOLO: 0.1}, is_complete=False)

    monkeypatch.setattr("diffserve.engine.image.shape_groups.first_look", look)
    first.generate(odd)
    assert set(first.buckets.values()) == set(second.buckets.values()) == {(SHARED,)}


def test_a_large_model_is_not_checked_but_run_row_by_row(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffserve.engine.image.shape_groups.CHECK_LIMIT_CPU", 1.0)
    monkeypatch.setattr("diffserve.engine.image.shape_groups.PAIR_LIMIT_CPU", 1.0)
    engine = make_engine()
    together = engine.generate([image_request("sd15", "euler", seed=seed, num_steps=2) for seed in range(2)])
    assert set(engine.buckets.values()) == {(1,)}
    assert all(len(call.rows) == 1 for tick in engine.trace for call in tick.calls)
    [alone] = engine.generate(image_request("sd15", "euler", seed=1, num_steps=2))
    assert content(alone) == content(together[1])


@pytest.mark.parametrize("minds_its_place", [False, True])
def test_rows_of_a_model_that_is_not_so_large_run_in_pairs_if_that_gives_the_same_bytes_in_both_places(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, minds_its_place: bool
) -> None:
    monkeypatch.setattr("diffserve.engine.image.shape_groups.CHECK_LIMIT_CPU", 1.0)
    if minds_its_place:
        monkeypatch.setattr("diffserve.runtime.unet.batch_invariance._agrees", lambda *_: False)
    requests = [("euler", 5.0), ("dpmpp_2m", 1.0), ("euler_a", 5.0)]

    def make_requests() -> list[GenerationRequest]:
        return [
            image_request("sd15", sampler, seed=seed, num_steps=2, guidance_scale=guidance)
            for seed, (sampler, guidance) in enumerate(requests)
        ]

    engine = make_engine(cache_dir=str(tmp_path))
    together = engine.generate(make_requests())
    size = 1 if minds_its_place else 2
    assert set(engine.buckets.values()) == {(size,)}
    assert {len(call.rows) + call.num_padded for tick in engine.trace for call in tick.calls} == {size}
    monkeypatch.setattr("diffserve.engine.image.shape_groups.study", None)  # known from now on
    for place in (1, 2):
        [alone] = make_engine(cache_dir=str(tmp_path)).generate(make_requests()[place])
        assert content(alone) == content(together[place])


def test_warming_up_finds_the_buckets_of_the_native_size(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm_up()
    assert list(engine.buckets) == [GroupKey(64, 64, 77)]


def test_what_is_found_out_of_a_machine_is_kept_under_the_number_of_threads_that_was_asked_for(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, thread_counts = torch.get_num_threads(), list[int]()

    def watched(*args: Any, **options: Any) -> Any:
        thread_counts.append(torch.get_num_threads())  # which is a part of the name of what it reads
        return make_conditioner(*args, **options)

    monkeypatch.setattr("diffserve.engine.image.runner.make_conditioner", watched)
    try:
        make_engine(threads=before + 1)
    finally:
        torch.set_num_threads(before)
    assert thread_counts == [before + 1]
