"""Costs from device timers: on a GPU they are read later than the call, without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from diffserve.engine.image.buckets import CostCurve
from diffserve.runtime.accelerators import Stopwatch, TimeSpan
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

CALL_S = 100.0
"""No call of a tiny model takes so long: who finds it has it from the stopwatch."""


class LateStopwatch(Stopwatch):
    """Each call took ``CALL_S`` and one second more than the last, and that is known when two more have begun."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_begun = 0
        self.num_read = 0

    def start(self) -> Callable[[], LateSpan]:
        self.num_begun += 1
        number = self.num_begun
        return lambda: LateSpan(self, number)


class LateSpan(TimeSpan):
    def __init__(self, watch: LateStopwatch, number: int) -> None:
        super().__init__()
        self._watch, self._number = watch, number

    @property
    def is_here(self) -> bool:
        return self._watch.num_begun >= self._number + 2

    @property
    def seconds(self) -> float:
        assert self.is_here, "read before it was known"
        self._watch.num_read += 1
        assert self._number == self._watch.num_read, "read out of turn"
        return CALL_S + self._number


def test_what_is_known_later_is_learnt_later_and_the_bytes_are_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        image_request("sd15", sampler, seed=seed, num_steps=3) for seed, sampler in enumerate(("ddim", "euler_a"))
    ]
    expected = make_engine(max_rows=4).generate(requests)
    learnt: list[tuple[int, float]] = []
    monkeypatch.setattr(CostCurve, "observe", lambda _, *args: learnt.append(args))
    engine = make_engine(max_rows=4)
    watch = engine.runners.caller.stopwatch = LateStopwatch()
    results = engine.generate(requests)
    assert [result.picture.data for result in results] == [result.picture.data for result in expected]
    sizes = [len(call.rows) + call.num_padded for tick in engine.trace for call in tick.calls]
    assert watch.num_begun == len(sizes) > 2
    slow_calls = [observation for observation in learnt if observation[1] > CALL_S]
    assert slow_calls == [(size, CALL_S + number) for number, size in enumerate(sizes[:-2], start=1)]


def test_a_cpu_is_timed_by_the_hosts_clock_and_a_dry_run_not_at_all() -> None:
    now_s = iter((1.0, 3.5))
    stop = Stopwatch(torch.device("cpu"), lambda: next(now_s)).start()
    assert stop() == TimeSpan(2.5)
    assert Stopwatch(torch.device("meta")).start()() is None


@pytest.mark.gpu
def test_the_gpu_stopwatch_measures_device_time_not_launch_time() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    stop = Stopwatch(device).start()
    started_s = time.perf_counter()
    for _ in range(50):
        matrix = torch.mm(matrix, matrix).clamp_(-1.0, 1.0)
    span, wall_s = stop(), time.perf_counter() - started_s
    assert span is not None
    was_here = span.is_here
    torch.cuda.synchronize()
    assert (was_here, span.is_here) == (False, True)
    assert wall_s < span.seconds <= 1.1 * (time.perf_counter() - started_s)
