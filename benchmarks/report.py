"""Benchmark documents: hardware, versions, command and figures in one JSON file, rewritten after every point."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import ModelInfo

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = Path(__file__).resolve().parent.parent


def hardware(device: str) -> dict[str, Any]:
    """Describe the hardware of the measurement, including the absence of a GPU."""
    description: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "gpu": None,
        "note": "no GPU on this machine: CPU figures only" if not torch.cuda.is_available() else None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        description["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "used": "cuda" in device,
        }
    return description


def versions() -> dict[str, str]:
    """Return the versions of Python and the main libraries, and of installed peers."""
    names = ("torch", "diffusers", "transformers", "numpy", "diffserve")
    peers = [name for name in ("openvino", "onnxruntime") if importlib.util.find_spec(name)]
    installed = {"python": platform.python_version()}
    for name in (*names, *peers):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "source tree"
    return installed


def head(benchmark: str, name: str, info: ModelInfo | LanguageModelInfo) -> dict[str, Any]:
    """Return the head of a document; ``name`` is the model's name in the request."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_plain(sys.argv[1:])]),
        "commit": _commit(),
        "hardware": hardware(info.device),
        "versions": versions(),
        "model": {
            "id": name,
            "digest": info.digest,
            "num_parameters": info.num_parameters,
            "dtype": info.dtype,
            "device": info.device,
            "chosen_because": info.choice_reason,
        },
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def write(document: dict[str, Any], path: Path) -> None:
    """Replace the document on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def default_path(document: dict[str, Any]) -> Path:
    """Return ``results/<benchmark>-<model>-<device>-<dtype>-<date>.json``."""
    model = document["model"]
    day = document["date"][:10]
    device = str(model["device"]).replace(":", "")
    return RESULTS / f"{document['benchmark']}-{model['id']}-{device}-{model['dtype']}-{day}.json"


def _plain(arguments: Sequence[str]) -> list[str]:
    """Strip the directories from paths, so that results contain no local paths."""
    return [Path(argument).name if "/" in argument else argument for argument in arguments]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
