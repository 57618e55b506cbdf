"""Upscaling next to images: one tile between two steps, with cancellation, deadlines and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffserve.api.errors import InvalidRequest, QueueFull
from diffserve.api.ipc import AnyRequest
from diffserve.api.types import Cancelled, Failed, ImageFinished, Picture, Progress
from diffserve.api.upscale_types import MAX_INPUT_PIXELS, Upscaled, UpscaleRequest
from diffserve.engine import upscaler as upscaler_module
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.image.engine import Engine
from diffserve.runtime import choose_device, load_model
from diffserve.runtime.upscaling import network as network_module
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.runtime.upscaling.tiles import TiledImage
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings
from tests.device import DEVICE
from tests.engine.combined.test_combined_engine import of, picture
from tests.upscalers import COMPACT, random_tensors, write_upscaler


def image(height: int = 40, width: int = 56, seed: int = 0) -> Picture:
    return Picture.from_array(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_upscaler(tmp_path / "upscalers" / "small.safetensors")
    return tmp_path / "upscalers"


@pytest.fixture
def studio(tiny_model: Callable[[str], Path], folder: Path) -> Iterator[CombinedEngine]:
    """Return an engine with a tiny image model and the upscaler "small"."""
    directory = tiny_model("sd15")
    profile = load_settings(model=str(directory), env={"DIFFSERVE_MODEL_UPSCALER_DIR": str(folder)}).model
    model = load_model(directory, dtype="float32", device=DEVICE, profile=profile)
    engine = CombinedEngine(Engine(model, EngineConfig(max_rows=8)))
    yield engine
    engine.check_integrity()
    assert not engine.num_live
    assert not engine.has_work


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that an image of 200 px is cut into many."""
    monkeypatch.setitem(network_module.OPERATIONS_PER_CALL, DEVICE.partition(":")[0], 0.0)


def events_of(studio: CombinedEngine, *requests: AnyRequest) -> list[object]:
    for request in requests:
        studio.submit(request)
    return list(studio.events())


def test_an_image_is_enlarged_as_by_the_network_alone(studio: CombinedEngine, folder: Path) -> None:
    request = UpscaleRequest(image=image(), upscaler="small")
    (done,) = of(events_of(studio, request), Upscaled)
    expected = Upscaler.load(folder / "small.safetensors", choose_device(DEVICE, "float32")).upscale(image().array)
    assert (done.upscaler, done.scale) == ("small", 2)
    assert np.array_equal(done.image.array, expected)
    assert 0.0 < done.device_s <= done.waited_s


def test_tiles_take_turns_with_steps_and_change_no_image(
    studio: CombinedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch)
    alone = of(events_of(studio, picture(num_steps=60)), ImageFinished)[0].result.picture
    upscaled_alone = of(events_of(studio, UpscaleRequest(image=image(200, 200), upscaler="small")), Upscaled)[0].image
    order: list[str] = []
    run_next = TiledImage.run_next

    def recorded(self: TiledImage, enlarge: Callable[..., object]) -> None:
        order.append("tile")
        run_next(self, enlarge)  # type: ignore[arg-type]

    monkeypatch.setattr(TiledImage, "run_next", recorded)
    requests = UpscaleRequest(image=image(200, 200), upscaler="small"), picture(num_steps=60)
    for request in requests:
        studio.submit(request)
    events: list[object] = []
    while studio.has_work:
        received = studio.tick()
        order += ["step"] * len(of(received, Progress))
        events += received
    assert of(events, ImageFinished)[0].result.picture == alone
    assert of(events, Upscaled)[0].image == upscaled_alone
    assert order.count("tile") > 10
    first, last = order.index("step"), len(order) - order[::-1].index("step")
    assert "tile" in order[first:last], "tiles and steps take turns"
    assert order.index("step") < order.count("tile"), "steps do not wait for all tiles"


