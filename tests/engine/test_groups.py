"""Shapes: painted at once, measured when there is time, kept on disk."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffserve.api import ipc
from diffserve.api.types import GenerationRequest, ImageFinished
from diffserve.engine import Engine, process
from diffserve.engine.image.shape_groups import GROUPS_KEPT, MOST_TRIALS
from diffserve.engine.image.task import GroupKey
from diffserve.runtime.unet.batch_invariance import SHARED, GroupFacts
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

MEASURING_ROWS = 62
"""What a check of all sizes up to 16 runs, forwards and backwards."""

FIRST_LOOK_ROWS = 3 * (1 + 2 + 4) + 3 * (2 + 4)
"""What a first look runs at most, where one row rounds unlike four: forwards, backwards and on one thread."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit so that all sizes are measured on a busy machine, where a call may take a second."""
    monkeypatch.setattr("diffserve.runtime.unet.batch_invariance.LONGEST_CALL_S", 1e9)


@contextmanager
def counted_rows(engine: Engine) -> Iterator[list[int]]:
    """Yield a list of the number of rows of every UNet call inside the context."""
    calls: list[int] = []

    def hook(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        calls.append(args[0].shape[0])

    handle = engine.model.unet.network.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def odd_size(seed: int = 1, width_px: int = 72, **fields: Any) -> GenerationRequest:
    return image_request("sd15", "ddim", seed=seed, num_steps=3, width_px=width_px, height_px=64, **fields)


def study_all(engine: Engine) -> None:
    while engine.study():
        pass


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_shape_nobody_has_painted_before_is_painted_at_once(make_engine: MakeEngine, deterministic: bool) -> None:
    engine = make_engine(deterministic=deterministic, cache_dir="")
    engine.warm_up()
    with counted_rows(engine) as calls:
        engine.generate(odd_size())
    assert sum(calls) <= 3 * 2 * SHARED < MEASURING_ROWS


def test_a_long_prompt_does_not_hold_up_those_who_paint(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir="")
    engine.warm_up()
    engine.submit(image_request("sd15", "ddim", seed=1, num_steps=8))
    engine.tick()
    engine.submit(image_request("sd15", "ddim", seed=2, num_steps=8, prompt=" ".join(["cat"] * 100)))
    widest = 0
    while engine.has_work:
        with counted_rows(engine) as calls:
            engine.tick()
        widest = max(widest, sum(calls))
    assert widest <= 2 * SHARED


def test_an_idle_engine_measures_one_call_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir="")
    engine.generate(odd_size())
    before = dict(engine.buckets)
    num_slices = 0
    is_going = True
    while is_going:
        with counted_rows(engine) as calls:
            is_going = engine.study()
        assert len(calls) <= 1
        num_slices += bool(calls)
    assert num_slices >= 8
    group = GroupKey(64, 72, 77)
    has_more_sizes = len(engine.buckets[group]) > len(before[group])
    assert has_more_sizes or DEVICE != "cpu", "on a GPU other sizes may round differently"
    assert not engine.study()


