"""``diffserve doctor``: what was found here, what each part needs, and where each setting comes from."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from diffserve.config import KEYS, Settings
from diffserve.disk_cache import DiskCache
from diffserve.version import __version__

if TYPE_CHECKING:
    from diffserve.runtime import DeviceChoice, DiffusionModel

PROBE_BYTES = 1 << 16
LIBRARIES = ("torch", "diffusers", "transformers", "torchao", "numpy")


def run(settings: Settings) -> int:
    """Print the report on standard output; a model that cannot be loaded is raised after everything else was said."""
    console = Console(highlight=False)
    _section(console, "diffserve", _versions())
    _section(console, "settings", _settings(settings), headings=("key", "value", "from"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from diffserve.runtime import choose_device, load_model
    from diffserve.runtime.loading.library_imports import hushed

    folders = list(_folders(settings))
    profile, offload = settings.model, settings.engine.offload
    _section(console, "device", _device(choose_device(profile.device, profile.dtype, offload)))
    with hushed("diffserve"):  # what it would warn of is in the report
        model = load_model(profile.path, device=profile.device, dtype=profile.dtype, offload=offload, profile=profile)
    _section(console, "model", _model(model))
    _section(console, "memory", _memory(model), headings=("part", "parameters", "weights"))
    _section(console, "folders", ((name, said) for name, said, _ in folders))
    ailing = [f"{name}: {said}" for name, said, is_well in folders if not is_well]
    console.print(f"\n{'; '.join(ailing) or 'all is well'}.", markup=False, soft_wrap=True)
    return 0


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
        yield dotted, "auto" if value is None else str(value), settings.origins[dotted]


def _device(choice: DeviceChoice) -> Iterable[tuple[str, str]]:
    yield "device", str(choice.device)
    yield "precision", choice.dtype
    yield "because", choice.reason


def _model(model: DiffusionModel) -> Iterable[tuple[str, str]]:
    info = model.info
    yield "id", info.model_id
    yield "family", info.family + (" (inpainting)" if info.is_inpainting else "")
    yield "digest", info.digest
    yield "predicts", info.prediction_type
    if model.plausibility is not None:
        plausible = "" if model.plausibility.is_plausible else " (random, damaged or distilled weights)"
        yield "error read as", f"{model.plausibility}{plausible}"
    yield "good sizes", " ".join(f"{width}x{height}" for width, height in info.good_sizes)
    yield "latents", f"{info.latent_channels} channels, {info.vae_factor} pixels a cell"
    yield "trained on", f"{info.train_timesteps} timesteps"


def _folders(settings: Settings) -> Iterable[tuple[str, str, bool]]:
    """Name, what is to be said, and whether files can be written there, of every folder that is written to."""
    cache = DiskCache.at(settings.engine.cache_dir).folder
    for name, folder in (("cache", cache), ("pictures", Path(settings.serve.data_dir).expanduser())):
        if folder is None:
            yield name, "none; nothing is kept", True
            continue
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(PROBE_BYTES))
            yield name, str(folder), True
        except OSError as error:
            yield name, f"{folder} cannot be written: {error.strerror}", False


def _memory(model: DiffusionModel) -> Iterable[tuple[str, str, str]]:
    entries = model.memory_report()
    for entry in entries:
        yield entry.component, f"{entry.num_parameters:,}", _mebibytes(entry.weights_bytes)
    yield (
        "together",
        f"{sum(entry.num_parameters for entry in entries):,}",
        _mebibytes(sum(entry.weights_bytes for entry in entries)),
    )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _section(console: Console, title: str, rows: Iterable[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
    """A title and aligned columns; numbers of parameters and bytes stand to the right."""
    lines = [headings, *rows] if headings else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [">" if heading in ("parameters", "weights") else "<" for heading in headings or lines[0]]
    console.print(f"\n[bold]{title}[/bold]")
    for line in lines:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True))
        console.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
