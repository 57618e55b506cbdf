"""``diffserve doctor``: reports device, memory needs, model and the source of each setting."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.passwords import hide_password
from diffserve.cli.names import FIELDS
from diffserve.disk_cache import DiskCache
from diffserve.media.provenance import Marks
from diffserve.models.profiles import find_few_step
from diffserve.models.templates import WildcardChecker, Wildcards
from diffserve.rewriting import find_rewriter, load_style
from diffserve.rewriting.style import EMBEDDED
from diffserve.service.http.keys import ENV_KEY
from diffserve.service.models import image_capabilities
from diffserve.service.run import check_open, open_ring, open_store
from diffserve.service.safety import Safety
from diffserve.settings.config import AUTO_STYLE, EngineConfig, Settings
from diffserve.settings.layers import KEYS
from diffserve.store.database import FILE
from diffserve.store.errors import StoreError
from diffserve.store.unet_paths import UNetPathFile
from diffserve.version import __version__

if TYPE_CHECKING:
    from diffserve.runtime import DeviceChoice, DiffusionModel
    from diffserve.runtime.dry_run import GPU
    from diffserve.runtime.footprint import Footprint

EXIT_PROBLEM = 1
PROBE_BYTES = 1 << 16
ROWS = (1, 2, 8)
STEP_HEADINGS = ("rows", "TFLOP", "kernels", "activations", "at least")
LARGE_HEADINGS = ("part", "memory")
LIBRARIES = ("torch", "diffusers", "transformers", "torchao", "numpy")
STORE_KEYS = {"url": "store.url", "data_dir": "serve.data_dir"}
"""Keys that errors of the database are about, by the ``param`` of the error."""


def run(settings: Settings, gpu: str | None = None, large: tuple[int, int] | None = None, tile_px: int = 0) -> int:
    """Print the report on standard output and return the exit code: 0, or 1 if ``diffserve serve`` would not start.

    Errors in loading the image model are raised after the other sections.

    Args:
        settings: The settings to report.
        gpu: Name of a GPU in ``runtime.dry_run`` to estimate the minimum step time for.
        large: Width and height of an image whose memory is planned as well.
        tile_px: Side of the tiles of that image; 0: no tiles.

    Raises:
        DiffserveError: The GPU is unknown, the model cannot be loaded, or the image or its tiles do not fit.
    """
    from diffserve.runtime.dry_run import find_gpu

    roof = find_gpu(gpu) if gpu else None
    console = Console(highlight=False)
    _section(console, "diffserve", _versions())
    _section(console, "settings", _settings(settings), headings=("key", "value", "from"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from diffserve.runtime import choose_for, load_model
    from diffserve.runtime.footprint import footprint_of
    from diffserve.runtime.loading.family import location_of
    from diffserve.runtime.loading.library_imports import hushed
    from diffserve.runtime.loading.placement import with_spread

    folders = list(_folders(settings))
    profile, offload = settings.model, settings.engine.offload
    cache = DiskCache.at(settings.engine.cache_dir)
    choice = choose_for(profile.path, profile.device, profile.dtype, offload, cache)
    _section(console, "device", _device(choice))
    with hushed("diffserve"):  # the report contains these warnings
        footprint = footprint_of(profile.path, dtype=choice.dtype, config=settings.engine, profile=profile, rows=ROWS)
        choice = with_spread(choice, footprint.model.memory_report(), settings.engine.device_map)
        _section(
            console, "memory", _memory(footprint, choice, settings.engine), headings=("part", "parameters", "weights")
        )
        _section(console, f"one step at {_size(footprint)}", _steps(footprint, roof), headings=STEP_HEADINGS)
        if large is not None:
            title = f"an image of {large[0]}x{large[1]}"
            _section(console, title, _large_image(footprint, settings.engine, large, tile_px), headings=LARGE_HEADINGS)
        load = partial(load_model, device=profile.device, dtype=profile.dtype, offload=offload)
        model = load(profile.path, device_map=settings.engine.device_map, profile=profile, cache=cache)
    _section(console, "model", _model(model, location_of(profile.path)))
    _section(console, "files that requests can name", _files(model, settings), headings=("kind", "name", "status"))
    _section(console, "UNet calls", _unet_calls(model, settings))
    left = model.unquantized_layers()
    if left:
        _section(console, f"layers not in {choice.dtype}", ((line,) for line in left))
    _section(console, "folders", ((name, status) for name, status, _ in folders))
    reasons = list(_start_problems(settings))
    problems = [f"{name}: {status}" for name, status, is_writable in folders if not is_writable]
    problems += [reason.rstrip(".") for reason in reasons]
    console.print(f"\n{'; '.join(problems) or 'all is well'}.", markup=False, soft_wrap=True)
    return EXIT_PROBLEM if reasons else 0


def _start_problems(settings: Settings) -> Iterator[str]:
    """Yield the reasons for which ``diffserve serve`` would not start, apart from those of the image model."""
    for key, check_part in (
        ("text.model", _check_language_model),
        ("text.draft_model", _check_draft_model),
        ("text.rewriter_style", _check_style),
        ("serve.host", _check_access),
        ("serve.c2pa_certificate", lambda settings: Marks.of(settings.serve)),
        ("serve.safety_filter", _check_safety_filter),
        ("serve.devices", _check_devices),
    ):
        try:
            check_part(settings)
        except (DiffserveError, StoreError) as error:
            yield f"{STORE_KEYS.get(error.param or '', key)}: {error.message}"


def _check_language_model(settings: Settings) -> None:
    if settings.text.model not in ("", EMBEDDED):  # without the embedded one the server starts with a warning
        find_rewriter(settings.text.model)


def _check_draft_model(settings: Settings) -> None:
    if settings.text.model and settings.text.draft_model:
        find_rewriter(settings.text.draft_model)


def _check_style(settings: Settings) -> None:
    if settings.text.model and settings.text.rewriter_style != AUTO_STYLE:
        load_style(settings.text.rewriter_style)


def _check_access(settings: Settings) -> None:
    """Check that the server would not be open to other machines unintentionally. Raises ConfigError."""
    serve = settings.serve
    if settings.store.url or (Path(serve.data_dir).expanduser() / FILE).is_file():
        open_store(settings)
    else:
        open_ring(None, serve)
        if not os.environ.get(ENV_KEY):
            check_open(serve, None)


def _check_safety_filter(settings: Settings) -> None:
    with Safety.running(settings):
        pass


def _check_devices(settings: Settings) -> None:
    from diffserve.runtime import choose_for

    profile = settings.model
    for device in dict.fromkeys(settings.serve.devices):
        choose_for(profile.path, device, profile.dtype, settings.engine.offload)


def _versions() -> Iterable[tuple[str, str]]:
    yield "version", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _settings(settings: Settings) -> Iterable[tuple[str, str, str]]:
    for dotted in KEYS:
        table, key = dotted.split(".")
        value = getattr(getattr(settings, table), key)
        if key == "good_sizes":
            value = " ".join(f"{width}x{height}" for width, height in value)
        yield dotted, "auto" if value is None else hide_password(str(value)), settings.origins[dotted]


def _device(choice: DeviceChoice) -> Iterable[tuple[str, str]]:
    yield "device", str(choice.device)
    yield "precision", choice.dtype
    yield "reason", choice.reason


def _model(model: DiffusionModel, location: Path) -> Iterable[tuple[str, str]]:
    info = model.info
    yield "id", info.model_id
    yield "family", info.family + (" (inpainting)" if info.is_inpainting else "")
    yield "digest", info.digest
    yield "predicts", info.prediction_type
    if model.plausibility is not None:
        plausible = "" if model.plausibility.is_plausible else " (random, damaged or distilled weights)"
        yield "prediction check", f"{model.plausibility}{plausible}"
    yield "good sizes", " ".join(f"{width}x{height}" for width, height in info.good_sizes)
    yield "latents", f"{info.latent_channels} channels, {info.vae_factor} pixels per cell"
    yield "trained on", f"{info.train_timesteps} timesteps"
    few_step = find_few_step(location)
    if few_step is not None:
        yield "few steps", f"{few_step.kind}, recognized by {few_step.reason}: {few_step.defaults} unless set otherwise"
    if info.refiner:
        yield "refiner", info.refiner
    if info.scorer:
        yield "scorer", info.scorer
    if info.learnt_words:
        yield "learned words", ", ".join(info.learnt_words)
    for word, problem in info.refused_words.items():
        yield "skipped word", f"{word}: {problem}"


def _files(model: DiffusionModel, settings: Settings) -> Iterable[tuple[str, str, str]]:
    """Yield kind, name and status of each adapter, upscaler and file of wildcards."""
    capabilities, wildcards = image_capabilities(model.info, settings.serve), Wildcards(model.info.wildcard_dir)
    for kind in ("loras", "controlnets", "references", "upscalers"):
        names, refused = FIELDS[kind]
        yield from ((kind, name, "usable") for name in capabilities[names])
        yield from ((kind, name, f"refused: {reason}") for name, reason in capabilities[refused].items())
    checker = WildcardChecker(wildcards)
    for name in wildcards.names():
        try:
            checker.check(name)
            yield "wildcards", name, "usable"
        except InvalidRequest as error:
            yield "wildcards", name, f"refused: {error.message}"


def _unet_calls(model: DiffusionModel, settings: Settings) -> Iterable[tuple[str, str]]:
    """Yield how ``diffserve serve`` would run UNet calls, and why."""
    from diffserve.engine.image.compiled_groups import compiles_in_background
    from diffserve.engine.image.compiling import path_key
    from diffserve.runtime.unet.compiled import Packages

    config = settings.engine
    packages = Packages(model, DiskCache.at(config.cache_dir))
    graphs = config.cuda_graphs and model.device.type == "cuda"
    recorded = "used where launch overhead dominates"
    yield "CUDA graphs", recorded if graphs else "none: the device is not CUDA, or engine.cuda_graphs is false"
    if config.compile == "off":
        yield "compiled", "no: engine.compile is off"
        return
    if packages.reason:
        yield "compiled", f"no: {packages.reason}"
        return
    yield "compiler", packages.compiler_name
    if compiles_in_background(model, config):
        yield "compiled", "in the background, used where faster"
        return
    key = path_key(model, packages, config.compile)
    known_paths = UNetPathFile(Path(settings.serve.data_dir).expanduser()).paths()
    stored = [path for path in known_paths if path.key == key]
    for path in stored:
        yield f"{path.width_px}x{path.height_px}, {path.num_tokens} tokens", f"{path.path}: {path.reason} (stored)"
    if not stored and config.compile != "warm" and packages.is_by_openvino:
        yield "compiled", "by diffserve serve at start, for the native size"
    elif not stored:
        yield "compiled", "only shapes that diffserve warm has compiled"


def _folders(settings: Settings) -> Iterable[tuple[str, str, bool]]:
    """Yield name, status and whether files can be written, for every output folder."""
    cache = DiskCache.at(settings.engine.cache_dir).folder
    for name, folder in (("cache", cache), ("data", Path(settings.serve.data_dir).expanduser())):
        if folder is None:
            yield name, "none; nothing is stored", True
            continue
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(bytes(PROBE_BYTES))
            yield name, str(folder), True
        except OSError as error:
            yield name, f"{folder} cannot be written: {error.strerror}", False


def _memory(footprint: Footprint, choice: DeviceChoice, config: EngineConfig) -> Iterable[tuple[str, str, str]]:
    """Yield the memory of each part, estimated before the model is loaded."""
    from diffserve.runtime.memory import free_bytes

    entries = footprint.model.memory_report()
    for entry in entries:
        yield entry.component, f"{entry.num_parameters:,}", _mebibytes(entry.weights_bytes)
    yield "total", f"{sum(entry.num_parameters for entry in entries):,}", _mebibytes(footprint.weights_bytes)
    yield "page pool", "", _mebibytes(footprint.page_pool_bytes)
    yield "image cache", "", _mebibytes(config.result_cache_bytes)
    yield "latent cache", "", _mebibytes(config.latent_cache_bytes)
    yield "decoding an image", "", _mebibytes(footprint.decode.peak_bytes)
    if footprint.shallow is not None:
        yield "DeepCache features per row", "", _mebibytes(footprint.feature_bytes)
        yield "DeepCache activations per row", "", _mebibytes(footprint.shallow.peak_bytes)
    yield f"peak, {max(footprint.steps)} rows", "", _mebibytes(footprint.peak_bytes)
    spread = {} if choice.spread is None else choice.spread._asdict()
    for part, rooms in spread.items():
        for name, num_bytes in rooms:
            yield f"{part}, maximum on {name}", "", _mebibytes(num_bytes)
    for device in choice.devices:
        free = free_bytes(device)
        yield f"free on {device}", "", "unknown" if free is None else _mebibytes(free)


def _large_image(
    footprint: Footprint, config: EngineConfig, size: tuple[int, int], tile_px: int
) -> Iterable[tuple[str, str]]:
    """Yield the activations that an image of ``size`` needs, which come on top of weights and page pool."""
    from diffserve.api.types import DiffusionParams
    from diffserve.runtime.footprint import plan_large_image

    multiple = footprint.model.info.size_multiple_px
    for side in size:
        advice = f"--size is {size[0]}x{size[1]}; each side must be a multiple of {multiple} px."
        check(side > 0 and side % multiple == 0, advice, "--size")
    plan = plan_large_image(footprint.model, config, size, DiffusionParams(tile_size=tile_px))
    row = "row of the UNet"
    if plan.tiles is not None:
        yield "tiles", f"{plan.tiles.num_tiles} of {plan.tiles.tile_px[0]}x{plan.tiles.tile_px[1]}"
        row = "row of the UNet, one tile"
    yield row, _mebibytes(plan.row.peak_bytes)
    yield "decoding, whole", _mebibytes(plan.decode.peak_bytes)
    yield "decoding, smallest tiles", _mebibytes(plan.decode_tile.peak_bytes)
    yield "encoding a start image, whole", _mebibytes(plan.encode.peak_bytes)
    yield "encoding, smallest tiles", _mebibytes(plan.encode_tile.peak_bytes)
    base = footprint.weights_bytes + footprint.page_pool_bytes
    yield "least in all, from text", _mebibytes(base + plan.from_text_bytes)
    yield "least in all, from an image or with hires fix", _mebibytes(base + plan.from_image_bytes)


def _size(footprint: Footprint) -> str:
    width_px, height_px = footprint.model.info.good_sizes[0]
    return f"{width_px}x{height_px}"


def _steps(footprint: Footprint, roof: GPU | None) -> Iterable[tuple[str, str, str, str, str]]:
    """Yield the cost of a UNet call per number of rows; one image with guidance has two rows."""
    for rows, work in footprint.steps.items():
        minimum = f"{1e3 * roof.seconds(work, footprint.model.dtype):.2f} ms on {roof.name}" if roof else "see --gpu"
        yield (
            str(rows),
            f"{work.flops / 1e12:.3f}",
            str(len(work.kernels)),
            _mebibytes(work.peak_bytes),
            minimum,
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _section(console: Console, title: str, rows: Iterable[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
    """Print a title and aligned columns; numeric columns are right-aligned."""
    lines = [headings, *rows] if headings else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [">" if heading in ("parameters", "weights", *STEP_HEADINGS) else "<" for heading in headings or lines[0]]
    console.print(f"\n[bold]{title}[/bold]")
    for line in lines:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True))
        console.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
