"""Schema of the configuration tables. Each value is validated when its table is created.

``settings.layers`` reads the tables from files, environment variables and options. This module does not import torch.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from diffserve.api.bounds import Between, check_bounds
from diffserve.api.errors import ConfigError
from diffserve.api.fields import NoiseSource
from diffserve.api.passwords import hide_password
from diffserve.api.text_types import TextConfig
from diffserve.api.types import ModelProfile, UNetPath

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int8_dynamic", "int8_static")
VAE_DTYPES = ("auto", "float32", "bfloat16", "float16")
TEXT_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
REMOVED_DTYPES = ("float8", "fp8")
OFFLOADS = ("none", "auto", "cpu", "disk")
DEVICE_MAPS = ("none", "auto", "balanced")
POLICIES = ("latency", "throughput", "goodput")
AUTO_STYLE = "auto"
MOST_PRICE_PER_HOUR = 1e6
_PUBLIC_URL = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+(?:/[A-Za-z0-9._~\-/]*)?")
_ORIGIN = re.compile(r"https?://[a-z0-9._\-\[\]:]+")
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9\-]{0,63}")
_OUTGOING_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.\-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?")
_DEVICE = re.compile(r"cpu|mps|(?:cuda|xpu)(?::[0-9]{1,3})?")
_STORE_URL = re.compile(r"postgres(?:ql)?://\S+")
_FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

logger = logging.getLogger(__name__)

ENGINE_BOUNDS = {
    "max_rows": Between(2, 256, "a guided image needs 2 rows in one tick, and more than 256 make no device faster"),
    "max_lanes": Between(1, 4096, "every image in progress keeps its latents and their history in memory"),
    "max_waiting": Between(1, 100_000),
    "max_prepares_per_tick": Between(1, 1024),
    "max_decodes_per_tick": Between(1, 1024),
    "decode_tile_px": Between(0, 1 << 16),
    "slo_scale": Between(1.0, 1e6, "it is a multiple of the time that a request takes alone"),
    "kv_pool_bytes": Between(1, 1 << 42),
    "result_cache_bytes": Between(0, 1 << 42),
    "latent_cache_bytes": Between(0, 1 << 42),
    "lora_bytes": Between(0, 1 << 42),
    "controlnet_bytes": Between(0, 1 << 42),
    "reference_bytes": Between(0, 1 << 42),
    "activation_bytes": Between(1, 1 << 42),
    "threads": Between(1, 1024),
}
ENGINE_CHOICES = {"offload": OFFLOADS, "device_map": DEVICE_MAPS, "policy": POLICIES}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduling, memory and compiled calls: the ``[engine]`` table.

    Every value is literal; ``"auto"`` and ``None`` are resolved at start and reported.

    max_rows               UNet rows (latents) in one tick; ``None``: the knee of the measured cost curve, at most 16 on
                           a CPU and 32 on other devices
    deterministic          True: an image's bytes do not depend on other requests; False: they may differ by rounding
                           (see ``Engine.tolerance``); "auto": True on a CPU, where it costs very little
    max_lanes              images in progress at once, running or preempted between two steps. One additional lane, and
                           another for every eight, is reserved for clients that have no image in progress
    max_waiting            requests that may wait for a lane; more raise :class:`~diffserve.api.errors.QueueFull`
    max_prepares_per_tick  new requests whose text and init image are encoded in one tick; bounds the delay of the
                           others
    max_decodes_per_tick   finished latents decoded to images in one tick
    decode_tile_px         images with a longer side are decoded in tiles of this size in pixels, blended at their
                           borders; 0: in one piece if memory allows
    policy                 the order in which requests run (see :mod:`diffserve.engine.image.policy`): "latency",
                           "throughput" or "goodput"
    slo_scale              for "goodput": a request should finish within this many times the time that it takes alone
    kv_pool_bytes          size of the page pool of keys and values, shared with the language model; ``None``: room for
                           64 different prompts of one window, and for the language model
    result_cache_bytes     cache of finished images. A request with a seed whose image is cached, or is being generated
                           for an equal request, reuses it. Shared by all clients; 0: off
    noise_source           for requests that do not set it: "cpu": each image draws from its own torch generator on the
                           CPU, as in diffusers; "device": the numbers of a CUDA generator ("GPU" and "NV" in A1111), on
                           any device, for all rows of a tick at once. The same seed gives different images in the two
                           modes. Init images are encoded with CPU noise in both
    latent_cache_bytes     cache of finished latents: a request with a ``similarity_threshold`` stores its latents, and
                           starts from those of a similar prompt. Shared by all clients, so a client can detect which
                           prompts others have used; requests get a warning about this. 0: off, and such requests are
                           refused
    lora_bytes             memory for loaded LoRAs, in addition to those in use
    controlnet_bytes       memory for loaded ControlNets, limited by the free memory at start
    reference_bytes        memory for loaded IP-Adapters and their image encoders, likewise
    activation_bytes       memory for one network call in addition to the weights: limits rows, makes the VAE decode in
                           tiles, and refuses sizes that do not fit even then; ``None``: the free memory
    threads                CPU threads of a UNet call; ``None``: the fastest of torch's default and lower counts,
                           measured repeatedly
    offload                where the weights of every model are kept while their layer does not run: "none": on the
                           device; "cpu": in main memory; "disk": in their files; "auto": on the device as far as it has
                           room
    device_map             one model over all GPUs: "balanced": the UNet on the first, text encoders and VAE where the
                           most memory is free; "auto": the same if the first GPU is too small for all. A UNet too large
                           for one GPU is split; it is then not compiled and cannot use DeepCache. "none": one device
    compile                "off": never compile the UNet; "warm": use packages made by ``diffserve warm``; "auto": like
                           "warm", and in addition ``diffserve serve`` compiles a small model on a CPU for its native
                           size before it reports ready, and a non-deterministic engine on CUDA compiles in the
                           background; "background": compile every shape in use, in a process of low priority
                           (deterministic engines treat it like "auto"). Compiling a small model on a CPU takes 15 times
                           the memory of the UNet's weights
    cuda_graphs            on CUDA: record UNet calls as CUDA graphs where launching takes most of their time, and
                           replay each with one launch
    memory_format          memory format of the UNet's convolutions on CUDA in 16 bits: "contiguous", "channels_last",
                           or "auto": the faster one, measured at the first start; in deterministic mode "auto" is
                           "contiguous"
    stage                  the part of an image that this process computes: "all", or in a cluster with separate stages
                           "encode" (rewriting and text encoding), "denoise" or "decode"; each loads only what it needs
    cache_dir              folder of measured costs and digests (see :mod:`diffserve.disk_cache`); "auto": the cache
                           folder of the user; "": none
    served_paths           not a configuration key: the UNet paths that a server has stored. ``None`` for an engine
                           without a server, which compiles nothing by itself in deterministic mode
    cross_attention        not a configuration key. "paged": keys and values of each prompt are computed once and kept
                           in the page pool, if the UNet allows it; "plain": diffusers' attention reads the embeddings
                           at every step, and there is no pool
    """

    max_rows: int | None = None
    deterministic: bool | Literal["auto"] = "auto"
    max_lanes: int = 64
    max_waiting: int = 256
    max_prepares_per_tick: int = 8
    max_decodes_per_tick: int = 4
    decode_tile_px: int = 0
    policy: str = "latency"
    slo_scale: float = 3.0
    kv_pool_bytes: int | None = None
    result_cache_bytes: int = 0
    noise_source: NoiseSource = "cpu"
    latent_cache_bytes: int = 0
    lora_bytes: int = 1 << 30
    controlnet_bytes: int = 1 << 32
    reference_bytes: int = 6 << 30
    activation_bytes: int | None = None
    threads: int | None = None
    offload: str = "none"
    device_map: str = "none"
    compile: Literal["auto", "off", "warm", "background"] = "auto"
    cuda_graphs: bool = True
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    stage: Literal["all", "encode", "denoise", "decode"] = "all"
    cache_dir: str = "auto"
    served_paths: tuple[UNetPath, ...] | None = None
    cross_attention: Literal["paged", "plain"] = "paged"

    def __post_init__(self) -> None:
        check_bounds(self, ENGINE_BOUNDS)
        for name, choices in ENGINE_CHOICES.items():
            _require_choice(name, getattr(self, name), choices)
        message = f"device_map is {self.device_map!r} and offload {self.offload!r}; give one of them."
        _require("none" in (self.device_map, self.offload), message, "device_map")


