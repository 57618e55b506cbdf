"""Load settings from four layers of literal TOML files, environment and options, and record the origin of each value.

From the lowest to the highest priority: a built-in file (``configs/``), a user file (``--config``), environment
variables (``DIFFSERVE_<TABLE>_<KEY>``) and command-line options. ``docs/configuration.md`` describes them. An unknown
key or a wrong value raises :class:`~diffserve.api.errors.ConfigError`. This module does not import torch.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.api.passwords import hide_password
from diffserve.api.types import AUTO_SPACING, ModelProfile
from diffserve.models.profiles import describe_model
from diffserve.settings.config import (
    DTYPE_ALIASES,
    DTYPES,
    VAE_DTYPES,
    EngineConfig,
    ServeConfig,
    Settings,
    StoreConfig,
    TextSettings,
    replace_removed_dtype,
)
from diffserve.settings.quality_profile import read_profile
from schedulers import SPACINGS, resolve_sampler

PROFILES = ("embedded", "embedded-turbo", "sd15", "sdxl")
OVERLAYS = ("edge",)
"""Built-in files for ``--config`` that set some keys and combine with any model."""

AUTO_PROFILE: Final = "auto"
"""Value of ``quality_profile`` for the shipped file of the model."""

ENV_PREFIX = "DIFFSERVE_"
NOT_SETTINGS = ("DIFFSERVE_FAULTS", "DIFFSERVE_API_KEY", "DIFFSERVE_SERVER")
"""Variables that are not settings and are read elsewhere."""

logger = logging.getLogger(__name__)


class Flag(NamedTuple):
    """A command-line option: its name for error messages, and its value (``None``: not given)."""

    name: str
    value: Any


class _Value(NamedTuple):
    """A raw value, its origin, and whether it is text from an environment variable."""

    raw: Any
    origin: str
    is_text: bool = False


TABLES: dict[str, type[msgspec.Struct]] = {
    "model": ModelProfile,
    "engine": EngineConfig,
    "text": TextSettings,
    "serve": ServeConfig,
    "store": StoreConfig,
}
MODELS: Final = "models"
INHERITED: Final = (
    *("device", "dtype", "lora_dir", "controlnet_dir", "reference_dir", "sampler_dir", "wildcard_dir", "upscaler_dir"),
)
"""Keys that further models take from the first model if the user set them there, unless they set their own."""
KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
}
"""Descriptions of the type names in msgspec's error messages."""

LISTS: Final[dict[Any, str]] = {
    tuple[str, ...]: 'a list of texts, such as ["one", "two"]',
    tuple[tuple[int, int], ...]: "a list of sizes, such as [[512, 512], [768, 512]]",
}
"""Descriptions of the types of lists."""

_EXPECTED = re.compile(r"Expected `([a-z |]+)`, got `\w+`")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
INTERNAL: Final = ("served_paths", "cross_attention")
"""Fields that only the program itself sets; they are not configuration keys."""
_FIELDS = {
    table: {key: hint for key, hint in get_type_hints(struct).items() if key not in INTERNAL}
    for table, struct in TABLES.items()
}
REMOVED: Final = {
    "engine.max_batch_delay_s": "the policies that remain do not wait for full batches, so leave it out.",
    "engine.split_guidance": 'name the second GPU in [serve] devices, or set [engine] device_map = "balanced".',
    "engine.cross_attention": "keys and values of prompts are kept in pages wherever the UNet allows it.",
    "engine.trace_ticks": "the latest 256 ticks are kept.",
    "engine.ageing_rows_per_tick": "waiting always counts 0.5 rows a tick.",
    "text.trace_ticks": "the latest 256 ticks are kept.",
    "text.prompt_lookup": "set num_draft_tokens = 0 to turn drafts off.",
}
"""Removed keys and their replacements. They are ignored with a warning."""

REMOVED_VALUES: Final = {"engine.policy": ("serial", "static", "same-key")}
REMOVED_VALUE_HINTS: Final = {"engine.policy": 'use "latency", the default, "throughput" or "goodput".'}
"""Replacements of removed values, by key. The values are ignored with a warning."""

KEYS = tuple(f"{table}.{key}" for table, fields in _FIELDS.items() for key in fields)


