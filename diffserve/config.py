"""Settings: literal TOML files, layered, each value with its origin.

Four layers, the later one wins::

    built-in file    configs/serve.toml and one of configs/{embedded,embedded-turbo,sd15,sdxl}.toml (complete)
    user file        --config FILE, any subset of the same tables and keys; or ``edge``, which is built in
    environment      DIFFSERVE_<TABLE>_<KEY>, e.g. DIFFSERVE_SERVE_PORT=9000
    command line     --port 9000

The table ``[models]`` names further models that a server may load: ``NAME = PATH``, or a table ``[models.NAME]`` with a
path and other keys of ``[model]``.

An unknown key is a :class:`~diffserve.errors.ConfigError` that names the nearest known one; a wrong value is quoted
with the place it came from. No torch here.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec

from diffserve.bounds import Between, check_bounds
from diffserve.errors import ConfigError, InvalidRequest
from diffserve.profiles import describe_model
from diffserve.text_types import TextConfig
from diffserve.types import AUTO_SPACING, ModelProfile, NoiseSource
from schedulers import SPACINGS, resolve_sampler

PROFILES = ("embedded", "embedded-turbo", "sd15", "sdxl")
OVERLAYS = ("edge",)
"""Built-in files for ``--config`` that hold some of the keys, for any model."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int8_dynamic", "int8_static", "float8")
VAE_DTYPES = ("auto", "float32", "bfloat16", "float16")
TEXT_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "float8"}
OFFLOADS = ("none", "auto", "cpu", "disk")
DEVICE_MAPS = ("none", "auto", "balanced")
POLICIES = ("latency", "throughput", "goodput", "serial", "static", "same-key")
AUTO_STYLE = "auto"
ENV_PREFIX = "DIFFSERVE_"
MOST_PRICE_PER_HOUR = 1e6
_PUBLIC_URL = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+(?:/[A-Za-z0-9._~\-/]*)?")
_FETCH_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.\-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?")
_DEVICE = re.compile(r"cpu|mps|cuda(?::[0-9]{1,3})?")
_FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
NOT_SETTINGS = ("DIFFSERVE_FAULTS", "DIFFSERVE_API_KEY")
"""Variables that are read elsewhere (``diffserve.runtime.faults``)."""


