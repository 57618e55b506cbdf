"""Engines on tiny models, one per kind and session, proven whole after every test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.engine import Engine
from diffserve.engine.base_engine import TRACE_TICKS
from diffserve.runtime.kv import PagePool
from diffserve.runtime.transfer import Fetched
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE

MakeEngine = Callable[..., Engine]
STRANGER = "stranger"
"""A tenant of a shared pool that is no engine's."""


@pytest.fixture(scope="session")
def _models(tiny_model: Callable[[str], Path]) -> Callable[[str], Any]:
    """``_models(kind)``: the loaded tiny model in float32, shared by engines."""
    from diffserve.runtime import load_model

    loaded: dict[str, Any] = {}

    def load(kind: str) -> Any:
        if kind not in loaded:
            loaded[kind] = load_model(tiny_model(kind), dtype="float32", device=DEVICE)
        return loaded[kind]

    return load


@pytest.fixture
def waits_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from the device are there at once, as on a CPU: previews come at every step and in the same tick."""
    monkeypatch.setattr(Fetched, "is_here", property(lambda fetched: fetched.read() is not None))


@pytest.fixture
def loaded(_models: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader of the tiny model of a kind."""
    return _models


@pytest.fixture
def make_engine(_models: Callable[[str], Any]) -> Iterator[MakeEngine]:
    """``make_engine(kind, pool, clock, trace_ticks, **config)``: a new engine; slots and pages are counted later."""
    engines: list[Engine] = []

    def make(
        kind: str = "sd15",
        pool: PagePool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace_ticks: int = TRACE_TICKS,
        **config: Any,
    ) -> Engine:
        engines.append(Engine(_models(kind), EngineConfig(**config), pool=pool, clock=clock, trace_ticks=trace_ticks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        assert not engine.num_live
        assert engine.scheduler.slots.num_free == engine.config.max_lanes
        if engine.page_stats is not None:
            tenants = engine.page_stats.tenants.items()
            assert {name: stats.held_pages for name, stats in tenants if stats.held_pages and name != STRANGER} == {}
