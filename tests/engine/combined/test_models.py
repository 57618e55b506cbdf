"""Several models in one loop: the same images as alone, loading on request, unloading when idle."""

from __future__ import annotations

import ctypes
import logging
import shutil
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from diffserve.api.errors import InsufficientMemory, ModelLoadError, ModelNotFound
from diffserve.api.types import Cancelled, DiffusionParams, Failed, Finished, GenerationRequest, ImageFinished, Queued
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.image import model_loading
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.rewriting import TextWindow
from diffserve.runtime import load_model
from diffserve.settings.layers import load_settings
from tests.device import DEVICE
from tests.engine.combined.test_isolation import break_once
from tests.engine.controlnets import control_map
from tests.engine.controlnets import write_folder as write_controlnets
from tests.engine.loras import write_folder
from tests.tiny_models import save_model

RESIDENT = psutil.Process()
Model = Callable[[str], Path]
MakeStudio = Callable[..., CombinedEngine]


@pytest.fixture
def make_models(tiny_model: Model) -> Iterator[MakeStudio]:
    """``make_models(first, NAME=path, ...)``: a studio that has loaded ``first``, and may load the others."""
    studios: list[CombinedEngine] = []

    def make(
        first: str = "sd15",
        unload_after_s: float = 0.0,
        lora_dir: Path | str = "",
        controlnet_dir: Path | str = "",
        **other_models: Path,
    ) -> CombinedEngine:
        env = {
            "DIFFSERVE_ENGINE_CACHE_DIR": "",
            "DIFFSERVE_MODEL_DTYPE": "float32",
            "DIFFSERVE_TEXT_MODEL": "",
            "DIFFSERVE_ENGINE_MAX_ROWS": "4",
        }
        env |= {"DIFFSERVE_ENGINE_KV_POOL_BYTES": "auto", "DIFFSERVE_SERVE_UNLOAD_AFTER_S": str(unload_after_s)}
        env |= {"DIFFSERVE_MODEL_LORA_DIR": str(lora_dir), "DIFFSERVE_MODEL_CONTROLNET_DIR": str(controlnet_dir)}
        model_options = [f"{name}={path}" for name, path in other_models.items()]
        studios.append(
            CombinedEngine.from_settings(load_settings(model=str(tiny_model(first)), models=model_options, env=env))
        )
        return studios[-1]

    yield make
    for studio in studios:
        studio.check_integrity()
        assert not studio.num_live
        assert studio.pool is not None
        assert studio.pool.stats().held_pages == 0


def picture(
    model: str = "",
    *,
    seed: int = 1,
    num_steps: int = 3,
    loras: tuple[Lora, ...] = (),
    edges: bool = False,
    **fields: Any,
) -> GenerationRequest:
    controls = (Control("edges", 0.8),) if edges else ()
    params = DiffusionParams(num_steps=num_steps, sampler="ddim", loras=loras, controlnets=controls)
    return GenerationRequest(
        prompt=f"fox {seed}",
        seed=seed,
        diffusion=params,
        model=model,
        width_px=64,
        height_px=64,
        control_images=(control_map(seed),) if edges else (),
        **fields,
    )


def paint(studio: CombinedEngine, *requests: GenerationRequest) -> dict[str, bytes]:
    """Return the pixels of each request's image, all of them generated together."""
    for request in requests:
        studio.submit(request)
    painted = [event for event in studio.events() if isinstance(event, ImageFinished)]
    return {event.request_id: event.result.picture.data for event in painted}


def loaded(studio: CombinedEngine) -> list[str]:
    return [entry.name for entry in studio.images.served if entry.is_loaded]


@pytest.mark.slow
def test_pictures_of_two_models_in_one_burst_are_those_of_each_alone(
    make_models: MakeStudio, tiny_model: Model
) -> None:
    studio = make_models(other=tiny_model("sdxl"))
    requests = [picture(model, seed=seed) for seed in range(3) for model in ("", "other", "sd15")]
    together = paint(studio, *requests)
    assert loaded(studio) == ["sd15", "other"]
    assert len(set(together.values())) == 6, "the first one goes by its name, too"
    alone = {request.request_id: paint(studio, request)[request.request_id] for request in requests}
    assert together == alone
    assert studio.pool is not None
    kinds = sorted(name.partition(":")[0] for name in studio.pool.stats().tenants)
    assert kinds == ["text1", "text1", "text2", "unet", "unet"], "one pool for all"
    stats = studio.stats()
    assert [(model.name, model.images.num_painted) for model in stats.models] == [("sd15", 12), ("other", 6)]
    assert stats.images.num_painted == 18


