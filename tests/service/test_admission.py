"""Admission control with a simulated clock: accepted requests, refusals and Retry-After."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from diffserve.api.errors import EngineUnavailable, QueueFull
from diffserve.api.text_types import TextDelta, TextFinished, TextTimings, TextUsage
from diffserve.api.types import Cancelled, DiffusionParams, Finished, GenerationRequest, ImageFailed, Picture, Progress
from diffserve.api.upscale_types import Upscaled
from diffserve.models.controlnets import Control
from diffserve.models.references import Reference
from diffserve.service.admission import Backlog, Resumed, Ticket, work_of
from diffserve.service.engine.engines import Job
from diffserve.service.http.errors import reply_to
from diffserve.service.metrics import Metrics
from diffserve.store.usage import UsageCounts
from tests.engine.simulated_scheduler import INFO

IMAGE = Picture(width_px=64, height_px=64, data=bytes(3 * 64 * 64))


class Door:
    """A backlog whose engine completes ``rows_per_s``."""

    def __init__(self, max_waiting: int = 256, max_backlog_s: float = 60.0) -> None:
        self.now_s = 100.0
        self.num_engines = 1
        self.metrics = Metrics()
        clock, count = lambda: self.now_s, lambda: self.num_engines
        self.backlog = Backlog("image", max_waiting, max_backlog_s, self.metrics, clock, num_engines=count)
        self.stack = ExitStack()

    def enter(self, client: str = "a", cost: float = 100.0, num_parts: int = 1) -> Ticket:
        return self.stack.enter_context(self.backlog.entered(client, cost, num_parts))

    def learn(self, rows_per_s: float = 10.0) -> None:
        """Record a finished image of ten seconds."""
        with self.backlog.entered("teacher", 10.0 * rows_per_s) as ticket:
            for step in range(1, 11):
                self.now_s += 1.0
                ticket.watch(Progress(request_id="img", image_index=0, step_index=step, num_steps=10))
        assert self.backlog.pace.per_s == pytest.approx(rows_per_s)

    def refusal(self, client: str = "a") -> QueueFull:
        with pytest.raises(QueueFull) as refused:
            self.backlog.check(client)
        return refused.value


def test_one_client_may_fill_the_queue_except_for_a_reserve() -> None:
    door = Door(max_waiting=64)
    for _ in range(56):
        door.enter("a")
    assert "free places are for other clients" in door.refusal("a").message
    for _ in range(7):
        door.enter("b")
    door.refusal("b")
    door.enter("c")
    assert door.backlog.num_waiting == 64
    assert "which is the limit of this server" in door.refusal("d").message
    assert door.backlog.cost_limit is None, "no pace is known"
    door.stack.close()
    assert (door.backlog.num_waiting, door.backlog.cost_left) == (0, 0.0)


@pytest.mark.parametrize("max_waiting", [1, 2, 3])
def test_one_client_may_fill_a_short_queue(max_waiting: int) -> None:
    door = Door(max_waiting=max_waiting)
    for _ in range(max_waiting):
        door.enter()
    door.refusal()


def test_a_started_request_is_no_longer_queued() -> None:
    door = Door(max_waiting=1)
    ticket = door.enter()
    door.refusal()
    ticket.watch(Progress(request_id="img", image_index=0, step_index=1, num_steps=50))
    door.enter()


def test_queue_age_is_the_wait_of_the_oldest_request_without_progress() -> None:
    door = Door()
    assert door.backlog.age_s == 0.0
    first = door.enter("a")
    door.now_s += 3.0
    door.enter("b")
    door.now_s += 4.0
    assert door.backlog.age_s == 7.0
    first.watch(Progress(request_id="img", image_index=0, step_index=1, num_steps=2))
    assert door.backlog.age_s == 4.0
    door.stack.close()
    assert door.backlog.age_s == 0.0


def test_work_is_limited_and_not_only_the_number_of_requests() -> None:
    door = Door(max_backlog_s=60.0)
    door.learn(rows_per_s=10.0)
    assert door.backlog.cost_limit == pytest.approx(600.0)
    door.enter("a", cost=599.0)
    door.enter("a", cost=1e6)  # accepted at any size, and blocks no small request
    door.enter("a", cost=2.0)
    error = door.refusal("a")
    assert "at most 60 s are allowed per client" in error.message
    for _ in range(6):
        door.enter("b", cost=50.0)


def test_steps_before_a_stored_state_are_not_new_work() -> None:
    door = Door()
    door.learn(rows_per_s=10.0)
    ticket = door.enter(cost=1000.0, num_parts=2)
    ticket.watch(Resumed())
    for part in range(2):
        door.now_s += 1.0
        ticket.watch(Progress(request_id="img", image_index=part, step_index=50, num_steps=100))
    assert [ticket.progress, ticket.cost_left] == pytest.approx([0.5, 500.0])
    for step in (51, 52, 53, 54):
        door.now_s += 0.5
        ticket.watch(Progress(request_id="img", image_index=0, step_index=step, num_steps=100))
    pace = door.backlog.pace.per_s
    assert pace is not None
    assert 5.0 < pace < 15.0


def test_heavy_clients_do_not_block_other_clients() -> None:
    door = Door(max_backlog_s=60.0)
    door.learn(rows_per_s=10.0)
    for name in "abcdefgh":
        door.enter(name, cost=1e6)
        door.enter(name, cost=1e6)
        door.refusal(name)
    door.enter("z", cost=50.0)


def test_wait_times_assume_fair_shares() -> None:
    door = Door(max_backlog_s=60.0)
    door.learn(rows_per_s=10.0)
    door.enter("a", cost=500.0)
    assert door.backlog.wait_s("a") == 0.0
    door.enter("a", cost=500.0)
    assert door.backlog.wait_s("a") == pytest.approx(50.0)
    door.enter("b", cost=300.0)
    door.enter("b", cost=200.0)
    assert door.backlog.wait_s("b") == pytest.approx(40.0)
    assert door.backlog.wait_s("a") == pytest.approx(100.0)
    assert door.backlog.wait_s("c") == 0.0


def test_finished_work_frees_capacity() -> None:
    door = Door(max_backlog_s=60.0)
    door.learn(rows_per_s=10.0)
    door.enter(cost=1e6)
    ticket = door.enter(cost=620.0, num_parts=2)
    door.refusal()
    door.now_s += 3.0
    ticket.watch(Progress(request_id="img", image_index=1, step_index=1, num_steps=10))
    assert door.backlog.cost_left == pytest.approx(1e6 + 589.0)
    door.backlog.check("a")
    ticket.watch(ImageFailed(request_id="img", image_index=0, code="x", message="x"))
    assert door.backlog.cost_left == pytest.approx(1e6 + 279.0)
    ticket.watch(Finished(request_id="img", num_painted=1, num_failed=1))
    assert door.backlog.cost_left == 1e6


@pytest.mark.parametrize("end", [Cancelled(request_id="img"), EngineUnavailable("the engine is lost.")])
def test_cancelled_work_leaves_the_backlog_before_its_answer_is_complete(end: object) -> None:
    door = Door(max_waiting=1)
    door.learn()
    door.enter(cost=1e6, num_parts=10).watch(end)
    door.backlog.check("a")


def test_a_slowly_read_answer_does_not_count_as_work_time() -> None:
    door = Door()
    door.learn(rows_per_s=10.0)
    door.enter(cost=10.0).watch(Finished(request_id="img", num_painted=1, num_failed=0))
    door.now_s += 1000.0
    assert door.backlog.pace.per_s == pytest.approx(10.0)


def test_two_engines_double_the_throughput_and_losing_one_halves_it() -> None:
    door = Door(max_waiting=8)
    door.num_engines = 2
    door.learn(rows_per_s=10.0)
    tickets = [door.enter(cost=100.0, client=name) for name in ("a", "b")]
    for step in range(1, 11):
        door.now_s += 1.0
        for ticket in tickets:
            ticket.watch(Progress(request_id="img", image_index=0, step_index=step, num_steps=10))
    assert door.backlog.pace.per_s == pytest.approx(10.0)
    for _ in range(2):
        door.enter(cost=400.0)
    assert door.backlog.max_waiting == 16
    assert door.backlog.wait_s("a") == pytest.approx(20.0)
    door.num_engines = 1
    assert door.backlog.max_waiting == 8
    assert door.backlog.wait_s("a") == pytest.approx(40.0)
    door.num_engines = 0
    assert door.backlog.wait_s("a") == pytest.approx(40.0)


def test_retry_after_is_the_backlog_time_with_jitter() -> None:
    door = Door(max_backlog_s=20.0)
    door.learn(rows_per_s=10.0)
    door.enter("a", cost=300.0)
    door.enter("a", cost=300.0)
    delays_s = [int(reply_to(door.refusal("a")).headers["Retry-After"]) for _ in range(300)]
    assert min(delays_s) >= 24
    assert max(delays_s) <= 36
    assert len(set(delays_s)) >= 8
    assert sum(delays_s) / 300 == pytest.approx(30.5, abs=1.5)
    door.enter("b", cost=1e9)
    door.enter("b", cost=1e9)
    delays_s = [int(reply_to(door.refusal("b")).headers["Retry-After"]) for _ in range(300)]
    assert 1 <= min(delays_s) <= max(delays_s) <= 60
    assert len(set(delays_s)) >= 8, "the longest wait is jittered, too"


def test_refusals_are_counted() -> None:
    door = Door(max_waiting=1)
    door.enter()
    door.refusal()
    assert b'diffserve_engine_requests_total{kind="image",outcome="rejected"} 1.0' in door.metrics.render(None)


@pytest.mark.parametrize(
    ("fields", "diffusion", "work"),
    [
        ({}, {}, 20.0),
        ({"num_images": 3}, {"num_steps": 50}, 300.0),
        ({}, {"guidance_scale": 1.0}, 10.0),
        ({}, {"sampler": "heun"}, 40.0),
        ({"width_px": 128, "height_px": 128}, {}, 80.0),
        ({}, {"sampler": "DPM++ 2M Karras", "num_steps": 1000}, 2000.0),
        ({}, {"hires_scale": 2.0, "hires_strength": 0.5}, 20.0 + 40.0),
        ({}, {"hires_scale": 2.0, "hires_strength": 0.5, "hires_upscaler": "Lanczos"}, 20.0 + 40.0),
        ({}, {"hires_scale": 2.0, "hires_strength": 0.5, "hires_upscaler": "4x"}, 20.0 + 40.0 + 1.0),
        ({"control_images": (IMAGE,)}, {"controlnets": (Control("canny", start=0.5),)}, 20.0 * (1 + 0.5 * 0.4)),
        (
            {"num_images": 2, "reference_images": (IMAGE, IMAGE)},
            {"references": (Reference("plus"), Reference("plus", end=0.5))},
            2 * 20.0 * (1 + 1.5 * 0.04) + 2 * 0.5,
        ),
    ],
)
def test_work_is_images_times_rows_times_steps_times_pixels(
    fields: dict[str, object], diffusion: dict[str, object], work: float
) -> None:
    request = GenerationRequest(prompt="a fox", diffusion=DiffusionParams(**diffusion), **fields)  # type: ignore[arg-type]
    assert work_of(request, INFO) == pytest.approx(work)


def test_texts_are_counted_one_by_one() -> None:
    door = Door(max_waiting=4)
    ticket = door.stack.enter_context(door.backlog.entered("a", 3, 3, 3))
    assert door.backlog.num_waiting == 3
    ticket.watch_texts(0, TextDelta(request_id="txt", text_index=0, text="", token_ids=()))
    assert (door.backlog.num_waiting, door.backlog.cost_left) == (0, 3)
    usage = TextUsage(prompt_tokens=1, cached_tokens=0, output_tokens=1)
    timings = TextTimings(queue_s=0.0, ttft_s=0.0, tpot_s=0.0, total_s=0.0)
    ticket.watch_texts(2, TextFinished(request_id="txt", results=(), usage=usage, timings=timings))
    assert door.backlog.cost_left == 2


@pytest.mark.parametrize(("is_whole", "num_read"), [(True, 1), (False, 3)])
def test_steps_are_counted_without_a_stream_reader(is_whole: bool, num_read: int) -> None:
    door = Door()
    ticket, request = door.enter(cost=100.0), GenerationRequest(prompt="a red fox", request_id="img")

    async def read() -> list[object]:
        job = Job(request, lambda _: None, ticket.watch, is_whole=is_whole)
        for step in (1, 2):
            job.feed(Progress(request_id="img", image_index=0, step_index=step, num_steps=4))
        assert ticket.cost_left == 50.0
        job.feed(Finished(request_id="img", num_painted=1, num_failed=0))
        return [event async for event in job]

    events = asyncio.run(read())
    assert len(events) == num_read
    assert isinstance(events[-1], Finished)


def test_an_upscaled_image_counts_as_an_image() -> None:
    used: list[tuple[str, UsageCounts]] = []
    backlog = Backlog("image", 256, 60.0, Metrics(), count=lambda key, counts: used.append((key, counts)))
    image = Picture(width_px=1, height_px=1, data=bytes(3))
    with backlog.entered("key/abc", 4.0) as ticket:
        ticket.count(Upscaled(request_id="ups-1", image=image, upscaler="small", scale=2, device_s=1.0, waited_s=1.0))
        ticket.advance(0, 1.0)
        assert backlog.cost_left == 0.0
    assert {key for key, _ in used} == {"abc"}
    assert [sum(counts.pictures for _, counts in used), sum(counts.requests for _, counts in used)] == [1, 1]
