"""Provenance of results: versions, machine and model, without any local paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from diffserve.api.types import ModelInfo
from diffserve.version import __version__

LIBRARIES = ("torch", "torchmetrics", "diffusers", "transformers", "numpy", "matplotlib")


def versions() -> dict[str, str]:
    """Return the versions of this package, Python and the libraries that results depend on."""
    versions_by_name = {"diffserve": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions_by_name[name] = "not installed"
    return versions_by_name


def machine() -> dict[str, Any]:
    """Return the CPU model, core count, operating system and current load average."""
    load = [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system(), "load_average": load}


def model(info: ModelInfo, *, is_deterministic: bool) -> dict[str, Any]:
    """Describe the model: weights digest, precision, device and defaults."""
    return {
        "id": Path(info.model_id).name,
        "family": info.family,
        "digest": info.digest,
        "parameters": info.num_parameters,
        "device": info.device,
        "dtype": info.dtype,
        "chosen_because": info.choice_reason,
        "default_spacing": info.default_spacing,
        "size": list(info.good_sizes[0]),
        "bytes_independent_of_batch": is_deterministic,
    }


def now() -> str:
    """Return the current UTC time in ISO format with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