class TextSettings(TextConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The language model: the ``[text]`` table.

    model             "": no language model; "embedded": the rewriter that ships; else a directory in transformers
                      format
    draft_model       smaller model with the same vocabulary for speculative decoding; "": none
    dtype             of both models: auto, float32, bfloat16, float16, int8 or int4
    rewriter_style    name of a file in ``configs/rewriter/``; "auto": the style that suits the image model
    rewriter_entropy  mean entropy in nats per token above which a rewritten prompt counts as unsure; ``None``: as the
                      style says
    prompt_rewriter   default of image requests: "off", "auto" or "force" (accept unsure results, too)
    time_share        share of the time for texts while images run, too

    The remaining keys are those of :class:`~diffserve.api.text_types.TextConfig`.
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
        message = f"dtype is {self.dtype!r}; choose one of {', '.join(TEXT_DTYPES)}."
        _require(DTYPE_ALIASES.get(self.dtype, self.dtype) in TEXT_DTYPES, message, "dtype")
        _require(self.rewriter_style.strip(), "rewriter_style is empty; give auto or a style's name.", "rewriter_style")
        entropy, share = self.rewriter_entropy, self.time_share
        message = f"rewriter_entropy is {entropy}; it must be a positive number of nats, or auto."
        _require(entropy is None or (math.isfinite(entropy) and entropy > 0), message, "rewriter_entropy")
        message = f"time_share is {share}; it must lie between 0 and 1, so that images and texts both advance."
        _require(0.0 < share < 1.0, message, "time_share")


class HourlyPrice(NamedTuple):
    """Price of an hour of the device; ``currency`` is a code of three letters."""

    per_hour: float
    currency: str


SERVE_MINIMA = {
    "max_body_bytes": 1,
    "min_size_px": 1,
    "max_connections": 16,
    "url_pictures_bytes": 0,
    "files_bytes": 0,
    "history_bytes": 0,
    "user_images_per_day": 0,
    "user_device_seconds_per_day": 0,
}


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: the ``[serve]`` table. Units are in the names; ``configs/serve.toml`` describes every key.

    allow_open          accept other machines without any keys
    allowed_hosts       host names by which the server may be called; empty: its own names and every address; "*": any
    cors_origins        origins whose pages may call the API from a browser, such as https://app.example.org
    max_connections     open connections
    page                serve the web page at ``/``
    page_grace_s        seconds for which work of a closed page continues, in case the page is reloaded
    public_url          address at which clients see the server, for image URLs; "": as they call it
    url_pictures_bytes  size of all images kept for their URLs; 0: off
    files_bytes         storage of one key in ``/v1/files``
    history_days        days for which images are kept for their key; 0: off
    history_bytes       size of the history of all keys; the oldest images are deleted first
    unload_after_s      idle seconds after which a model is unloaded until its next request; 0: never
    devices             one engine on each, behind one server: "cuda:0", "cuda:1", ...; repeated "cpu" divides the
                        cores; empty: one engine on ``[model] device``
    spare_engine        keep a process ready with its libraries imported, so that a crashed engine is back sooner
    checkpoint_every_s  seconds between captures of the state of unfinished images, from which they continue if their
                        engine is lost; 0: off, and they start again at their first step
    hang_after_s        an engine is restarted if a tick takes longer than both this and ten usual ticks, or if the
                        engine does not respond for this long
    debug               serve ``/debug/trace``
    fetch_hosts         hosts from which images may be fetched by https URL, as HOST or HOST:PORT; empty: none
    webhook_hosts       hosts to which webhook events may be sent by https, likewise; empty: no webhooks
    upload_hosts        hosts to which results of jobs may be uploaded by https (presigned URLs), likewise; empty: none
    watermark           mark images invisibly as generated
    c2pa_certificate    PEM certificate chain for signing images (C2PA, extra "c2pa"); "": not signed
    c2pa_key            private key of the certificate; "": not signed
    safety_filter       checks prompts and images: "model" (``safety_checker`` of the first model), MODULE:FACTORY, or
                        "" (off)
    safety_timeout_s    an image that is not judged within this time is withheld
    max_backlog_s       seconds of waiting work per client, at the measured speed and in fair shares, above which
                        further requests are refused; the client's largest request does not count
    trusted_proxies     addresses of proxies whose X-Forwarded-For names the client
    trusted_user_header header in which these proxies name the user that they authenticated, such as X-Forwarded-User;
                        users need no key; "": none
    user_images_per_day images per UTC day for each of these users, unless `keys add --user` says otherwise; 0: no quota
    user_device_seconds_per_day
                        seconds of device time per UTC day for each of these users; 0: no quota
    price_per_hour      price of an hour of the device in ``currency``; answers then contain costs; 0: off
    """

    host: str
    port: int
    allow_open: bool
    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]
    max_connections: int
    data_dir: str
    max_body_bytes: int
    request_timeout_s: float
    startup_timeout_s: float
    shutdown_timeout_s: float
    hang_after_s: float
    checkpoint_every_s: float
    unload_after_s: float
    devices: tuple[str, ...]
    spare_engine: bool
    min_size_px: int
    max_size_px: int
    max_backlog_s: float
    trusted_proxies: tuple[str, ...]
    trusted_user_header: str
    user_images_per_day: int
    user_device_seconds_per_day: float
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
    webhook_hosts: tuple[str, ...]
    upload_hosts: tuple[str, ...]
    watermark: bool
    c2pa_certificate: str
    c2pa_key: str
    safety_filter: str
    safety_timeout_s: float
    price_per_hour: float
    currency: str

    def __post_init__(self) -> None:
        message = f"port is {self.port}; it must lie between 0 (any free port) and 65535."
        _require(0 <= self.port <= 65535, message, "port")
        _require(self.host.strip(), "host is empty; give 127.0.0.1, or 0.0.0.0 for every interface.", "host")
        for name, low in SERVE_MINIMA.items():
            _require_at_least(name, getattr(self, name), low)
        _require_at_least("max_size_px", self.max_size_px, self.min_size_px)
        message = f"history_days is {self.history_days}; it must lie between 0 (keep none) and 36500."
        _require(0.0 <= self.history_days <= 36_500.0, message, "history_days")
        price = self.price_per_hour
        message = f"price_per_hour is {price}; give the price of an hour of the device, or 0 for none."
        _require(math.isfinite(price) and 0.0 <= price <= MOST_PRICE_PER_HOUR, message, "price_per_hour")
        message = f"currency is {self.currency!r}; give three letters, such as EUR."
        _require(re.fullmatch("[A-Z]{3}", self.currency), message, "currency")
        for device in self.devices:
            self._check_device(device)
        message = f"public_url is {self.public_url[:80]!r}; write it as https://paint.example.org, or leave it empty."
        _require(not self.public_url or _PUBLIC_URL.fullmatch(self.public_url), message, "public_url")
        for origin in self.cors_origins:
            message = (
                f"cors_origins has {origin[:80]!r}; give each origin as a browser sends it, without a path: "
                "https://app.example.org, in lower case, with the port if it is not the default one."
            )
            _require(_ORIGIN.fullmatch(origin), message, "cors_origins")
        header = self.trusted_user_header
        message = f"trusted_user_header is {header[:80]!r}; give the name of a header, such as X-Forwarded-User."
        _require(not header or _HEADER.fullmatch(header), message, "trusted_user_header")
        message = "trusted_user_header is given without trusted_proxies; name the proxies that send it."
        _require(not header or self.trusted_proxies, message, "trusted_user_header")
        for name in ("fetch_hosts", "webhook_hosts", "upload_hosts"):
            for host in getattr(self, name):
                message = f"{name} has {host[:80]!r}; give exact names such as pictures.example.org, or NAME:PORT."
                _require(_OUTGOING_HOST.fullmatch(host), message, name)
        present = "c2pa_key" if self.c2pa_key else "c2pa_certificate"
        message = f"{present} is given alone; give c2pa_certificate and c2pa_key together, or neither."
        _require(bool(self.c2pa_certificate) is bool(self.c2pa_key), message, present)
        is_filter = self.safety_filter in ("", "model") or _FACTORY.fullmatch(self.safety_filter)
        message = f"safety_filter is {self.safety_filter[:80]!r}; give model, MODULE:FACTORY, or leave it empty."
        _require(is_filter, message, "safety_filter")
        for name in self.__struct_fields__:
            if name.endswith("_s"):
                value, may_be_never = getattr(self, name), name in ("unload_after_s", "checkpoint_every_s")
                never = ", or 0 for never" if may_be_never else ""
                message = f"{name} is {value}; it must be a positive number of seconds{never}."
                _require(math.isfinite(value) and (value > 0 or (may_be_never and value == 0)), message, name)

    def _check_device(self, device: str) -> None:
        message = (
            f"devices has {device[:40]!r}; name each as cpu, mps, cuda, cuda:N, xpu or xpu:N, with commas between them."
        )
        _require(_DEVICE.fullmatch(device), message, "devices")
        num_uses = [name.removesuffix(":0") for name in self.devices].count(device.removesuffix(":0"))
        message = f"devices has {device!r} twice; an engine takes a whole device, only cpu can be divided."
        _require(device == "cpu" or num_uses == 1, message, "devices")

    @property
    def price(self) -> HourlyPrice | None:
        """The price used to compute the cost of requests, or ``None`` if none is configured."""
        return HourlyPrice(self.price_per_hour, self.currency) if self.price_per_hour else None


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ``[store]`` table: where a server keeps keys, files, batches, history and usage.

    Attributes:
        url: Address of a PostgreSQL database, with its password if it needs one; "": an SQLite file in the data folder.
    """

    url: str

    def __post_init__(self) -> None:
        address = hide_password(self.url)[:80]
        advice = 'write it as postgresql://USER:PASSWORD@HOST:5432/NAME, or "" for an SQLite file in the data folder.'
        _require(not self.url or _STORE_URL.fullmatch(self.url), f"url is {address!r}; {advice}", "url")

    def __repr__(self) -> str:
        return f"StoreConfig(url={hide_password(self.url)!r})"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a process.

    Attributes:
        model: The main image model.
        engine: The ``[engine]`` table.
        text: The ``[text]`` table.
        serve: The ``[serve]`` table.
        store: The ``[store]`` table.
        origins: The place each value came from, by "table.key".
        models: Further models that a server may load (the ``[models]`` table and further ``--model`` options).
    """

    model: ModelProfile
    engine: EngineConfig
    text: TextSettings
    serve: ServeConfig
    store: StoreConfig
    origins: dict[str, str]
    models: tuple[ModelProfile, ...] = ()

    @property
    def has_default_data_dir(self) -> bool:
        """Whether the data folder is the built-in one, rather than chosen by the user."""
        return self.origins["serve.data_dir"] == "configs/serve.toml"


def replace_removed_dtype(dtype: str, where: str = "dtype") -> str:
    """Return ``dtype``, or bfloat16 for one of ``REMOVED_DTYPES``, with a warning that says ``where`` it was set."""
    if dtype not in REMOVED_DTYPES:
        return dtype
    logger.warning(
        "%s is %s, which was removed in 0.2; bfloat16 is used. Set bfloat16, or int8 where memory is short.",
        where,
        dtype,
    )
    return "bfloat16"


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require(ok: object, message: str, param: str) -> None:
    """Raise ConfigError with ``message`` about the key ``param`` unless ``ok`` is true."""
    if not ok:
        raise ConfigError(message, param=param)


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    _require(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}.", name)


def _require_at_least(name: str, number: int, low: int) -> None:
    _require(number >= low, f"{name} is {number}; it must be {low} or more.", name)