def test_cancelling_stops_between_two_tiles(studio: CombinedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    request = UpscaleRequest(image=image(200, 200), upscaler="small")
    studio.submit(request)
    for _ in range(3):
        studio.tick()
    assert studio.cancel(request.request_id)
    assert [type(event) for event in studio.events()] == [Cancelled]
    assert not studio.cancel(request.request_id)


def test_a_small_image_does_not_wait_for_a_large_one(studio: CombinedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    large, small = (UpscaleRequest(image=image(side, side), upscaler="small") for side in (300, 30))
    batch = UpscaleRequest(image=image(30, 30), upscaler="small", priority="batch")
    done = [event.request_id for event in of(events_of(studio, large, batch, small), Upscaled)]
    assert done == [small.request_id, large.request_id, batch.request_id]


def test_waiting_images_are_bounded(studio: CombinedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscaler_module, "MAX_WAITING", 2)
    full = CombinedEngine(studio.images)
    requests = [UpscaleRequest(image=image(), upscaler="small") for _ in range(3)]
    full.submit(requests[0])
    full.submit(requests[1])
    with pytest.raises(QueueFull):
        full.submit(requests[2])
    assert len(of(list(full.events()), Upscaled)) == 2


def test_deadlines_end_an_upscaling(studio: CombinedEngine) -> None:
    request = UpscaleRequest(image=image(), upscaler="small", deadline_s=1e-9)
    (failed,) = of(events_of(studio, request), Failed)
    assert failed.code == "deadline_exceeded"


def test_wrong_requests_are_refused_with_a_sentence_before_any_work(studio: CombinedEngine, folder: Path) -> None:
    (folder / "broken.safetensors").write_bytes(b"anything")
    (folder / "old.pth").write_bytes(b"anything")
    save_file({"a": torch.zeros(3)}, folder / "other.safetensors")
    for name, words in (
        ("nothing", "there is no upscaler 'nothing'; the known ones are"),
        ("broken", "upscaler 'broken' cannot be used: broken.safetensors is not a"),
        ("old", "upscaler 'old' cannot be used: old.pth is a pickle file"),
        ("other", "other.safetensors is of no known upscaler"),
    ):
        with pytest.raises(InvalidRequest) as error:
            studio.submit(UpscaleRequest(image=image(), upscaler=name))
        assert words in error.value.message
        assert error.value.param == "upscaler"
    with pytest.raises(InvalidRequest, match="at most 4,194,304 pixels can be upscaled"):
        UpscaleRequest(image=image(MAX_INPUT_PIXELS // 1024 + 1, 1024), upscaler="small")
    write_upscaler(folder / "huge.safetensors", type(COMPACT)(4, 1, 16))
    with pytest.raises(InvalidRequest, match=r"'huge' makes 32000x1600 pixels of the image.*at most 16,777,216"):
        studio.submit(UpscaleRequest(image=image(100, 2000), upscaler="huge"))
    assert not studio.has_work


def test_a_failing_network_fails_its_request_only(studio: CombinedEngine, folder: Path) -> None:
    tensors = random_tensors(COMPACT)
    tensors["body.8.bias"][0] = torch.nan
    save_file(tensors, folder / "nan.safetensors")
    bad, good = (UpscaleRequest(image=image(), upscaler=name) for name in ("nan", "small"))
    events = events_of(studio, bad, good, picture())
    assert [(event.request_id, event.code) for event in of(events, Failed)] == [(bad.request_id, "numerical_error")]
    assert len(of(events, Upscaled)) == 1
    assert len(of(events, ImageFinished)) == 1


def test_short_memory_makes_the_tiles_smaller(studio: CombinedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network_module.OPERATIONS_PER_CALL, DEVICE.partition(":")[0], 1e9)
    request = UpscaleRequest(image=image(300, 300), upscaler="small")
    expected = of(events_of(studio, request), Upscaled)[0].image
    enlarge, sides = Upscaler.enlarge, []

    def short(self: Upscaler, tile: np.ndarray) -> np.ndarray:
        sides.append(max(tile.shape))
        if max(tile.shape) > 90:
            raise torch.OutOfMemoryError("no memory")
        return enlarge(self, tile)

    monkeypatch.setattr(Upscaler, "enlarge", short)
    again = UpscaleRequest(image=image(300, 300), upscaler="small")
    (done,) = of(events_of(studio, again), Upscaled)
    assert max(sides) > 90 >= min(sides)
    assert np.abs(done.image.array.astype(int) - expected.array.astype(int)).max() <= 1


def test_an_upscaler_that_changes_on_disk_is_read_again(studio: CombinedEngine, folder: Path) -> None:
    first = of(events_of(studio, UpscaleRequest(image=image(), upscaler="small")), Upscaled)[0].image
    (folder / "small.safetensors").unlink()
    write_upscaler(folder / "small.safetensors", seed=7)
    second = of(events_of(studio, UpscaleRequest(image=image(), upscaler="small")), Upscaled)[0].image
    assert first != second