ENGINE_BOUNDS = {
    "max_rows": Between(2, 256, "a guided image needs 2 rows in one tick, and no device gains by hundreds"),
    "max_lanes": Between(1, 4096, "every image in flight keeps its latents and their history in memory"),
    "max_waiting": Between(1, 100_000),
    "max_prepares_per_tick": Between(1, 1024),
    "max_decodes_per_tick": Between(1, 1024),
    "decode_tile_px": Between(0, 1 << 16),
    "ageing_rows_per_tick": Between(1e-6, 1e6, "without ageing long jobs starve"),
    "slo_scale": Between(1.0, 1e6, "it counts in times of what a request takes alone"),
    "max_batch_delay_s": Between(0.0, 3600.0),
    "trace_ticks": Between(1, 100_000),
    "kv_pool_bytes": Between(1, 1 << 42),
    "result_cache_bytes": Between(0, 1 << 42),
    "latent_cache_bytes": Between(0, 1 << 42),
    "lora_bytes": Between(0, 1 << 42),
    "controlnet_bytes": Between(0, 1 << 42),
    "activation_bytes": Between(1, 1 << 42),
    "threads": Between(1, 1024),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine batches. Every value is literal; ``"auto"`` and ``None`` are resolved at start and reported.

    max_rows               rows (latents) in one tick; ``None``: the knee of the measured cost curve, at most
                           16 on a CPU and 32 elsewhere
    deterministic          True: an image's bytes do not depend on its neighbours; False: they may differ by rounding
                           (see ``Engine.tolerance``); "auto": True on a CPU, where it costs next to nothing
    max_lanes              images in flight at once, running or preempted between two steps; one more, and another for
                           every eight of these, is kept for clients who have none in flight
    max_waiting            requests that may wait for a lane before :class:`~diffserve.errors.QueueFull`
    max_prepares_per_tick  newcomers whose text and init image are encoded in one tick, so that nobody stalls
    max_decodes_per_tick   finished latents turned into pictures in one tick
    decode_tile_px         pictures with a longer side are decoded in tiles of so many pixels along it, which fade into
                           each other; 0: all in one piece, as far as there is memory
    ageing_rows_per_tick   how fast waiting earns precedence, in rows of the model's native size (a row of twice the
                           pixels counts as two): a job of N remaining rows is overtaken only by jobs of the same client
                           that came within N / ageing_rows_per_tick ticks after it
    policy                 who runs next (see :mod:`diffserve.engine.image.policy`): "latency", "throughput", "goodput";
                           to measure against, "serial", "static", "same-key"
    slo_scale              a request should be done within so many times what it takes alone; "goodput" goes by it
    max_batch_delay_s      how long a batch of "static" waits to be full
    trace_ticks            how many past ticks ``Engine.trace`` remembers
    cross_attention        "paged": the UNet's keys and values of every prompt are made once and kept in the page pool;
                           "plain": embeddings through diffusers' own attention at every step, and no pool
    kv_pool_bytes          size of the page pool, which a language model shares; ``None``: room for 64 different prompts
                           of one window, and for what the language model wants
    result_cache_bytes     of finished pictures kept in memory; a request with a seed whose picture is among them, or is
                           being painted for somebody else, is answered by it. 0: none, and everybody is painted for
    noise_source           of requests that do not say: "cpu": every image draws with a torch generator of its own on
                           the CPU, as diffusers does; "device": with the numbers of a CUDA generator ("GPU" and "NV" in
                           A1111), on any device, for all rows of a tick at once. Seeds paint other pictures then, and
                           an init image is still encoded with the CPU's
    latent_cache_bytes     of finished latents kept in memory: a request with a ``similarity_threshold`` gives its own,
                           and begins from those of a similar prompt. All clients share them, and are told of it: who
                           asks can find out what others asked for. 0: none, and such requests are refused
    lora_bytes             of adapters kept in memory beside those of pictures that are being painted
    controlnet_bytes       the same of ControlNets; so much is left for them of what is free at start
    activation_bytes       that a call of a network may hold beside the weights: rows are capped by it, pictures decoded
                           in tiles, and refused where that does not help; ``None``: what is free
    threads                of the processor that a UNet call runs on; ``None``: what proves fastest, again and again, of
                           torch's own number and fewer
    offload                where the weights of every model rest while their layer does not run: "none": on the device;
                           "cpu": in main memory; "disk": in their files; "auto": on the device as far as it has room
    device_map             one model over all GPUs: "balanced": its UNet on the first, text encoders and VAE where most
                           room is; "auto": the same where the first has too little for all. A UNet that none has room
                           for is split; it is not compiled then, and has no DeepCache. "none": on one device
    split_guidance         a second device, for the unconditional rows of guided pictures: the two rows of one then take
                           the time of one. Nothing is compiled then, nor recorded. "": none
    compile                "off": the UNet as it is; "warm": compiled for shapes that ``diffserve warm`` was run for;
                           "background": for every shape that is painted, by a process of low priority. Of a small
                           model on a CPU it takes 15 times the UNet's weights in memory, of others next to nothing
    cuda_graphs            on CUDA: calls of the UNet are recorded for each number of rows, and replayed with one launch
    stage                  what this process does of a picture: "all" of it, or in a cluster of stages apart "encode"
                           the texts (and rewrite them), "denoise", or "decode"; each loads only what it needs
    cache_dir              where costs and digests are kept between two starts (see :mod:`diffserve.disk_cache`);
                           "auto": the user's cache folder; "": nowhere
    """

    max_rows: int | None = None
    deterministic: bool | Literal["auto"] = "auto"
    max_lanes: int = 64
    max_waiting: int = 256
    max_prepares_per_tick: int = 8
    max_decodes_per_tick: int = 4
    decode_tile_px: int = 0
    ageing_rows_per_tick: float = 0.5
    policy: str = "latency"
    slo_scale: float = 3.0
    max_batch_delay_s: float = 0.1
    trace_ticks: int = 256
    cross_attention: Literal["paged", "plain"] = "paged"
    kv_pool_bytes: int | None = None
    result_cache_bytes: int = 0
    noise_source: NoiseSource = "cpu"
    latent_cache_bytes: int = 0
    lora_bytes: int = 1 << 30
    controlnet_bytes: int = 1 << 32
    activation_bytes: int | None = None
    threads: int | None = None
    offload: str = "none"
    device_map: str = "none"
    split_guidance: str = ""
    compile: Literal["off", "warm", "background"] = "warm"
    cuda_graphs: bool = False
    stage: Literal["all", "encode", "denoise", "decode"] = "all"
    cache_dir: str = "auto"

    def __post_init__(self) -> None:
        check_bounds(self, ENGINE_BOUNDS)
        if self.offload not in OFFLOADS:
            raise ConfigError(f"offload is {self.offload!r}; choose one of {', '.join(OFFLOADS)}.", param="offload")
        if self.device_map not in DEVICE_MAPS:
            said = f"device_map is {self.device_map!r}; choose one of {', '.join(DEVICE_MAPS)}."
            raise ConfigError(said, param="device_map")
        for name, unset in (("offload", "none"), ("split_guidance", "")):
            if self.device_map != "none" and getattr(self, name) != unset:
                raise ConfigError(
                    f"device_map is {self.device_map!r} and {name} {getattr(self, name)!r}; give one of them.",
                    param="device_map",
                )
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}; choose one of {', '.join(POLICIES)}.", param="policy")


class TextSettings(TextConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``[text]`` table: which language model stands beside the images, and how both share the device.

    model             "": none; "embedded": the rewriter that ships inside; else a directory as transformers writes it
    draft_model       a smaller model of the same vocabulary that proposes what ``model`` checks; "": none
    dtype             auto, float32, bfloat16, float16, int8 or int4, of both
    rewriter_style    file name in ``configs/rewriter/``; "auto": what the image model's family reads best
    rewriter_entropy  mean nats per token above which a rewritten prompt counts as unsure; ``None``: as the style says
    prompt_rewriter   what an image request gets that does not say: off, auto, or force (also where it is unsure)
    time_share        while images are painted and texts are written, the share of time that goes to the texts

    The rest is :class:`~diffserve.text_types.TextConfig`.
    """

    model: str = ""
    draft_model: str = ""
    dtype: str = "auto"
    rewriter_style: str = AUTO_STYLE
    rewriter_entropy: float | None = None
    prompt_rewriter: Literal["off", "auto", "force"] = "off"
    time_share: float = 0.25

    def __post_init__(self) -> None:
        TextConfig.__post_init__(self)
        if DTYPE_ALIASES.get(self.dtype, self.dtype) not in TEXT_DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; choose one of {', '.join(TEXT_DTYPES)}.", param="dtype")
        if not self.rewriter_style.strip():
            raise ConfigError("rewriter_style is empty; give auto or a style's name.", param="rewriter_style")
        entropy = self.rewriter_entropy
        if entropy is not None and not (math.isfinite(entropy) and entropy > 0):
            raise ConfigError(
                f"rewriter_entropy is {entropy}; it must be a positive number of nats, or auto.",
                param="rewriter_entropy",
            )
        if not 0.0 < self.time_share < 1.0:
            raise ConfigError(
                f"time_share is {self.time_share}; it must lie between 0 and 1, so that neither side stands still.",
                param="time_share",
            )