def test_an_idle_model_goes_and_comes_back_when_it_is_asked_for(
    make_models: MakeStudio, tiny_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    studio = make_models(unload_after_s=1000.0, other=tiny_model("sd15"))
    first = paint(studio, request := picture("other"))[request.request_id]
    engine = weakref.ref(studio.images.loaded[1].model)
    studio.images._loading._unload_after_s = 1e-9
    with caplog.at_level(logging.INFO):
        assert studio.has_work, "there is one to unload"
        list(studio.events())
    assert loaded(studio) == []
    assert engine() is None, "nobody holds its weights"
    assert studio.images.next_wakeup_s is None
    assert "other is unloaded, idle for" in caplog.text
    assert studio.pool is not None
    assert not studio.pool.stats().tenants
    studio.images._loading._unload_after_s = 0.0
    again = paint(studio, two := picture("other"), three := picture())
    assert (again[two.request_id], again[three.request_id]) == (first, first), "the same weights under two names"
    assert [model.images.num_painted for model in studio.stats().models] == [1, 2], "what is counted stays counted"
    mine, other = (engine.model for engine in studio.images.loaded)
    assert (mine.text.encoders[0].network is other.text.encoders[0].network, mine.vae is other.vae) == (True, True)


@pytest.mark.slow
def test_nobody_waits_for_a_model_that_cannot_be_loaded_and_the_others_go_on(
    make_models: MakeStudio, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "other"
    place.symlink_to(tiny_model("sd15"))
    (unread := tmp_path / "unread").mkdir()
    studio = make_models(other=place, unread=unread)
    place.unlink()
    assert [entry.info is None for entry in studio.images.served] == [False, False, True]
    assert "unread has no model_index.json" in studio.images.served[2].problem
    waiting, cancelled, painted = picture("other"), picture("other"), picture()
    for request in (waiting, cancelled, painted):
        studio.submit(request)
    assert studio.cancel(cancelled.request_id)
    events = {(event.request_id, type(event)): event for event in studio.events()}
    failed = events[waiting.request_id, Failed]
    assert isinstance(failed, Failed)
    assert (failed.code, str(tmp_path) in failed.message, failed.param) == ("model_load_error", False, None)
    assert (cancelled.request_id, Cancelled) in events
    assert (waiting.request_id, Queued) in events
    assert (painted.request_id, Finished) in events
    with pytest.raises(ModelLoadError, match="other"):
        studio.submit(picture("other"))
    for name in ("../other", "nobody", str(place)):
        with pytest.raises(ModelNotFound, match="this server has sd15, other, unread"):
            studio.submit(picture(name))
    place.symlink_to(tiny_model("sd15"))
    monkeypatch.setattr(model_loading, "RETRY_AFTER_S", 0.0)
    assert paint(studio, picture("other"))
    unread.rmdir()
    unread.symlink_to(tiny_model("sd15"))
    studio.images.retry_load("unread")
    while not studio.has_work:
        assert studio.images.next_wakeup_s == model_loading.LOAD_POLL_S, "somebody looks whether it is done"
    studio.tick()
    assert studio.images.served[2].info is not None
    assert not studio.images.served[2].problem


@pytest.mark.slow
def test_thirty_two_pictures_of_two_models_three_adapters_and_a_controlnet_are_each_as_they_are_alone(
    make_models: MakeStudio, tiny_model: Model, tmp_path: Path
) -> None:
    other, folder = save_model("sd15", tmp_path / "other", seed=1), tmp_path / "adapters"
    for part in ("text_encoder", "vae"):
        shutil.rmtree(other / part)
        shutil.copytree(tiny_model("sd15") / part, other / part)
    folder.mkdir()
    model = load_model(tiny_model("sd15"), dtype="float32", device=DEVICE)
    write_folder(folder, model)
    folders = {"lora_dir": folder, "controlnet_dir": write_controlnets(tmp_path / "controlnets", model.unet.network)}
    studio = make_models(**folders, other=other)
    adapters = ((), ("queries",), ("everything",), ("kernels", "attention"))
    requests = [
        picture(
            name,
            seed=seed,
            num_steps=2,
            loras=tuple(Lora(lora, 0.5 + seed / 10) for lora in names),
            edges=seed % 2 == 1,
        )
        for seed in range(4)
        for name in ("", "other")
        for names in adapters
    ]
    together = paint(studio, *requests)
    assert len(set(together.values())) == len(requests) == 32
    first, second = (engine.model for engine in studio.images.loaded)
    assert first.text.encoders[0].network is second.text.encoders[0].network
    assert (first.vae is second.vae, first.unet is second.unet) == (True, False)
    assert together == {
        request.request_id: paint(studio, request)[request.request_id] for request in reversed(requests)
    }
    fresh = make_models(**folders, other=other)
    assert studio.images._loading._unload(studio.images._entries["sd15"], "the other one has its parts, too")
    for request in requests[4:8]:
        (alone,) = paint(fresh, request).values()
        assert {together[request.request_id]} == {alone, *paint(studio, request).values()}


class HeapInfo(ctypes.Structure):
    """The fields of glibc's ``mallinfo2``, summed over all arenas."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "top",
        )
    ]


def allocated_bytes() -> int:
    """Return the number of bytes of allocated memory.

    The resident set also counts free blocks between allocations: tens of MB, which vary with the arenas of the threads
    that read adapters.
    """
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = HeapInfo
    info = tell()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.slow
def test_memory_returns_when_a_model_goes(make_models: MakeStudio, tiny_model: Model, tmp_path: Path) -> None:
    """Unload a model that has read adapters for every kind of layer, and a ControlNet."""
    model = load_model(tiny_model("sd2"), dtype="float32", device=DEVICE)
    (folder := tmp_path / "adapters").mkdir()
    controlnets = write_controlnets(tmp_path / "controlnets", model.unet.network)
    studio = make_models(lora_dir=write_folder(folder, model), controlnet_dir=controlnets, other=tiny_model("sd2"))
    del model
    requests = [
        picture("other"),
        picture("other", loras=(Lora("everything"), Lora("kernels", 0.5)), seed=2),
        picture("other", loras=(Lora("attention"),), edges=True, seed=3),
    ]
    left = []
    for _ in range(8):
        assert len(set(paint(studio, *requests).values())) == len(requests)
        entry = studio.images._entries["other"]
        rss_bytes = RESIDENT.memory_info().rss
        assert studio.images._loading._unload(entry, "to be loaded again")
        assert RESIDENT.memory_info().rss < rss_bytes
        left.append(allocated_bytes())
    assert (left[-1] - left[1]) / (len(left) - 2) < 1e6, "bytes that one coming and going loses"


@pytest.mark.slow
def test_a_model_comes_only_where_there_is_room_and_idle_ones_make_room(
    make_models: MakeStudio, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = make_models(other=tiny_model("sd15"), third=tiny_model("sd15"))
    room = {"models": 2}
    needs = studio.images._entries["other"].survey.needs_bytes  # type: ignore[union-attr]
    monkeypatch.setattr(
        model_loading, "free_over", lambda *_: needs if len(studio.images.loaded) < room["models"] else needs // 100
    )
    paint(studio, picture("other"))
    assert loaded(studio) == ["sd15", "other"]
    paint(studio, picture("third"))
    assert loaded(studio) == ["other", "third"], "the longest idle one went"
    room["models"] = 1
    studio.submit(busy := picture("other", num_steps=20))
    studio.submit(picture("third", num_steps=20))
    studio.tick()
    studio.submit(refused := picture())
    events = [event for event in studio.events() if isinstance(event, (Failed, Finished))]
    (failed,) = [event for event in events if event.request_id == refused.request_id]
    assert isinstance(failed, Failed)
    assert failed.code == InsufficientMemory.default_code
    assert "while other, third are in use: try again later" in failed.message
    assert "MiB are free" in failed.message
    assert busy.request_id in {event.request_id for event in events if isinstance(event, Finished)}


@pytest.mark.slow
def test_models_take_turns_and_what_goes_wrong_in_one_costs_the_others_nothing(
    make_models: MakeStudio, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = make_models(other=tiny_model("sd15"))
    paint(studio, picture("other"))
    reads = count()
    monkeypatch.setattr(studio.images, "_clock", lambda: float(next(reads)))  # all ticks take as long
    crowd = [picture(num_steps=20, seed=seed) for seed in range(6)]
    for request in crowd:
        studio.submit(request)
    for _ in range(4):
        studio.tick()
    studio.submit(newcomer := picture("other", num_steps=4))
    ended = list[str]()
    num_ticks = 0
    while newcomer.request_id not in ended:
        ended += [event.request_id for event in studio.tick() if isinstance(event, Finished)]
        num_ticks += 1
    assert ended == [newcomer.request_id]
    assert num_ticks <= 2 * (4 + 2), "every other tick is its, and two are for decoding"
    studio.submit(cancelled_request := picture("other", num_steps=4))
    break_once(monkeypatch, studio.images.loaded[1].scheduler, "plan")
    ends = {event.request_id: type(event) for event in studio.events() if isinstance(event, (Finished, Failed))}
    assert ends == {cancelled_request.request_id: Failed, **{request.request_id: Finished for request in crowd}}


@pytest.mark.slow
def test_what_a_model_reads_in_one_piece_is_known_before_it_is_loaded(
    make_models: MakeStudio, tiny_model: Model
) -> None:
    studio = make_models("sd15", other=tiny_model("sdxl"))
    first = TextWindow.of(studio.images.first.model.text)
    nothing = TextWindow(0, first.count)
    window = studio.images.window_of(picture("other"), nothing)
    assert (window.num_tokens, window.count) == (first.num_tokens, first.count), "as long as its files say"
    studio.submit(picture("other"))
    list(studio.events())
    assert len(studio.images.loaded) == 2
    read = studio.images.window_of(picture("other"), nothing)
    assert (read.num_tokens, read.count == first.count) == (window.num_tokens, False), "by its own tokenizers"