def configs_dir() -> Path:
    """Return the folder of built-in files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def profile_path(setting: str, model_id: str) -> Path | None:
    """Return the quality profile of a model.

    Args:
        setting: The configured file; "auto": the one in ``configs/quality`` with the name of the model, "": none.
        model_id: Name of the model.

    Returns:
        The file, which may be missing if it is configured; None: there is none.
    """
    if setting != AUTO_PROFILE:
        return Path(setting).expanduser() if setting else None
    shipped = configs_dir() / "quality" / f"{Path(model_id).name}.toml"
    return shipped if shipped.is_file() else None


def load_settings(
    *,
    model: str | None = None,
    config: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Flag] | None = None,
    models: Iterable[str] = (),
) -> Settings:
    """Load all settings and combine their layers.

    Args:
        model: A built-in profile, a diffusers directory or a safetensors file (the first ``--model``).
        config: The name of a built-in profile or overlay, or the path of a TOML file.
        env: Environment variables; ``None``: those of this process.
        flags: Command-line options by key: ``{"serve.port": Flag("--port", 9000), ...}``.
        models: Further models that a server may load, each NAME=PATH or a path alone.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    user = {} if config is None or str(config) in PROFILES else dict(_user_layer(config))
    named_models = {key: user.pop(key) for key in list(user) if key.startswith(f"{MODELS}.")}
    environment = dict(_env_layer(os.environ if env is None else env))
    _drop_removed_values(user)
    _drop_removed_values(environment)
    profile = str(config) if str(config) in PROFILES else None
    path = model or _text(environment.get("model.path")) or _text(user.get("model.path")) or profile or "embedded"
    options = {key: _Value(flag.value, flag.name) for key, flag in (flags or {}).items() if flag.value is not None}
    values = _model_layer(path, profile)
    built_in_path = values["model.path"]
    values |= user | environment
    if model is not None:
        values["model.path"] = built_in_path if model in PROFILES else _Value(model, "--model")
    settings = _build(values | options)
    user_set = user | environment | options
    inherited = {key: user_set[key] for key in (f"model.{name}" for name in INHERITED) if key in user_set}
    entries: list[tuple[str | None, _Value]] = [(key.partition(".")[2], entry) for key, entry in named_models.items()]
    entries += [(name, _Value(model_path, "--model")) for name, model_path in map(split_name, models)]
    further_models = [_further_model(name, value, inherited) for name, value in entries]
    names = [settings.model.model_id, *(further.model_id for further in further_models)]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two models are called {duplicate!r}; give one of them another name: --model NAME=PATH.")
    if settings.engine.device_map != "none" and len(settings.serve.devices) > 1:
        raise ConfigError(
            "device_map: one model cannot use all GPUs while each has its own engine; omit devices or device_map.",
            param="device_map",
        )
    return msgspec.structs.replace(settings, models=tuple(further_models))


def split_name(text: str) -> tuple[str | None, str]:
    """Split NAME=PATH into (name, path); the name of a path alone is ``None``."""
    name, sign, path = text.partition("=")
    is_named = bool(sign) and _NAME.fullmatch(name) is not None and not Path(text).exists()
    return (name, path) if is_named else (None, text)


def _model_layer(path: str, base_profile: str | None = None) -> dict[str, _Value]:
    """Return the built-in values and those that the model at ``path`` describes itself.

    Args:
        path: A built-in profile, or the path of a model.
        base_profile: The profile to start from; ``None``: the one of the model's family.
    """
    values = _builtin_layer("serve.toml", ("serve", "store"))
    described: dict[str, Any] = {}
    profile = path if path in PROFILES else base_profile
    if profile is None:
        profile, described = describe_model(Path(path).expanduser())
    values |= _builtin_layer(f"{profile}.toml", ("model", "engine", "text"))
    return values | {f"model.{key}": _Value(value, path) for key, value in described.items()}


def _further_model(name: str | None, value: _Value, inherited: dict[str, _Value]) -> ModelProfile:
    """Return the profile of a further model.

    Args:
        name: The name that requests use; ``None``: the model's own.
        value: The path, or a table with keys of ``[model]``.
        inherited: Values of the first model that also apply to this one.
    """
    entries = {"path": value.raw} if isinstance(value.raw, str) else value.raw
    where = f"{value.origin}: {MODELS}.{name}" if name and value.origin != "--model" else value.origin
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a model name may have letters, digits, dots, hyphens and underscores only.")
    if not isinstance(entries, dict) or not isinstance(entries.get("path"), str):
        raise ConfigError(f"{where} is {value.raw!r}; give a path, or a table with a path and other keys of [model].")
    for key in entries:
        if key not in _FIELDS["model"]:
            raise ConfigError(f"{where}: unknown key {key}; {nearest(key, _FIELDS['model'])}")
    path = entries["path"]
    values = _model_layer(path) | inherited
    overrides = {key: raw for key, raw in entries.items() if key != "path" or path not in PROFILES}
    values |= {f"model.{key}": _Value(raw, where) for key, raw in overrides.items()}
    values |= {"model.model_id": _Value(name, where)} if name else {}
    profile = _build(values).model
    if profile.path not in PROFILES and not Path(profile.path).expanduser().exists():
        raise ConfigError(f"{where}: there is no model at {profile.path!r}; give a directory or a .safetensors file.")
    return profile


