"""Out of memory, wherever it happens: what can be had with less is had, and the next request gets all again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffserve.api.types import Event, Failed, GenerationRequest, ImageFailed, ImageFinished, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image.buckets import FIRST_PAUSE_S
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

Spoil = Callable[[int], bool]
"""(rows of a call) -> whether there is no memory for it."""

NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
"""What reads a number that is there."""


class Shortage(TorchDispatchMode):
    """An out-of-memory error in allocation number ``when`` and in the next ``width - 1``."""

    def __init__(self, when: int = -1, width: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.when = range(when, when + width)
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in NUMBERS:
            self.num_operations += 1
            if self.num_operations in self.when:
                raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


@contextmanager
def small_device(engine: Engine, spoil: Spoil) -> Iterator[list[int]]:
    """Return a UNet that runs out of memory when ``spoil`` says so, and the rows of every call."""
    calls: list[int] = []

    def hook(_module: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        calls.append(args[0].shape[0])
        if spoil(calls[-1]):
            raise torch.OutOfMemoryError(f"no room for {calls[-1]} rows")

    handle = engine.model.unet.network.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def pair() -> list[GenerationRequest]:
    """Two requests that use most of the engine: fresh noise, guidance, an init image for one of them."""
    return [
        image_request("sd15", "euler_a", seed=1, num_steps=2, guidance_scale=5.0),
        image_request("sd15", "dpmpp_2m", seed=2, num_steps=2, prompt="the red fox"),
    ]


def content(results: list[ImageResult]) -> list[bytes]:
    return [result.picture.data for result in results]


def run(engine: Engine, requests: list[GenerationRequest]) -> tuple[list[bytes], list[Event]]:
    """Pictures in order of the requests, and what failed."""
    ids = [engine.submit(request) for request in requests]
    events = list(engine.events())
    painted = {event.request_id: event.result.picture.data for event in events if isinstance(event, ImageFinished)}
    return [painted[name] for name in ids if name in painted], [
        event for event in events if isinstance(event, Failed | ImageFailed)
    ]


def test_memory_that_runs_out_once_anywhere_costs_no_picture_and_no_byte(make_engine: MakeEngine) -> None:
    make_engine(max_rows=16).warm_up()
    expected = content(make_engine(max_rows=16).generate(pair()))
    with Shortage() as calm:
        run(make_engine(max_rows=16), pair())
    for when in range(1, calm.num_operations, max(1, calm.num_operations // 12)):
        engine = make_engine(max_rows=16)
        with Shortage(when):
            pictures, failed = run(engine, pair())
        assert not failed, f"operation {when}: {failed}"
        assert pictures == expected, f"operation {when}"
        assert engine.runners.caps.cap(next(iter(engine.buckets))) > 16


def test_where_memory_runs_out_again_and_again_neighbours_keep_their_bytes(make_engine: MakeEngine) -> None:
    make_engine(max_rows=16).warm_up()
    expected = content(make_engine(max_rows=16).generate(pair()))
    with Shortage() as calm:
        run(make_engine(max_rows=16), pair())
    for when in range(1, calm.num_operations, max(1, calm.num_operations // 8)):
        engine = make_engine(max_rows=16)
        with Shortage(when, width=3):
            pictures, failed = run(engine, pair())
        assert len(pictures) + len({event.request_id for event in failed}) == 2, f"operation {when}"
        assert len(pictures) >= 1
        again, failed = run(engine, pair())
        assert again == expected
        assert not failed


def test_a_cap_is_learnt_for_one_shape_and_unlearnt_when_memory_is_there_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_rows=16, deterministic=False)
    now_s = [0.0]
    monkeypatch.setattr(engine.runners.caps, "_clock", lambda: now_s[0])
    four = [image_request("sd15", "ddim", seed=seed, num_steps=4) for seed in range(4)]
    with small_device(engine, lambda rows: rows > 4):
        assert len(run(engine, list(four))[0]) == 4
    assert max(tick.num_rows for tick in engine.trace[-3:]) == 4

    other = [image_request("sd15", "ddim", seed=seed, num_steps=1, width_px=72, height_px=64) for seed in range(4)]
    with small_device(engine, lambda _: False) as calls:
        run(engine, other)
        assert max(calls) == 8
    now_s[0] = FIRST_PAUSE_S + 1
    again = [image_request("sd15", "ddim", seed=seed, num_steps=4) for seed in range(4)]
    with small_device(engine, lambda _: False) as calls:
        run(engine, again)
    assert max(calls) == 8


def test_memory_is_given_back_before_the_call_is_made_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_rows=16)
    calls: list[str] = []
    monkeypatch.setattr("diffserve.engine.image.unet_calls.give_memory_back", lambda device: calls.append(device.type))
    with small_device(engine, lambda _: not calls):
        pictures, failed = run(engine, pair())
    assert (len(pictures), failed, calls) == (2, [], [torch.device(DEVICE).type])


def test_a_picture_that_cannot_be_decoded_in_one_piece_is_decoded_in_tiles(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    request = image_request("sd15", "ddim", seed=3, num_steps=2, width_px=128, height_px=96)
    [full_result] = engine.generate(request)
    decode = engine.model.vae.network.decode

    def small(z: torch.Tensor, **kwargs: Any) -> Any:
        if z.shape[-1] * z.shape[-2] > 100:
            raise torch.OutOfMemoryError("no room for so many cells")
        return decode(z, **kwargs)

    monkeypatch.setattr(engine.model.vae.network, "decode", small)
    [tiled] = engine.generate(image_request("sd15", "ddim", seed=3, num_steps=2, width_px=128, height_px=96))
    assert tiled.picture.array.shape == full_result.picture.array.shape
    difference = tiled.picture.array.astype(float) - full_result.picture.array
    assert np.sqrt((difference**2).mean()) < 12.0
    assert engine.generate(image_request("sd15", "ddim", seed=4, num_steps=2))


def test_a_picture_fails_where_not_even_a_tile_has_room(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = content(engine.generate(pair()))

    def none(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as full:
        full.setattr(engine.model.vae.network, "decode", none)
        pictures, failed = run(engine, pair())
    assert not pictures
    assert {event.code for event in failed} == {"internal_error"}  # type: ignore[union-attr]
    assert run(engine, pair())[0] == expected