class HourlyPrice(NamedTuple):
    """What an hour of the device costs; ``currency`` in three letters."""

    per_hour: float
    currency: str


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``[serve]`` table; seconds, bytes and pixels as the names say (see ``configs/serve.toml``).

    allow_open          whether other machines may be let in where there are no keys
    allowed_hosts       the names by which the server may be called; none: its own; "*": any
    max_connections     how many clients may hold a connection at a time
    page                whether browsers find a page at ``/``
    page_grace_s        for so long a painting goes on whose page was closed: one that is reloaded comes back
    public_url          where clients reach the server, for the URLs of pictures; "": as they named it
    url_pictures_bytes  of pictures kept for their URLs; 0: none are
    files_bytes         of files that one key may keep
    history_days        for so long each picture is kept for the key that it was painted for; 0: none is
    history_bytes       of such pictures, of all keys; the oldest go first
    unload_after_s      seconds without work after which a model is unloaded, until it is asked for again; 0: never
    devices             an engine on each, behind one front: "cuda:0", "cuda:1", ...; "cpu" as often as one likes, which
                        divides the cores; none: one engine, where ``[model] device`` says
    spare_engine        whether a second process stands by, its libraries imported, so that a lost engine is back sooner
    hang_after_s        a tick of the engine counts as hanging, and the engine is started anew, after so many seconds
                        and ten times what ticks take; so long an engine may be silent, too
    debug               whether ``/debug/trace`` is there
    fetch_hosts         from which hosts pictures are fetched whose address a request gives, by https: HOST or
                        HOST:PORT; none: nothing is fetched
    watermark           whether pictures get a mark in their pixels, not to be seen, that says that a machine painted
                        them
    c2pa_certificate    a chain in PEM with which pictures are signed (C2PA, the extra "c2pa"), and
    c2pa_key            its private key; "": they are not
    safety_filter       what looks at prompts and pictures before they leave: "model", the first model's own
                        ``safety_checker``; MODULE:FACTORY; "": nothing does
    safety_timeout_s    it is given so long for a picture, else the picture is withheld
    max_backlog_s       seconds of work, at the measured pace and in fair shares, that a client may have here before it
                        is refused, its largest request aside: that one is let in whole, however large
    trusted_proxies     addresses whose X-Forwarded-For says who asks
    price_per_hour      of the device, in ``currency``: answers say what they cost; 0: they do not
    """

    host: str
    port: int
    allow_open: bool
    allowed_hosts: tuple[str, ...]
    max_connections: int
    data_dir: str
    max_body_bytes: int
    request_timeout_s: float
    startup_timeout_s: float
    shutdown_timeout_s: float
    hang_after_s: float
    unload_after_s: float
    devices: tuple[str, ...]
    spare_engine: bool
    min_size_px: int
    max_size_px: int
    max_backlog_s: float
    trusted_proxies: tuple[str, ...]
    log_level: Literal["debug", "info", "warning", "error"]
    page: bool
    page_grace_s: float
    public_url: str
    url_pictures_bytes: int
    files_bytes: int
    history_days: float
    history_bytes: int
    debug: bool
    fetch_hosts: tuple[str, ...]
    watermark: bool
    c2pa_certificate: str
    c2pa_key: str
    safety_filter: str
    safety_timeout_s: float
    price_per_hour: float
    currency: str

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie between 0 (any free port) and 65535.", param="port")
        if not self.host.strip():
            raise ConfigError("host is empty; give 127.0.0.1, or 0.0.0.0 for every interface.", param="host")
        _at_least(1, max_body_bytes=self.max_body_bytes, min_size_px=self.min_size_px)
        _at_least(16, max_connections=self.max_connections)
        _at_least(self.min_size_px, max_size_px=self.max_size_px)
        _at_least(0, url_pictures_bytes=self.url_pictures_bytes, files_bytes=self.files_bytes)
        _at_least(0, history_bytes=self.history_bytes)
        if not 0.0 <= self.history_days <= 36_500.0:
            said = f"history_days is {self.history_days}; it must lie between 0 (keep none) and 36500."
            raise ConfigError(said, param="history_days")
        if not (math.isfinite(self.price_per_hour) and 0.0 <= self.price_per_hour <= MOST_PRICE_PER_HOUR):
            raise ConfigError(
                f"price_per_hour is {self.price_per_hour}; give what an hour of the device costs, or 0 to say nothing.",
                param="price_per_hour",
            )
        if not re.fullmatch("[A-Z]{3}", self.currency):
            raise ConfigError(f"currency is {self.currency!r}; give three letters, such as EUR.", param="currency")
        for device in self.devices:
            self._check_device(device)
        if self.public_url and not _PUBLIC_URL.fullmatch(self.public_url):
            raise ConfigError(
                f"public_url is {self.public_url[:80]!r}; write it as https://paint.example.org, or leave it empty.",
                param="public_url",
            )
        for host in self.fetch_hosts:
            if not _FETCH_HOST.fullmatch(host):
                raise ConfigError(
                    f"fetch_hosts has {host[:80]!r}; give exact names such as pictures.example.org, or NAME:PORT.",
                    param="fetch_hosts",
                )
        if bool(self.c2pa_certificate) is not bool(self.c2pa_key):
            alone = "c2pa_key" if self.c2pa_key else "c2pa_certificate"
            said = f"{alone} is given alone; give c2pa_certificate and c2pa_key together, or neither."
            raise ConfigError(said, param=alone)
        if self.safety_filter not in ("", "model") and not _FACTORY.fullmatch(self.safety_filter):
            said = f"safety_filter is {self.safety_filter[:80]!r}; give model, MODULE:FACTORY, or leave it empty."
            raise ConfigError(said, param="safety_filter")
        spans = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        for name, value in spans.items():
            may_be_never = name == "unload_after_s" and value == 0
            if not (math.isfinite(value) and (value > 0 or may_be_never)):
                never = ", or 0 for never" if name == "unload_after_s" else ""
                raise ConfigError(f"{name} is {value}; it must be a positive number of seconds{never}.", param=name)

    def _check_device(self, device: str) -> None:
        if not _DEVICE.fullmatch(device):
            said = f"devices has {device[:40]!r}; name each as cpu, mps, cuda or cuda:N, with commas between them."
            raise ConfigError(said, param="devices")
        if device != "cpu" and [one.removesuffix(":0") for one in self.devices].count(device.removesuffix(":0")) > 1:
            said = f"devices has {device!r} twice; an engine takes a whole device, only cpu can be divided."
            raise ConfigError(said, param="devices")

    @property
    def price(self) -> HourlyPrice | None:
        """What requests are told to cost, where they are."""
        return HourlyPrice(self.price_per_hour, self.currency) if self.price_per_hour else None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything configured. ``origins`` maps "table.key" to the place its value came from.

    models  beside ``model``, those that a server may load (the ``[models]`` table, and further ``--model``)
    """

    model: ModelProfile
    engine: EngineConfig
    text: TextSettings
    serve: ServeConfig
    origins: dict[str, str]
    models: tuple[ModelProfile, ...] = ()


