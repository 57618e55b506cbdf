"""Recorded UNet calls: the same bytes as the call itself, and plain calls wherever recording fails.

A CPU cannot record, so here a recording is the call made again on the buffers that a recording would read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffserve.api.types import GenerationRequest, LatentArray
from diffserve.engine import Engine
from diffserve.engine.image.room import LOOK_EVERY_S
from diffserve.engine.image.task import GroupKey
from diffserve.models.controlnets import Control
from diffserve.runtime import load_model
from diffserve.runtime.low_rank import LoRASet, RowLoRAs, adaptable, of_pictures, random_set
from diffserve.runtime.unet import graphs
from diffserve.runtime.unet.call import Outputs, UNetArguments
from diffserve.runtime.unet.compiled import FlatUNet
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.runtime.unet.graphs import FIRST_PAUSE_S, LONGEST_PAUSE_S, CallGraphs, CudaRecord, Recording, graph_sizes
from diffserve.runtime.unet.random_rows import random_call, random_rows
from diffserve.settings.config import EngineConfig
from tests.engine import controlnets, loras
from tests.engine.controlnets import controlled
from tests.engine.pipelines import image_request

SHAPE = (64, 64, 77)


class Again:
    """Makes a call again; the results lie where they lay. ``replay_s`` and ``launch_s``: what it reports."""

    def __init__(self, error: float = 0.0, replay_s: float = 0.5, launch_s: float = 1.0) -> None:
        self.num_replays = 0
        self.errors: list[Exception] = []
        self._error = error
        self._times = {"replay_s": replay_s, "launch_s": launch_s}

    def __call__(self, run: Callable[[], Outputs]) -> Recording:
        if self.errors:
            raise self.errors.pop(0)
        outputs = run()

        def replay() -> None:
            self.num_replays += 1
            for output, repeated in zip(outputs, run(), strict=True):
                output.copy_(repeated + self._error)

        replay()
        return Recording(replay, outputs, sum(output.nbytes for output in outputs), **self._times)


def call(num_rows: int, number: float = 1.0) -> UNetArguments:
    rows = torch.arange(num_rows, dtype=torch.float32)
    pair = Pair(number * torch.ones(num_rows, 3, 1, 2), torch.ones(num_rows, 3, 1, 2))
    return UNetArguments(rows.view(-1, 1, 1, 1) + number, rows, KeysValues((pair,)), {"time_ids": rows.view(-1, 1)})


def make(arguments: UNetArguments) -> Outputs:
    total = sum(tensor.flatten(1).sum(1) for tensor in (arguments.tensors[0], *arguments.tensors[2:]))
    return ((total + arguments.timesteps).view(-1, 1, 1, 1),)


def run(recorded: CallGraphs, arguments: UNetArguments, name: str = "") -> Tensor | None:
    outputs = recorded.recorder(name)(arguments, make, ())
    return None if outputs is None else outputs[0]


def recorded_rows(recorded: CallGraphs) -> list[int]:
    return [num_rows for *_, num_rows in recorded._graphs]


def latents_of(engine: Engine, *requests: GenerationRequest) -> list[LatentArray]:
    results = engine.generate(list(requests))
    latents = [result.latents for result in results if result.latents is not None]
    assert len(latents) == len(requests)
    return latents


def adapter(model: Any, first: int) -> LoRASet:
    """Save an adapter that changes every fifth layer from number ``first`` on."""
    layers = list(adaptable(model.unet.network).values())
    return random_set(layers[first::5], 16, torch.empty(0))


def adapted(make_engine: Callable[..., Engine], folder: Path, **config: Any) -> Engine:
    """Return an engine whose requests may have ControlNets and adapters."""
    model = make_engine(cache_dir="").model
    if not any(folder.iterdir()):
        loras.write_folder(folder, model)
        controlnets.write_folder(folder, model.unet.network)
    return Engine(
        controlnets.with_folder(loras.with_folder(model, folder), folder), EngineConfig(cache_dir="", **config)
    )


def test_images_by_recorded_calls_have_the_bytes_of_those_without_alone_and_together(
    make_engine: Callable[..., Engine],
) -> None:
    requests = [image_request("sd15", "ddim", seed=seed, num_steps=2 + seed) for seed in range(3)]
    expected = latents_of(make_engine(max_rows=4, cache_dir=""), *requests)
    engine = make_engine(max_rows=4, cache_dir="")
    record = Again()
    recorded = engine.runners.groups.compiled.graphs = CallGraphs(record)
    together = latents_of(engine, *requests)
    alone = [latents_of(engine, request)[0] for request in requests]
    assert together == expected
    assert alone == expected
    assert record.num_replays > len(requests)
    assert recorded.num_bytes > 0
    engine.runners.caller.free_caches()
    assert recorded.num_bytes == 0


@pytest.mark.parametrize("what", ["loras", "controlnets", "deep cache"])
def test_calls_of_every_kind_are_recorded_and_keep_their_bytes(
    make_engine: Callable[..., Engine], tmp_path: Path, what: str
) -> None:
    requests: list[GenerationRequest] = {
        "loras": [
            image_request("sd15", "ddim", seed=seed, num_steps=2 + seed, prompt=f"cat <lora:{name}>")
            for seed, name in enumerate(("attention", "kernels", "queries:-0.5"))
        ],
        "controlnets": [controlled(Control("edges"), seed=seed, num_steps=2 + seed) for seed in range(3)],
        "deep cache": [
            image_request("sd15", "ddim", seed=seed, num_steps=4 + seed, cache_interval=2) for seed in range(3)
        ],
    }[what]
    expected = latents_of(adapted(make_engine, tmp_path, max_rows=4), *requests)
    engine = adapted(make_engine, tmp_path, max_rows=4)
    recorded = engine.runners.groups.compiled.graphs = CallGraphs(Again())
    assert latents_of(engine, *requests) == expected
    assert [latents_of(engine, request)[0] for request in requests] == expected
    keys: list[Any] = list(recorded._graphs)
    groups = [key[0][0] for key in keys]
    assert {
        "loras": any(group.lora_rank for group in groups),
        "controlnets": any(group.is_controlled for group in groups),
        "deep cache": {group.is_shallow for group in groups} == {True, False},
    }[what]
    engine.check_integrity()


def test_without_promised_bytes_calls_are_padded_to_a_few_sizes(make_engine: Callable[..., Engine]) -> None:
    requests = [image_request("sd15", "ddim", seed=seed, num_steps=2 + seed) for seed in range(5)]
    config: dict[str, Any] = {"max_rows": 10, "deterministic": False, "cache_dir": ""}
    expected = latents_of(make_engine(**config), *requests)
    engine = make_engine(**config)
    recorded = engine.runners.groups.compiled.graphs = CallGraphs(Again(), graph_sizes(10))
    padded = latents_of(engine, *requests)
    for latents, reference in zip(padded, expected, strict=True):
        assert np.allclose(latents.array, reference.array, atol=1e-4)
    assert set(recorded_rows(recorded)) <= {1, 2, 3, 4, 6, 8, 10}


def test_sizes_to_record_are_powers_of_two_and_halfway_between() -> None:
    assert graph_sizes(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert graph_sizes(10) == (1, 2, 3, 4, 6, 8, 10)
    assert graph_sizes(1) == (1,)


def test_padding_rows_are_copies_that_depend_on_no_earlier_call() -> None:
    recorded = CallGraphs(Again(), sizes=(2, 4, 8))
    spoiled = call(8)
    spoiled.sample[3:] = torch.nan
    run(recorded, spoiled)
    for num_rows in (3, 7, 4, 1, 5, 8):
        output = run(recorded, call(num_rows, number=2.0))
        assert output is not None
        assert torch.equal(output, make(call(num_rows, number=2.0))[0])
    assert recorded_rows(recorded) == [4, 2, 8]
    for graph in recorded._graphs.values():
        assert all(tensor.isfinite().all() for output in graph.recorded.outputs for tensor in output)


def test_a_call_is_padded_only_where_launches_take_longer_than_the_device() -> None:
    recorded = CallGraphs(Again(replay_s=2.0, launch_s=1.0), sizes=(2, 4))
    assert run(recorded, call(3)) is not None, "its recording tells what it costs"
    assert run(recorded, call(3)) is None
    assert run(recorded, call(4)) is not None
    assert run(recorded, call(2)) is not None


def test_a_compiled_call_is_not_padded() -> None:
    recorded = CallGraphs(Again(), sizes=(4,))
    recorder = recorded.recorder("packages", is_padded=False)
    assert recorder(call(3), make, ()) is not None
    assert recorded_rows(recorded) == [3]


def test_a_recording_reads_its_arguments_and_the_longest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    recorded = CallGraphs(Again())
    first = call(2, 1.0)
    for arguments in (first, first._replace(sample=first.sample + 5.0), call(2, 7.0), call(1, 1.0), call(2, 1.0)):
        output = run(recorded, arguments)
        assert output is not None
        assert torch.equal(output, make(arguments)[0])
    assert recorded_rows(recorded) == [1, 2]
    run(recorded, call(3, 1.0))
    assert recorded_rows(recorded) == [2, 3]
    assert isinstance(first.contexts, KeysValues)
    mixed = KeysValues(first.contexts.layers, torch.ones(2, 1, 1, 3).bool())
    assert run(recorded, first._replace(contexts=mixed)) is None


def test_texts_and_adapters_are_copied_only_when_the_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = torch._foreach_copy_

    def copy_and_count(buffers: list[Tensor], tensors: list[Tensor]) -> None:
        copied.append(len(buffers))
        copy(buffers, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_count)
    model = load_model("embedded", device="cpu", dtype="float32")
    sets = [adapter(model, 0), adapter(model, 3)]
    contexts = random_call(model, SHAPE, 2).contexts
    recorder = CallGraphs(Again()).recorder("")
    inputs: dict[str, Any] = {"model_input": torch.randn(2, 8, 8, 8), "timesteps": torch.ones(2), "contexts": contexts}
    rows = RowLoRAs(sets)
    for adapters in (rows, rows, RowLoRAs(sets[::-1])):
        output = model.unet.predict(**inputs, loras=adapters, recorder=recorder)
        assert torch.equal(output, model.unet.predict(**inputs, loras=adapters))
    num_texts = 1 if isinstance(contexts, Tensor) else 2 * len(contexts.layers)
    num_all = 2 + num_texts + 2 * len(rows.layers)
    assert copied == [num_all, 2, num_all]


def test_calls_with_very_large_adapters_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("embedded", device="cpu", dtype="float32")
    predict = random_rows(model, SHAPE, 2, recorder=(recorded := CallGraphs(Again())).recorder(""), lora_rank=16)
    predict(range(2))
    assert recorded.num_graphs == 1
    monkeypatch.setattr("diffserve.runtime.low_rank.KEPT_BYTES", 1 << 20)
    recorded.clear()
    predict(range(2))
    assert recorded.num_graphs == 0


def test_recorded_compiled_calls_have_adapters_and_the_network_makes_those_that_fail() -> None:
    model = load_model("embedded", device="cpu", dtype="float32")
    adapters = RowLoRAs([adapter(model, 0)] * 2)
    inputs: dict[str, Any] = {"model_input": torch.randn(2, 8, 8, 8), "timesteps": torch.ones(2)}
    inputs["contexts"] = random_call(model, SHAPE, 2).contexts
    calls: list[UNetArguments] = []

    def compiled(call: UNetArguments) -> Tensor:
        calls.append(call)
        output: Tensor = FlatUNet(model.unet.network, call)(*call.tensors)
        return output

    expected = model.unet.predict(**inputs, loras=adapters)
    assert (expected - model.unet.predict(**inputs)).abs().max() > 0.01
    for function in (compiled, lambda _: None):
        recorder = CallGraphs(Again()).recorder("", is_padded=False)
        for _ in range(2):
            output = model.unet.predict(**inputs, loras=adapters, compiled=function, recorder=recorder)
            assert torch.allclose(output, expected, atol=1e-5)
    is_paged = isinstance(inputs["contexts"], KeysValues)
    assert len(calls[0].factors) == len(of_pictures(model.unet.network, has_keys_values=is_paged))


def test_recordings_of_fewer_rows_share_the_largest_buffers() -> None:
    recorded = CallGraphs(Again())
    run(recorded, call(8))
    buffers = recorded.num_bytes - recorded.pool_bytes
    assert buffers == sum(tensor.nbytes for tensor in call(8).tensors)
    for num_rows in (4, 2, 1):
        run(recorded, call(num_rows))
    assert recorded.num_bytes - recorded.pool_bytes == buffers
    assert recorded.pool_bytes == sum(4 * num_rows for num_rows in (8, 4, 2, 1))
    for num_rows in (1, 8, 2):
        output = run(recorded, call(num_rows, 3.0))
        assert output is not None
        assert torch.equal(output, make(call(num_rows, 3.0))[0])


def test_memory_of_recordings_is_not_offered_to_calls(make_engine: Callable[..., Engine]) -> None:
    now_s = [0.0]
    for config, share in ({"activation_bytes": 1 << 24}, 1.0), ({}, 0.0):
        engine = make_engine(cache_dir="", clock=lambda: now_s[0], **config)
        room, recorded = engine.runners.room, CallGraphs(Again())
        room.recorded_bytes = lambda recorded=recorded: (0, recorded.num_bytes)  # type: ignore[misc]
        group = GroupKey(*SHAPE)
        before = room.rows(group)
        big = call(1)._replace(sample=torch.zeros(1, 1 << 20, 2, 2))
        run(recorded, big)
        now_s[0] += LOOK_EVERY_S
        assert recorded.num_bytes >= big.sample.nbytes
        assert (room.rows(group) < before) == bool(share), "buffers are allocated, so they do not look free"


def test_after_an_out_of_memory_error_calls_are_recorded_again_after_a_pause_that_grows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s, record = [0.0], Again()
    recorded = CallGraphs(record, clock=lambda: now_s[0])
    assert run(recorded, call(1)) is not None
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        record.errors.append(torch.OutOfMemoryError("CUDA out of memory"))
        with caplog.at_level(logging.WARNING):
            assert run(recorded, call(8)) is None
        assert recorded.num_bytes == 0, "all recordings are freed"
        assert f"8 rows are not recorded for {pause_s:.0f} s" in caplog.messages[-1]
        assert run(recorded, call(8)) is None
        assert run(recorded, call(1)) is not None, "what is smaller may fit"
        now_s[0] += pause_s
    assert len(caplog.messages) == 3
    assert run(recorded, call(8)) is not None
    now_s[0] += 2 * LONGEST_PAUSE_S
    recorded._graphs.clear()
    record.errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    run(recorded, call(8))
    assert f"for {FIRST_PAUSE_S:.0f} s" in caplog.messages[-1]


def test_an_out_of_memory_error_is_known_behind_the_error_of_the_recording_it_broke() -> None:
    record, now_s = Again(), [0.0]
    recorded = CallGraphs(record, clock=lambda: now_s[0])
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    record.errors.append(error)
    assert run(recorded, call(2)) is None
    now_s[0] += FIRST_PAUSE_S
    assert run(recorded, call(2)) is not None


def test_memory_given_back_is_not_taken_again_at_once() -> None:
    now_s = [0.0]
    recorded = CallGraphs(Again(), clock=lambda: now_s[0])
    run(recorded, call(2))
    recorded.clear()
    recorded.clear()
    assert recorded.num_bytes == 0
    assert run(recorded, call(2)) is None
    now_s[0] += FIRST_PAUSE_S
    assert run(recorded, call(2)) is not None


@pytest.mark.parametrize(
    ("error", "why"), [(RuntimeError("operation not permitted when stream is capturing"), "not permitted"), (None, "")]
)
def test_any_other_error_turns_recording_off_for_such_calls_only(
    error: Exception | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = Again() if error else Again(error=1e-6)
    recorded = CallGraphs(record)
    record.errors += [error] if error else []
    with caplog.at_level(logging.WARNING):
        assert [run(recorded, call(2, number)) for number in (0.25, 2.0)] == [None, None]
    assert [(why or "a different result") in message for message in caplog.messages] == [True]
    assert recorded.num_graphs == 0
    record._error = 0.0
    assert run(recorded, call(1)) is not None
    assert run(recorded, call(2), name="another group") is not None


def test_numbers_that_are_not_finite_do_not_turn_recording_off() -> None:
    recorded = CallGraphs(Again())
    spoiled = call(2)
    spoiled.sample[0] = torch.nan
    assert run(recorded, spoiled) is not None
    assert run(recorded, call(2)) is not None


def test_sums_of_layers_are_those_of_the_call_and_not_left_out_by_a_recording(
    tiny_model: Callable[[str], Path],
) -> None:
    model = load_model(tiny_model("sd15"), dtype="bfloat16", device="cpu")
    engine = Engine(model, EngineConfig(cache_dir="", max_rows=2))
    groups = engine.runners.groups
    group, trials = GroupKey(*SHAPE), []
    for recorded in (None, CallGraphs(Again())):
        groups.compiled.graphs = recorded
        attempt = groups._try(group, is_strict=True)
        trials += [attempt(range(2), 1).output for _ in range(2)]
    assert trials[0].shape[1] > 4 * 8 * 8, "there are sums beside the output"
    assert all(torch.equal(trial, trials[0]) for trial in trials)


def test_a_call_that_keeps_the_device_busy_is_not_recorded_and_not_tried_again() -> None:
    num_tries = 0

    def never_pays(run: Callable[[], Outputs]) -> None:
        nonlocal num_tries
        num_tries += 1

    recorded = CallGraphs(never_pays, sizes=(2, 4))
    assert [run(recorded, call(3)) for _ in range(3)] == [None] * 3
    assert (num_tries, recorded.num_graphs, recorded.num_bytes) == (1, 0, 0)
    assert run(recorded, call(2)) is None
    assert num_tries == 2, "fewer rows may still be recorded"


@pytest.mark.gpu
def test_cuda_graphs_are_made_only_of_calls_whose_launches_take_most_of_the_time() -> None:
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(65536, 4096, device="cuda", dtype=torch.bfloat16)
    record = CudaRecord(torch.device("cuda", 0))

    def few_long_kernels() -> Outputs:
        return (rows @ weight @ weight,)

    def many_short_kernels() -> Outputs:
        row = rows[:1]
        for _ in range(200):
            row = row + 1
        return (row,)

    assert record(few_long_kernels) is None
    assert record(many_short_kernels) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_cuda_graph_gives_the_bytes_of_the_call(is_padded: bool) -> None:
    model = load_model("embedded", device="cuda")
    recorded = CallGraphs(CudaRecord(model.device), (4,) if is_padded else ())
    recorded_rows_of = random_rows(model, SHAPE, 4, recorder=recorded.recorder(""))
    plain = random_rows(model, SHAPE, 4)
    for rows in (range(4), range(3, -1, -1), range(2), range(4)):
        assert torch.allclose(recorded_rows_of(rows), plain(rows), atol=0.02 * is_padded, rtol=0.0)
    assert recorded.num_graphs == 2 - is_padded
    assert recorded.pool_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"lora_rank": 16}, {"is_shallow": True}, {"is_controlled": True}])
def test_cuda_graphs_of_calls_with_more_arguments_give_the_bytes_of_the_call(options: dict[str, Any]) -> None:
    model = load_model("embedded", device="cuda")
    recorded = CallGraphs(CudaRecord(model.device))
    replayed = random_rows(model, SHAPE, 4, recorder=recorded.recorder(""), **options)
    plain = random_rows(model, SHAPE, 4, **options)
    for rows in (range(4), range(3, -1, -1), range(4)):
        assert torch.equal(replayed(rows), plain(rows))
    assert recorded.num_graphs == 1


@pytest.mark.gpu
def test_memory_of_cuda_graphs_is_given_back_and_their_pool_can_be_made_again() -> None:
    model = load_model("embedded", device="cuda")
    now_s = [0.0]
    recorded = CallGraphs(CudaRecord(model.device), clock=lambda: now_s[0])
    predict = random_rows(model, SHAPE, 4, recorder=recorded.recorder(""))
    expected = predict(range(4))
    recorded.clear()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    now_s[0] += FIRST_PAUSE_S
    assert torch.equal(predict(range(4)), expected)
    assert recorded.num_graphs == 1
    recorded.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
