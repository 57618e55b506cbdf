"""Settings of each engine in a pool, and the merging of their statistics."""

from __future__ import annotations

import pytest

from diffserve.api.engine_stats import (
    EngineStats,
    ImageStats,
    ModelStats,
    PageStats,
    ShareStats,
    TenantPages,
    gone,
    merged,
)
from diffserve.api.errors import ConfigError
from diffserve.service.engine import local
from diffserve.service.engine.local import describe_engines, settings_per_device
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag, load_settings


def settings(devices: str, **env: str) -> Settings:
    return load_settings(env={"DIFFSERVE_SERVE_DEVICES": devices, **env}, models=["turbo=embedded-turbo"])


def stats(scale: int) -> EngineStats:
    """Return statistics whose every number is a multiple of ``scale``."""
    tenant = TenantPages(
        tenant="unet", held_pages=scale, idle_pages=scale, evicted_pages=scale, asked_tokens=scale, found_tokens=scale
    )
    images = ImageStats(
        num_running=scale,
        num_waiting=scale,
        num_steps=scale,
        num_rows=scale,
        num_painted=scale,
        num_failed=scale,
        busy_s=scale,
        num_lanes=scale,
    )
    return EngineStats(
        num_live=scale,
        num_wishes=scale,
        images=images,
        share=ShareStats(share=0.25, image_s=scale, text_s=scale),
        models=(ModelStats(name="photo", is_loaded=scale > 1, images=images),),
        pages=PageStats(num_pages=scale, page_bytes=64, free_pages=scale, tenants=(tenant,)),
    )


def test_every_engine_has_its_device_for_all_models_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_cores", lambda: 7)
    each = settings_per_device(settings("cuda:0, cpu,cpu"))
    assert [(replica.model.device, replica.models[0].device) for replica in each] == [
        ("cuda:0",) * 2,
        ("cpu",) * 2,
        ("cpu",) * 2,
    ]
    assert [replica.engine.threads for replica in each] == [None, 3, 3]
    assert (
        describe_engines(settings("cpu,cpu", DIFFSERVE_ENGINE_THREADS="1")) == "2 engines: cpu, 1 thread; cpu, 1 thread"
    )
    assert describe_engines(settings("cuda:0,cuda:1")) == "2 engines: cuda:0; cuda:1"
    many = [replica.engine.threads for replica in settings_per_device(settings(",".join(["cpu"] * 20)))]
    assert many == [1] * 20


def test_without_devices_there_is_one_engine_as_configured() -> None:
    plain = load_settings(env={})
    assert settings_per_device(plain) == [plain]
    assert describe_engines(plain) == ""
    [replica] = settings_per_device(settings("cuda:1"))
    assert (replica.model.device, replica.engine.threads, describe_engines(settings("cuda:1"))) == ("cuda:1", None, "")


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["cuda:0", "cuda:0"], "twice"), (["cuda", "cuda:0"], "twice"), (["tpu"], "'tpu'"), (["cpu", ""], "''")],
)
def test_invalid_devices_are_refused(devices: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--devices: devices has .*{message}"):
        load_settings(env={}, flags={"serve.devices": Flag("--devices", devices)})


def test_numbers_of_several_engines_are_added_up() -> None:
    both = merged([stats(1), stats(2)])
    assert (both.num_live, both.images.num_painted, both.share.image_s, both.share.share) == (3, 3, 3, 0.25)
    assert [(model.name, model.is_loaded, model.images.num_steps) for model in both.models] == [("photo", True, 3)]
    assert both.pages is not None
    assert (both.pages.num_pages, both.pages.page_bytes, both.pages.tenants[0].found_tokens) == (3, 64, 3)
    assert (both.texts, merged([stats(4)])) == (None, stats(4))


def test_counters_of_a_lost_engine_are_retained() -> None:
    left = gone(stats(2))
    assert (left.num_live, left.images.num_running, left.images.num_lanes) == (0, 0, 0)
    assert (left.images.num_painted, left.images.busy_s, left.models[0].is_loaded) == (2, 2, False)
    assert left.pages is not None
    assert (left.pages.num_pages, left.pages.tenants[0].held_pages, left.pages.tenants[0].asked_tokens) == (0, 0, 2)
