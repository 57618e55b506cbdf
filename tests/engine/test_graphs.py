"""Recorded calls: the same bytes as the call itself, whoever is beside; and back to that where anything goes wrong.

A CPU cannot record, so here a recording is the call made again on the buffers that a recording would read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.runtime.unet import graphs
from diffserve.runtime.unet.call import UNetArguments
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.runtime.unet.graphs import CallGraphs, CudaRecord, Recorded
from diffserve.runtime.unet.random_rows import random_rows
from diffserve.types import GenerationRequest, LatentArray
from tests.engine.pipelines import asked

SHAPE = (64, 64, 77)


class Again:
    """Makes a call again; the result lies where it lay."""

    def __init__(self, error: float = 0.0) -> None:
        self.num_replays = 0
        self._error = error

    def __call__(self, run: Callable[[], Tensor]) -> Recorded:
        output = run()

        def replay() -> None:
            self.num_replays += 1
            output.copy_(run() + self._error)

        return Recorded(replay, output, output.nbytes)


def call(num_rows: int, number: float) -> UNetArguments:
    rows = torch.arange(num_rows, dtype=torch.float32)
    pair = Pair(number * torch.ones(num_rows, 3, 1, 2), torch.ones(num_rows, 3, 1, 2))
    return UNetArguments(rows.view(-1, 1, 1, 1) + number, rows, KeysValues((pair,)), {"time_ids": rows.view(-1, 1)})


def make(asked_for: UNetArguments) -> Tensor:
    total = sum(tensor.flatten(1).sum(1) for tensor in (asked_for.tensors[0], *asked_for.tensors[2:]))
    return (total + asked_for.timesteps).view(-1, 1, 1, 1)


def test_pictures_by_recorded_calls_have_the_bytes_of_those_without_alone_and_in_company(
    make_engine: Callable[..., Engine],
) -> None:
    requests = [asked("sd15", "ddim", seed=seed, num_steps=2 + seed) for seed in range(3)]
    requests.append(asked("sd15", "ddim", seed=9, num_steps=4, cache_interval=2))
    wanted = latents_of(make_engine(max_rows=4, cache_dir=""), *requests)
    engine = make_engine(max_rows=4, cache_dir="")
    record = Again()
    recorded = engine.runners.groups.compiled.graphs = CallGraphs(record)
    together = latents_of(engine, *requests)
    alone = [latents_of(engine, request)[0] for request in requests]
    assert together == wanted
    assert alone == wanted
    assert record.num_replays > len(requests)
    assert recorded.num_bytes > 0
    assert not recorded.is_off
    engine.runners.caller.ease()
    assert recorded.num_bytes == 0


def latents_of(engine: Engine, *requests: GenerationRequest) -> list[LatentArray]:
    found = [result.latents for result in engine.generate(list(requests))]
    kept = [latents for latents in found if latents is not None]
    assert len(kept) == len(requests)
    return kept


def test_a_recording_reads_what_it_is_told_now_and_the_longest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    recorded, record = CallGraphs(Again()), recorded_keys
    told = call(2, 1.0)
    for asked_for in (told, told._replace(sample=told.sample + 5.0), call(2, 7.0), call(1, 1.0), call(2, 1.0)):
        found = recorded.run(asked_for, make, is_compiled=False)
        assert found is not None
        assert torch.equal(found, make(asked_for))
    assert record(recorded) == [1, 2]
    recorded.run(call(3, 1.0), make, is_compiled=False)
    assert record(recorded) == [2, 3]
    mixed = (
        KeysValues(told.contexts.layers, torch.ones(2, 1, 1, 3).bool())
        if isinstance(told.contexts, KeysValues)
        else None
    )
    assert mixed is not None
    assert recorded.run(told._replace(contexts=mixed), make, is_compiled=False) is None


def recorded_keys(recorded: CallGraphs) -> list[int]:
    return [num_rows for _, _, num_rows in recorded._graphs]


def refuse(_: Callable[[], Tensor]) -> Recorded:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("record", "why"), [(refuse, "not permitted"), (Again(error=1e-6), "other bytes")])
def test_after_trouble_calls_are_made_one_by_one_which_is_said_once(
    record: Callable[[Callable[[], Tensor]], Recorded], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = CallGraphs(record)
    with caplog.at_level(logging.WARNING):
        assert [recorded.run(call(2, number), make, is_compiled=False) for number in (0.25, 2.0)] == [None, None]
    assert [why in record.message for record in caplog.records] == [True]
    assert recorded.num_bytes == 0


@pytest.mark.gpu
def test_a_cuda_graph_gives_the_bytes_of_the_call() -> None:
    model = load_model("embedded", device="cuda")
    recorded = CallGraphs(CudaRecord(model.device))
    plain = random_rows(model, SHAPE, 4)
    replayed = random_rows(
        model, SHAPE, 4, compiled=lambda call: recorded.run(call, model.unet.plain, is_compiled=False)
    )
    for rows in (range(4), range(3, -1, -1), range(2), range(4)):
        assert torch.equal(replayed(rows), plain(rows))
    assert not recorded.is_off
    assert recorded_keys(recorded) == [2, 4]
