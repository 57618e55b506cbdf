"""What goes wrong for one image goes wrong for it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from diffserve.api.errors import DeadlineExceeded, DiffserveError, NumericalError
from diffserve.api.types import Cancelled, Event, Failed, Finished, GenerationRequest, ImageFailed, ImageFinished
from diffserve.engine import Engine
from diffserve.runtime.transfer import Fetched
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

POISON = "dog"


@contextmanager
def unet_hook(engine: Engine, spoil: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Run ``spoil(sample, which rows hold the poisoned prompt)`` in front of the real UNet."""
    embeddings = engine.model.text.encode(POISON, "", width_px=64, height_px=64).cond
    poisoned = engine.model.unet.cross_attention.keys_values(embeddings[None]).layers[0].keys

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keys = kwargs["encoder_hidden_states"].layers[0].keys
        guilty = (keys - poisoned).abs().flatten(1).amax(dim=1) < 1e-5
        return (spoil(args[0], guilty), *args[1:]), kwargs

    handle = engine.model.unet.network.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def not_a_number(sample: torch.Tensor, guilty: torch.Tensor) -> torch.Tensor:
    return torch.where(guilty.reshape(-1, 1, 1, 1), torch.full_like(sample, torch.nan), sample)


def refuse(sample: torch.Tensor, guilty: torch.Tensor) -> torch.Tensor:
    if bool(guilty.any()):
        raise RuntimeError("the device choked on a row")
    return sample


def innocent(seeds: range = range(3)) -> list[GenerationRequest]:
    return [image_request("sd15", "ddim", seed=seed, num_steps=4) for seed in seeds]


def run(engine: Engine, *requests: GenerationRequest) -> list[Event]:
    for request in requests:
        engine.submit(request)
    return list(engine.events())


@pytest.mark.parametrize(("spoil", "code"), [(not_a_number, "numerical_error"), (refuse, "internal_error")])
def test_a_poisoned_row_fails_alone_and_its_neighbours_keep_their_bytes(
    spoil: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], code: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(max_rows=16)
    expected = engine.generate(innocent())
    guilty = image_request("sd15", "ddim", seed=9, num_steps=4, prompt=POISON)
    with unet_hook(engine, spoil):
        events = run(engine, guilty, *innocent())
    failed = [event for event in events if isinstance(event, ImageFailed | Failed)]
    assert [event.request_id for event in failed] == [guilty.request_id] * 2
    assert {event.code for event in failed} == {code}
    painted = [event.result.picture for event in events if isinstance(event, ImageFinished)]
    assert painted == [result.picture for result in expected]


class Late(Fetched):
    """An answer that is never there when first asked for, as from a GPU that is behind."""

    @property
    def is_here(self) -> bool:
        return False


def test_latents_known_late_to_be_spoilt_fail_one_step_later_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_rows=16)
    expected = engine.generate(innocent())
    monkeypatch.setattr("diffserve.engine.image.runner.fetch", lambda tensor: Late(tensor.cpu()))
    guilty = image_request("sd15", "ddim", seed=9, num_steps=4, prompt=POISON)
    with unet_hook(engine, not_a_number):
        events = run(engine, guilty, *innocent())
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.request_id, failed.code) == (guilty.request_id, "numerical_error")
    assert "after step 1 of 4" in failed.message
    painted = [event.result.picture for event in events if isinstance(event, ImageFinished)]
    assert painted == [result.picture for result in expected]