def _build(values: dict[str, _Value]) -> Settings:
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for dotted, value in values.items():
        table, key = dotted.split(".")
        tables[table][key] = _convert(dotted, value)
    built: dict[str, Any] = {}
    for table, struct in TABLES.items():
        try:
            built[table] = struct(**tables[table])
        except ConfigError as error:
            raise ConfigError(
                f"{_blame(f'{table}.{error.param}', values)}: {error.message}", param=error.param
            ) from None
    _check_model(cast(ModelProfile, built["model"]), values)
    return Settings(**built, origins={dotted: values[dotted].origin for dotted in sorted(values)})


def _convert(dotted: str, value: _Value) -> Any:
    """Return ``value`` as the type of its field.

    Text from the environment is read as TOML would write it without quotes.
    """
    table, key = dotted.split(".")
    raw = value.raw
    if raw == "auto" and _FIELDS[table][key] in (int | None, float | None):
        return None
    if value.is_text and key == "good_sizes":
        raw = [size.split("x") for size in raw.replace(" ", "").split(",") if size]
    if value.is_text and _FIELDS[table][key] == tuple[str, ...]:
        raw = [name.strip() for name in raw.split(",") if name.strip()]
    if dotted == "model.dtype" and isinstance(raw, str):
        raw = replace_removed_dtype(raw, _blame(dotted, {dotted: value}))
    try:
        return msgspec.convert(raw, _FIELDS[table][key], strict=not value.is_text)
    except msgspec.ValidationError as error:
        words = list(_words(_FIELDS[table][key]))
        reason = f"choose one of {', '.join(words)}" if words else _advice(_FIELDS[table][key], str(error))
        if value.is_text and key == "good_sizes":
            reason = "give sizes such as 512x512, 768x512"
        raise ConfigError(
            f"{_blame(dotted, {dotted: value})} is {hide_password(repr(value.raw))}: {reason}.", param=key
        ) from None


def _advice(hint: Any, message: str) -> str:
    """Return what to give for a field of type ``hint``; msgspec's ``message`` itself if it is not about a type."""
    if hint in LISTS:
        return f"give {LISTS[hint]}"
    expected = _EXPECTED.fullmatch(message)
    kinds = [KINDS[name] for name in expected[1].split(" | ") if name in KINDS] if expected else []
    return f"give {' or '.join(kinds)}" if kinds else message[0].lower() + message[1:]


