"""Engines of ``diffserve sweep``: the models and precisions of its axes, their settings, and the loading of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from diffserve.api.errors import ConfigError, DiffserveError, InvalidRequest
from diffserve.cli.generate import open_engine
from diffserve.cli.options import SettingsOptions
from diffserve.disk_cache import DiskCache
from diffserve.experiments.axes import MODEL, PRECISION, Value, quote, read_models
from diffserve.experiments.engines import OpenEngine
from diffserve.experiments.plan import EngineKey
from diffserve.settings.config import Settings
from diffserve.settings.layers import PROFILES

if TYPE_CHECKING:
    from diffserve.engine import Engine


def load_models(text: str | None, sources: SettingsOptions) -> dict[str, Settings]:
    """Load the settings of each model by its name.

    Args:
        text: Values of the axis ``model``; ``None``: the model of the options, with the name "".
        sources: Options for the settings.

    Raises:
        ConfigError: A setting is invalid, or there is no such model.
        InvalidRequest: The axis is given together with a model.
    """
    if text is None:
        return {"": sources.load()}
    if sources.model is not None:
        raise InvalidRequest("--model and --axis model both set models; give only --axis model.", param=MODEL)
    models = {}
    for name, path in read_models(text).items():
        if path not in PROFILES and not Path(path).expanduser().exists():
            message = f"--axis model: there is no model at {quote(path)}; give a directory or a .safetensors file."
            raise ConfigError(message, param=MODEL)
        try:
            models[name] = sources._replace(model=path).load()
        except DiffserveError as error:
            raise ConfigError(f"--axis model: {error.message}", param=MODEL) from None
    return models


def resolve_precisions(models: Mapping[str, Settings], names: Iterable[Value], option: str) -> tuple[str, ...]:
    """Return canonical precisions without repetitions that all ``models`` can be loaded in.

    Args:
        models: Settings by model name.
        names: Precisions, or "auto".
        option: The option for error messages.

    Raises:
        ConfigError: A precision is not supported on the device, or there is no such model.
    """
    from diffserve.runtime import choose_for

    resolved: dict[str, None] = {}
    for name in names:
        for settings in models.values():
            model, cache = settings.model, DiskCache.at(settings.engine.cache_dir)
            try:
                resolved[choose_for(model.path, model.device, str(name), settings.engine.offload, cache).dtype] = None
            except ConfigError as error:
                raise ConfigError(f"{option}: {error.message}", param=PRECISION) from None
    return tuple(resolved)


def engine_opener(models: Mapping[str, Settings], say: Callable[[str], None]) -> OpenEngine:
    """Return a function that loads the engine of a model and precision, and says so."""

    def open_chosen(key: EngineKey) -> Engine:
        values = dict(key)
        settings = models[str(values.get(MODEL, ""))]
        line = f"loading {settings.model.path}"
        if PRECISION in values:
            profile = msgspec.structs.replace(settings.model, dtype=str(values[PRECISION]))
            settings = msgspec.structs.replace(settings, model=profile)
            line += f" in {profile.dtype}"
        say(line)
        return open_engine(settings)

    return open_chosen