def test_a_failing_call_is_halved_not_repeated_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    engine.warm_up()
    calls = 0

    def count_and_refuse(sample: torch.Tensor, guilty: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return refuse(sample, guilty)

    with unet_hook(engine, count_and_refuse):
        run(engine, image_request("sd15", "ddim", seed=9, num_steps=1, prompt=POISON), *innocent(range(1)))
    assert calls <= 12


def test_a_request_of_which_some_images_fail_gives_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()

    request = image_request("sd15", "ddim", seed=5, num_steps=2, num_images=2)
    marked = torch.randn((1, 4, 8, 8), generator=torch.Generator("cpu").manual_seed(6)).to(DEVICE)[:, :1, :1, :1]
    with unet_hook(engine, lambda sample, guilty: torch.where(near(sample, marked), torch.nan, sample)):
        events = run(engine, request)
    assert isinstance(events[-1], Finished)
    assert (events[-1].num_painted, events[-1].num_failed) == (1, 1)  # ddim's first input is the unit noise itself
    assert [event.image_index for event in events if isinstance(event, ImageFailed)] == [1]


def near(sample: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """(R, 1, 1, 1) bool: rows whose first value is the marked one."""
    return (sample[:, :1, :1, :1] - marked).abs() < 1e-6


def test_generate_raises_the_reason_when_nothing_was_painted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    guilty = image_request("sd15", "euler", seed=9, num_steps=2, prompt=POISON)
    with unet_hook(engine, not_a_number), pytest.raises(NumericalError, match=r"not finite after step [12] of 2"):
        engine.generate(guilty)  # a GPU's result is looked at while the next step runs
    with unet_hook(engine, refuse), pytest.raises(DiffserveError, match="RuntimeError: the device choked"):
        engine.generate(image_request("sd15", "euler", seed=9, num_steps=2, prompt=POISON))


def test_a_tick_that_fails_as_a_whole_fails_its_images_and_the_engine_lives_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    with monkeypatch.context() as broken:
        broken.setattr("diffserve.engine.image.runner.ImageBatch.gather", None)
        with pytest.raises(DiffserveError, match="TypeError"):
            engine.generate(innocent(range(1))[0])
    assert "a tick failed as a whole" in caplog.text
    assert len(engine.generate(innocent(range(1))[0])) == 1


def test_a_cancelled_image_returns_its_slot_before_the_next_step(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=4)
    doomed, neighbor = image_request("sd15", "ddim", seed=1, num_images=3), image_request("sd15", "ddim", seed=2)
    engine.submit(doomed)
    engine.submit(neighbor)
    for _ in range(3):
        engine.tick()
    assert engine.scheduler.slots.num_free == 0
    assert engine.cancel(doomed.request_id)
    assert not engine.cancel(doomed.request_id)
    events = engine.tick()
    assert Cancelled(request_id=doomed.request_id) in events
    assert engine.scheduler.slots.num_free == 3
    assert set(engine.trace[-1].request_ids) == {neighbor.request_id}
    assert not engine.cancel("img-unknown")
    assert [type(event) for event in engine.events()][-2:] == [ImageFinished, Finished]


def test_a_request_cancelled_before_its_first_tick_never_starts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(innocent()[0])
    assert engine.cancel(request_id)
    assert [type(event).__name__ for event in engine.events()] == ["Accepted", "Cancelled"]
    assert not engine.trace


def test_leaving_a_stream_cancels_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(image_request("sd15", "ddim", seed=1, num_steps=50))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work


def test_a_deadline_gives_the_work_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm_up()
    late = image_request("sd15", "ddim", seed=1, num_steps=1000, deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"the deadline of 0\.05 s (passed|cannot be met)"):
        engine.generate(late)
    in_time = image_request("sd15", "ddim", seed=1, num_steps=2, deadline_s=60.0)
    assert len(engine.generate(in_time)) == 1


def test_a_deadline_passes_in_the_waiting_room_too(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=1)
    engine.submit(image_request("sd15", "ddim", seed=1, num_steps=2))
    late = image_request("sd15", "ddim", seed=1, num_steps=900, deadline_s=1e-3)
    engine.submit(late)
    time.sleep(2e-3)
    failed = [event for event in engine.events() if isinstance(event, Failed)]
    assert [(event.request_id, event.code) for event in failed] == [(late.request_id, "deadline_exceeded")]
