"""Engine processes of this machine: one, or one for each of ``[serve] devices``."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from diffserve.service.engine.client import EngineClient, watch_engines
from diffserve.service.engine.engines import Engines
from diffserve.service.engine.pool import ReplicaPool
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings, num_cores


def open_engines(settings: Settings) -> Engines:
    """Create one engine, or a pool if ``[serve] devices`` names several, in a running event loop."""
    device_settings = settings_per_device(settings)
    if len(device_settings) == 1:
        return EngineClient(device_settings[0])
    metrics = Metrics()
    clients = [
        EngineClient(engine_settings, metrics=metrics, name=str(number))
        for number, engine_settings in enumerate(device_settings)
    ]
    pool = ReplicaPool(settings, clients, metrics)

    def gauge(value: Callable[[EngineClient], float]) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(client.name, client.settings.model.device): float(value(client)) for client in clients}

    watch_engines(metrics, clients)
    labels, text = ("member", "device"), "Remaining work of each engine, in UNet rows of the native size."
    metrics.watch("engine_queue_cost", text, gauge(lambda client: pool.queue_costs()[client.name]), *labels)
    text = "Whether the engine is ready for requests."
    metrics.watch("engine_up", text, gauge(lambda client: client.is_ready), *labels)
    return pool


def settings_per_device(settings: Settings) -> list[Settings]:
    """Return the settings of each engine: ``settings`` itself if no devices are configured."""
    devices = settings.serve.devices
    if not devices:
        return [settings]
    num_threads = _threads_per_engine(settings)
    return [
        replace(
            settings,
            model=replace(settings.model, device=device),
            models=tuple(replace(model, device=device) for model in settings.models),
            engine=replace(settings.engine, threads=num_threads) if device == "cpu" else settings.engine,
        )
        for device in devices
    ]


def describe_engines(settings: Settings) -> str:
    """Return the line of the start-up message that lists several engines; "" for a single engine."""
    device_settings = settings_per_device(settings)
    if len(device_settings) == 1:
        return ""
    devices = []
    for engine_settings in device_settings:
        threads = engine_settings.engine.threads
        suffix = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}"
        devices.append(f"{engine_settings.model.device}{suffix}")
    return f"{len(devices)} engines: {'; '.join(devices)}"


def _threads_per_engine(settings: Settings) -> int | None:
    """Return the configured threads of a CPU engine; without a setting, several engines share the cores equally."""
    num_sharing = settings.serve.devices.count("cpu")
    if settings.engine.threads is not None or num_sharing < 2:
        return settings.engine.threads
    return max(1, num_cores() // num_sharing)
