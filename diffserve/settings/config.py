"""What can be set: the tables of the configuration, each value checked where it is made. ``settings`` reads them. No
torch."""

from __future__ import annotations

import logging
import math
import os
import re
from typing import Literal, NamedTuple

import msgspec

from diffserve.api.bounds import Between, check_bounds
from diffserve.api.errors import ConfigError
from diffserve.api.text_types import TextConfig
from diffserve.api.types import ModelProfile, NoiseSource, UNetPath

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
_FETCH_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.\-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?")
_DEVICE = re.compile(r"cpu|mps|(?:cuda|xpu)(?::[0-9]{1,3})?")
_FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

logger = logging.getLogger(__name__)

ENGINE_BOUNDS = {
    "max_rows": Between(2, 256, "a guided image needs 2 rows in one tick, and no device gains by hundreds"),
    "max_lanes": Between(1, 4096, "every image in flight keeps its latents and their history in memory"),
    "max_waiting": Between(1, 100_000),
    "max_prepares_per_tick": Between(1, 1024),
    "max_decodes_per_tick": Between(1, 1024),
    "decode_tile_px": Between(0, 1 << 16),
    "slo_scale": Between(1.0, 1e6, "it counts in times of what a request takes alone"),
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
    max_waiting            requests that may wait for a lane before :class:`~diffserve.api.errors.QueueFull`
    max_prepares_per_tick  newcomers whose text and init image are encoded in one tick, so that nobody stalls
    max_decodes_per_tick   finished latents turned into pictures in one tick
    decode_tile_px         pictures with a longer side are decoded in tiles of so many pixels along it, which fade into
                           each other; 0: all in one piece, as far as there is memory
    policy                 who runs next (see :mod:`diffserve.engine.image.policy`): "latency", "throughput" or
                           "goodput"
    slo_scale              a request should be done within so many times what it takes alone; "goodput" goes by it
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
    compile                "off": the UNet is never compiled; "warm": packages made by ``diffserve warm`` are used;
                           "auto": like "warm", and in addition ``diffserve serve`` compiles a small model on a CPU for
                           its native size before it reports ready, and an engine on CUDA that is not deterministic
                           compiles in the background; "background": compile every shape that is painted, in a process
                           of low priority (deterministic engines treat it like "auto"). Compiling a small model on a
                           CPU takes 15 times the memory of the UNet's weights
    cuda_graphs            on CUDA: record UNet calls as CUDA graphs where launching takes most of their time, and
                           replay each with one launch
    memory_format          of the UNet's convolutions on CUDA in 16 bits: "contiguous", "channels_last", or "auto": the
                           faster one, measured at the first start; in deterministic mode "auto" is "contiguous"
    stage                  what this process does of a picture: "all" of it, or in a cluster of stages apart "encode"
                           the texts (and rewrite them), "denoise", or "decode"; each loads only what it needs
    cache_dir              where costs and digests are kept between two starts (see :mod:`diffserve.disk_cache`);
                           "auto": the user's cache folder; "": nowhere
    served_paths           set by a server, not a configuration key: the UNet paths it has stored. ``None`` in engines
                           that belong to no server; these compile nothing by themselves in deterministic mode
    cross_attention        not a configuration key. "paged": the UNet's keys and values of each prompt are computed once
                           and kept in the page pool, if the UNet allows it; "plain": embeddings go through diffusers'
                           attention at every step, and there is no pool
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
        if self.offload not in OFFLOADS:
            raise ConfigError(f"offload is {self.offload!r}; choose one of {', '.join(OFFLOADS)}.", param="offload")
        if self.device_map not in DEVICE_MAPS:
            said = f"device_map is {self.device_map!r}; choose one of {', '.join(DEVICE_MAPS)}."
            raise ConfigError(said, param="device_map")
        if self.device_map != "none" and self.offload != "none":
            raise ConfigError(
                f"device_map is {self.device_map!r} and offload {self.offload!r}; give one of them.", param="device_map"
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

    The rest is :class:`~diffserve.api.text_types.TextConfig`.
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
    cors_origins        web origins whose pages may call the API from a browser, such as https://app.example.org
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
    cors_origins: tuple[str, ...]
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
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin[:80]!r}; give each origin as a browser sends it, without a path: "
                    "https://app.example.org, in lower case, with the port where it is not the usual one.",
                    param="cors_origins",
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
            raise ConfigError(
                f"devices has {device[:40]!r}; name each as cpu, mps, cuda, cuda:N, xpu or xpu:N, with commas between "
                "them.",
                param="devices",
            )
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
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at_least(low: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < low:
            raise ConfigError(f"{name} is {number}; it must be {low} or more.", param=name)