class Flag(NamedTuple):
    """A command-line option: the name to quote in an error, and its value (``None``: not given)."""

    name: str
    value: Any


class _Value(NamedTuple):
    raw: Any
    origin: str
    is_text: bool = False


TABLES: dict[str, type[msgspec.Struct]] = {
    "model": ModelProfile,
    "engine": EngineConfig,
    "text": TextSettings,
    "serve": ServeConfig,
}
MODELS: Final = "models"
INHERITED: Final = ("device", "dtype", "lora_dir", "controlnet_dir")
"""What further models have of the first where it was set on purpose, and they say nothing else."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = {table: get_type_hints(struct) for table, struct in TABLES.items()}
KEYS = tuple(f"{table}.{key}" for table, fields in _FIELDS.items() for key in fields)


def configs_dir() -> Path:
    """The folder of built-in files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "configs"
    return shipped if shipped.is_dir() else package.parent / "configs"


def load_settings(
    *,
    model: str | None = None,
    config: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Flag] | None = None,
    models: Iterable[str] = (),
) -> Settings:
    """Read and layer all settings.

    ``model``: a built-in profile name, a diffusers directory or a safetensors file (the command line's ``--model``).
    ``models``: further ones that a server may load, each NAME=PATH or a path alone.
    ``config``: the name of a built-in profile or overlay, or a TOML file. ``env``: the process environment when
    ``None``. ``flags``: {"serve.port": Flag("--port", 9000), ...}. Raises ConfigError.
    """
    user = {} if config is None or str(config) in PROFILES else dict(_user_layer(config))
    named_models = {key: user.pop(key) for key in list(user) if key.startswith(f"{MODELS}.")}
    environment = dict(_env_layer(os.environ if env is None else env))
    named = str(config) if str(config) in PROFILES else None
    path = model or _text(environment.get("model.path")) or _text(user.get("model.path")) or named or "embedded"
    given = {key: _Value(flag.value, flag.name) for key, flag in (flags or {}).items() if flag.value is not None}
    values = _model_layer(path, named)
    own_path = values["model.path"]
    values |= user | environment
    if model is not None:
        values["model.path"] = own_path if model in PROFILES else _Value(model, "--model")
    settings = _build(values | given)
    on_purpose = user | environment | given
    inherited = {key: on_purpose[key] for key in (f"model.{name}" for name in INHERITED) if key in on_purpose}
    asked: list[tuple[str | None, _Value]] = [(key.partition(".")[2], one) for key, one in named_models.items()]
    asked += [(name, _Value(one, "--model")) for name, one in map(split_name, models)]
    others = [_further_model(name, value, inherited) for name, value in asked]
    names = [settings.model.model_id, *(one.model_id for one in others)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two models are called {twice!r}; give one of them another name: --model NAME=PATH.")
    if settings.engine.split_guidance and len(settings.serve.devices) > 1:
        said = f"{settings.engine.split_guidance!r} cannot be the second device of several engines; leave out devices"
        raise ConfigError(f"split_guidance: {said}, or split_guidance.", param="split_guidance")
    if settings.engine.device_map != "none" and len(settings.serve.devices) > 1:
        said = "one model cannot be on all GPUs while each has an engine of its own; leave out devices"
        raise ConfigError(f"device_map: {said}, or device_map.", param="device_map")
    return msgspec.structs.replace(settings, models=tuple(others))


def split_name(text: str) -> tuple[str | None, str]:
    """(name, path) of NAME=PATH; of a path alone the name is ``None``."""
    name, sign, path = text.partition("=")
    is_named = bool(sign) and _NAME.fullmatch(name) is not None and not Path(text).exists()
    return (name, path) if is_named else (None, text)


def _model_layer(path: str, named: str | None = None) -> dict[str, _Value]:
    """The built-in files, and what the model at ``path`` says of itself; ``named``: the profile to start from."""
    values = _builtin_layer("serve.toml", ("serve",))
    described: dict[str, Any] = {}
    profile = path if path in PROFILES else named
    if profile is None:
        profile, described = describe_model(Path(path).expanduser())
    values |= _builtin_layer(f"{profile}.toml", ("model", "engine", "text"))
    return values | {f"model.{key}": _Value(value, path) for key, value in described.items()}


def _further_model(name: str | None, value: _Value, inherited: dict[str, _Value]) -> ModelProfile:
    """One of the models beside the first: ``value`` is its path, or a table of keys as ``[model]`` has them."""
    entries = {"path": value.raw} if isinstance(value.raw, str) else value.raw
    where = f"{value.origin}: {MODELS}.{name}" if name and value.origin != "--model" else value.origin
    if name and not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a model's name is of letters, digits, dots, hyphens and underscores.")
    if not isinstance(entries, dict) or not isinstance(entries.get("path"), str):
        raise ConfigError(f"{where} is {value.raw!r}; give a path, or a table with a path and other keys of [model].")
    for key in entries:
        if key not in _FIELDS["model"]:
            raise ConfigError(f"{where}: unknown key {key}; {nearest(key, _FIELDS['model'])}")
    path = entries["path"]
    values = _model_layer(path) | inherited
    own = {key: raw for key, raw in entries.items() if key != "path" or path not in PROFILES}
    values |= {f"model.{key}": _Value(raw, where) for key, raw in own.items()}
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
    """``value`` as the type of its field; environment text is read as TOML would write it without quotes."""
    table, key = dotted.split(".")
    raw = value.raw
    if raw == "auto" and _FIELDS[table][key] in (int | None, float | None):
        return None
    if value.is_text and key == "good_sizes":
        raw = [size.split("x") for size in raw.replace(" ", "").split(",") if size]
    if value.is_text and key in ("allowed_hosts", "devices", "trusted_proxies", "fetch_hosts"):
        raw = [name.strip() for name in raw.split(",") if name.strip()]
    try:
        return msgspec.convert(raw, _FIELDS[table][key], strict=not value.is_text)
    except msgspec.ValidationError as error:
        words = list(_words(_FIELDS[table][key]))
        reason = f"choose one of {', '.join(words)}" if words else str(error)[0].lower() + str(error)[1:]
        raise ConfigError(f"{_blame(dotted, {dotted: value})} is {value.raw!r}: {reason}.", param=key) from None


def _words(hint: Any) -> Iterator[str]:
    """All that a field of the type ``hint`` may be, where that is a few words."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif any(get_origin(part) is Literal for part in get_args(hint)):
        for part in get_args(hint):
            yield from ("true", "false") if part is bool else _words(part)


def _blame(dotted: str, values: Mapping[str, _Value]) -> str:
    """Where a wrong value came from, as its author knows it: an option, a variable, or a key of a file."""
    origin = values[dotted].origin if dotted in values else "the built-in files"
    return origin if origin.startswith(("-", ENV_PREFIX)) else f"{origin}: {dotted}"


def _check_model(model: ModelProfile, values: Mapping[str, _Value]) -> None:
    def refuse(key: str, why: str) -> ConfigError:
        return ConfigError(f"{_blame(f'model.{key}', values)}: {why}", param=key)

    choices = {"spacing": (AUTO_SPACING, *SPACINGS), "dtype": DTYPES, "vae_dtype": VAE_DTYPES}
    for key, known in choices.items():
        if DTYPE_ALIASES.get(getattr(model, key), getattr(model, key)) not in known:
            raise refuse(key, f"{key} is {getattr(model, key)!r}; choose one of {', '.join(known)}.")
    try:
        resolve_sampler(model.sampler)
    except ValueError as error:
        raise refuse("sampler", str(error)) from None
    try:
        _ = model.diffusion
    except InvalidRequest as error:
        raise refuse("num_steps" if error.param == "num_inference_steps" else str(error.param), error.message) from None
    for key, folder in (("lora_dir", model.lora_dir), ("controlnet_dir", model.controlnet_dir)):
        if folder and not Path(folder).expanduser().is_dir():
            raise refuse(key, f"{key} is {folder!r}; there is no such folder.")
    sides = [side for size in model.good_sizes for side in size]
    if min(sides, default=1) < 1:
        raise refuse("good_sizes", f"good_sizes holds a side of {min(sides)} px; every side must be 1 px or more.")
    if model.max_side_px < max(sides, default=1):
        raise refuse("max_side_px", f"max_side_px is {model.max_side_px}; good_sizes holds a side of {max(sides)} px.")


def _builtin_layer(name: str, tables: tuple[str, ...]) -> dict[str, _Value]:
    """A built-in file, whole: a key that is missing there is an error too."""
    path = configs_dir() / name
    values = dict(_file_values(path, f"configs/{name}"))
    missing = [key for key in KEYS if key.split(".")[0] in tables and key not in values]
    if missing:
        raise ConfigError(f"the built-in file {path} lacks {', '.join(missing)}; reinstall diffserve.")
    return values


def _user_layer(config: str | Path) -> Iterator[tuple[str, _Value]]:
    """A file of the user's, or one of ``OVERLAYS``."""
    if str(config) in OVERLAYS:
        return _file_values(configs_dir() / f"{config}.toml", f"configs/{config}.toml")
    return _file_values(Path(config), str(config))


def _file_values(path: Path, origin: str) -> Iterator[tuple[str, _Value]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        choices = ", ".join((*PROFILES, *OVERLAYS))
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}; give a TOML file or one of {choices}."
        ) from None
    except ValueError as error:  # bad TOML, bad UTF-8, a number of thousands of digits
        raise ConfigError(f"{origin} is not valid TOML: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{origin} is not valid TOML: it is nested too deeply.") from None
    for table, entries in tables.items():
        if table in (*TABLES, MODELS) and not isinstance(entries, dict):
            raise ConfigError(
                f"{origin}: {table} is {entries!r}; write it as a table, [{table}], with keys beneath it."
            )
        if table not in (*TABLES, MODELS):
            raise ConfigError(f"{origin}: unknown table [{table}]; {nearest(table, (*TABLES, MODELS))}")
        for key, raw in entries.items():
            if table != MODELS and key not in _FIELDS[table]:
                raise ConfigError(f"{origin}: unknown key {table}.{key}; {nearest(key, _FIELDS[table])}")
            yield f"{table}.{key}", _Value(raw, origin)


def _env_layer(env: Mapping[str, str]) -> Iterator[tuple[str, _Value]]:
    known = {f"{ENV_PREFIX}{key.replace('.', '_').upper()}": key for key in KEYS}
    for name in sorted(env):
        if name in known:
            yield known[name], _Value(env[name], name, is_text=True)
        elif name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            raise ConfigError(f"unknown environment variable {name}={env[name]!r}; {nearest(name, known)}")


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nearest(word: str, known: Iterable[str]) -> str:
    """What to tell somebody who wrote ``word``: the nearest of ``known``, or all of them."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."


def _text(value: _Value | None) -> str | None:
    return value.raw if value is not None and isinstance(value.raw, str) else None


def _at_least(low: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < low:
            raise ConfigError(f"{name} is {number}; it must be {low} or more.", param=name)