def test_a_measurement_ends_between_two_layers_when_a_request_arrives_and_is_made_later(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(cache_dir="")
    engine.generate(odd_size())
    last_layer: list[int] = []
    handle = engine.model.unet.network.conv_out.register_forward_hook(lambda *_: last_layer.append(1))
    arrivals = iter([False] * 5)
    assert engine.study(lambda: next(arrivals, True)), "an interrupted measurement is still to be made"
    assert not last_layer
    study_all(engine)
    handle.remove()
    assert last_layer
    has_more_sizes = len(engine.buckets[GroupKey(64, 72, 77)]) > 1
    assert has_more_sizes or DEVICE != "cpu", "on a GPU other sizes may round differently"


def test_an_engine_process_measures_only_after_a_quiet_time_and_stops_for_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process loop runs for real; only its studio is replaced by one that notes when it measures."""
    monkeypatch.setattr(process, "QUIET_S", 0.2)
    client_socket, server_socket = socket.socketpair()
    with client_socket, server_socket:
        loop = process.EngineProcess(ipc.EngineEnd(server_socket))
        began_s = time.monotonic()
        measured_s: list[float] = []

        def study(has_arrived: Callable[[], bool]) -> bool:
            measured_s.append(time.monotonic() - began_s)
            assert not has_arrived()
            loop._inbox.put(ipc.LookAgain(name="model"))
            assert has_arrived()
            studio.has_work = True
            return True

        studio: Any = SimpleNamespace(has_work=False, study=study)
        studio.images = SimpleNamespace(next_wakeup_s=None, retry_load=lambda name: None)
        loop._take_commands(studio)
    assert len(measured_s) == 1
    assert measured_s[0] >= 0.2


@pytest.mark.slow
def test_a_new_shape_is_measured_while_its_images_wait(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir="")
    for _ in range(30):  # on a busy machine an eighth of the time is little
        for seed in range(24):
            engine.submit(odd_size(seed))
        events = list(engine.events())
        assert sum(isinstance(event, ImageFinished) for event in events) == 24
        if max(len(call.rows) for tick in engine.trace for call in tick.calls) > 2:
            return
    pytest.fail("rows never shared a call")


def test_what_was_measured_is_known_at_the_next_start(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = make_engine(cache_dir=str(tmp_path))
    with counted_rows(first) as calls_before:
        first.warm_up()
        first.generate(odd_size())
        study_all(first)
    second = make_engine(cache_dir=str(tmp_path))
    with counted_rows(second) as calls:
        second.warm_up()
        second.generate(odd_size())
        assert not second.study()
    assert second.buckets == first.buckets
    num_painting = 3 * 2
    assert len(calls) <= num_painting + MOST_TRIALS < len(calls_before)


def test_a_single_picture_at_the_native_size_pays_for_a_first_look_once(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    messages = []
    for _ in range(2):
        engine = make_engine(cache_dir=str(tmp_path))
        with counted_rows(engine) as calls:
            engine.generate(image_request("sd15", "ddim", seed=1, num_steps=3))
        messages.append(sum(calls))
    assert messages[1] <= 3 * SHARED
    assert messages[0] - messages[1] <= FIRST_LOOK_ROWS < MEASURING_ROWS


@pytest.mark.slow
def test_implausible_measurements_are_repeated(make_engine: MakeEngine, tmp_path: Path) -> None:
    first = make_engine(cache_dir=str(tmp_path), max_rows=2)
    first.warm_up()
    files = list(tmp_path.rglob("*.json"))
    assert files
    rubbish: list[object] = [None, [], {"buckets": [3]}, "buckets", {"buckets": [0], "counts": [1]}]
    for value in rubbish:
        for file in files:
            entry = json.loads(file.read_text())
            file.write_text(json.dumps({"key": entry["key"], "value": value}))
        second = make_engine(cache_dir=str(tmp_path), max_rows=2)
        second.warm_up()
        assert second.buckets == first.buckets, value


def test_other_circumstances_have_facts_of_their_own(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine(cache_dir=str(tmp_path)).warm_up()
    free = make_engine(cache_dir=str(tmp_path), deterministic=False)
    with counted_rows(free) as calls:
        free.warm_up()
    assert sum(calls) >= MEASURING_ROWS


def test_shapes_that_are_remembered_are_few(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir="")
    groups = engine.runners.groups
    for side in range(GROUPS_KEPT + 20):
        groups.facts_of(GroupKey(64, 8 * (side + 1), 77))
    assert len(engine.buckets) == GROUPS_KEPT
    assert not groups.is_unmeasured(GroupKey(64, 8, 77))
    assert groups.is_unmeasured(GroupKey(64, 8 * (GROUPS_KEPT + 20), 77))


def test_a_shape_that_cannot_be_measured_is_painted_all_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(cache_dir="")
    engine.warm_up()
    with monkeypatch.context() as broken:
        broken.setattr("diffserve.engine.image.shape_groups.random_rows", None)
        engine.generate(odd_size())
        study_all(engine)
    assert "a shape could not be measured" in caplog.text
    assert len(engine.generate(odd_size())) == 1


def test_solo_time_is_computed_from_the_calls_that_the_request_uses(make_engine: MakeEngine) -> None:
    """Costs of the slower, uncompiled network would set deadlines that are too late."""
    groups = make_engine(cache_dir="").runners.groups
    plain, unread = GroupKey(64, 64, 77), GroupKey(64, 64, 0)
    groups.facts_of(plain)
    facts = GroupFacts(buckets=(1, 2), counts=(1,), seconds={1: 1e-6, 2: 2e-6})
    before = groups.call_s(unread, 2)
    assert before == groups.call_s(plain, 2) > 2e-6
    groups.take(plain._replace(is_compiled=True), facts)
    groups.facts_of(plain._replace(lora_rank=16))
    groups.facts_of(plain)
    assert groups.call_s(unread, 2) == pytest.approx(2e-6)
    assert groups.call_s(plain, 2) == before
    groups.compiled.forget(plain._replace(is_compiled=True))
    assert groups.call_s(unread, 2) == before
    assert groups.call_s(GroupKey(64, 72, 0), 2) == pytest.approx(before * 72 / 64)