def _words(hint: Any) -> Iterator[str]:
    """Yield the values that a field of type ``hint`` allows, if it is an enumeration."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif any(get_origin(part) is Literal for part in get_args(hint)):
        for part in get_args(hint):
            yield from ("true", "false") if part is bool else _words(part)


def _blame(dotted: str, values: Mapping[str, _Value]) -> str:
    """Return where a value came from: an option, a variable, or a key of a file."""
    origin = values[dotted].origin if dotted in values else "the built-in files"
    return origin if origin.startswith(("-", ENV_PREFIX)) else f"{origin}: {dotted}"


def _check_model(model: ModelProfile, values: Mapping[str, _Value]) -> None:
    def problem(key: str, reason: str) -> ConfigError:
        return ConfigError(f"{_blame(f'model.{key}', values)}: {reason}", param=key)

    choices = {"spacing": (AUTO_SPACING, *SPACINGS), "dtype": DTYPES, "vae_dtype": VAE_DTYPES}
    for key, allowed in choices.items():
        if DTYPE_ALIASES.get(getattr(model, key), getattr(model, key)) not in allowed:
            raise problem(key, f"{key} is {getattr(model, key)!r}; choose one of {', '.join(allowed)}.")
    try:
        resolve_sampler(model.sampler)
    except ValueError as error:
        raise problem("sampler", str(error)) from None
    try:
        _ = model.diffusion
    except InvalidRequest as error:
        raise problem(
            "num_steps" if error.param == "num_inference_steps" else str(error.param), error.message
        ) from None
    for key in ("lora_dir", "controlnet_dir", "reference_dir", "sampler_dir", "wildcard_dir", "upscaler_dir"):
        folder = getattr(model, key)
        if folder and not Path(folder).expanduser().is_dir():
            raise problem(key, f"{key} is {folder!r}; there is no such folder.")
    path = profile_path(model.quality_profile, model.model_id)
    if path is not None:
        try:
            read_profile(path)
        except ConfigError as error:
            raise problem("quality_profile", error.message) from None
    sides = [side for size in model.good_sizes for side in size]
    if min(sides, default=1) < 1:
        raise problem("good_sizes", f"good_sizes has a side of {min(sides)} px; every side must be 1 px or more.")
    if model.max_side_px < max(sides, default=1):
        raise problem("max_side_px", f"max_side_px is {model.max_side_px}; good_sizes has a side of {max(sides)} px.")


def _builtin_layer(name: str, tables: tuple[str, ...]) -> dict[str, _Value]:
    """Return all values of a built-in file. A missing key is an error, too."""
    path = configs_dir() / name
    values = dict(_file_values(path, f"configs/{name}"))
    missing = [key for key in KEYS if key.split(".")[0] in tables and key not in values]
    if missing:
        raise ConfigError(f"the built-in file {path} lacks {', '.join(missing)}; reinstall diffserve.")
    return values


def _user_layer(config: str | Path) -> Iterator[tuple[str, _Value]]:
    """Return the values of a user file or of one of ``OVERLAYS``."""
    if str(config) in OVERLAYS:
        return _file_values(configs_dir() / f"{config}.toml", f"configs/{config}.toml")
    return _file_values(Path(config), str(config))


def _file_values(path: Path, origin: str) -> Iterator[tuple[str, _Value]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        choices = ", ".join((*PROFILES, *OVERLAYS))
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}; give a TOML file or one of {choices}."
        ) from None
    except ValueError as error:  # bad TOML, bad UTF-8, or a number with thousands of digits
        raise ConfigError(f"{origin} is not valid TOML: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{origin} is not valid TOML: it is nested too deeply.") from None
    for table, entries in tables.items():
        if table in (*TABLES, MODELS) and not isinstance(entries, dict):
            value = hide_password(repr(entries))
            raise ConfigError(f"{origin}: {table} is {value}; write it as a table, [{table}], with keys below it.")
        if table not in (*TABLES, MODELS):
            raise ConfigError(f"{origin}: unknown table [{table}]; {nearest(table, (*TABLES, MODELS))}")
        for key, raw in entries.items():
            if f"{table}.{key}" in REMOVED:
                _warn_of_removed(f"{table}.{key}", f"{origin}: {table}.{key}")
                continue
            if table != MODELS and key not in _FIELDS[table]:
                raise ConfigError(f"{origin}: unknown key {table}.{key}; {nearest(key, _FIELDS[table])}")
            yield f"{table}.{key}", _Value(raw, origin)


def _env_layer(env: Mapping[str, str]) -> Iterator[tuple[str, _Value]]:
    variables, removed = ({_variable(key): key for key in keys} for keys in (KEYS, REMOVED))
    for name in sorted(env):
        if name in variables:
            yield variables[name], _Value(env[name], name, is_text=True)
        elif name in removed:
            _warn_of_removed(removed[name], name)
        elif name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            value = hide_password(env[name])
            raise ConfigError(f"unknown environment variable {name}={value!r}; {nearest(name, variables)}")


def _variable(key: str) -> str:
    """Return the environment variable of the dotted ``key``."""
    return f"{ENV_PREFIX}{key.replace('.', '_').upper()}"


def _warn_of_removed(key: str, where: str) -> None:
    logger.warning("%s has no effect: it was removed in 0.2; %s", where, REMOVED[key])


def _drop_removed_values(values: dict[str, _Value]) -> None:
    """Delete entries of ``values`` whose value was removed, with a warning for each."""
    for key, removed in REMOVED_VALUES.items():
        if key in values and values[key].raw in removed:
            message = "%s is %r, which has no effect: it was removed in 0.2; %s"
            logger.warning(message, _blame(key, values), values.pop(key).raw, REMOVED_VALUE_HINTS[key])


def nearest(word: str, choices: Iterable[str]) -> str:
    """Suggest the nearest of ``choices`` for the misspelled ``word``, or list all of them."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(choices)}."


def _text(value: _Value | None) -> str | None:
    return value.raw if value is not None and isinstance(value.raw, str) else None
