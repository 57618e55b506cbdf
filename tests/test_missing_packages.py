"""Commands and tests on a machine that lacks packages: only the features that need a missing package are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.missing_packages import ROOT, environment_without

WEB: Final = ("fastapi", "pydantic", "starlette", "uvicorn", "python_multipart", "multipart", "gradio", "gradio_client")
FEATURES: Final = ("llguidance", "openvino", "torchao", "torchmetrics", "matplotlib", "scipy", "ray", "mcp", "c2pa")
TESTING: Final = (
    *("axe_playwright_python", "hypothesis", "jsonschema", "openai", "peft", "playwright", "schemathesis", "webuiapi"),
    *("cryptography", "opentelemetry"),
)
GPU_MACHINE: Final = (*WEB, *FEATURES, *TESTING)
"""Packages that the tests for a GPU must do without."""

GENERATE: Final = """
from diffserve.engine import Engine
from diffserve.api.types import DiffusionParams, GenerationRequest
engine = Engine.from_pretrained("embedded")
[result] = engine.generate(GenerationRequest(prompt="a fox", diffusion=DiffusionParams(num_steps=2)))
print(result.picture.width_px, result.picture.height_px, len(set(result.picture.data)) > 20)
"""


def run_python(*arguments: object, missing: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` in the root folder, without the packages ``missing``, and not as CI."""
    environment = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # entry points of missing packages would still be found
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment | environment_without(missing, folder),
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("-m", "gpu"), ("tests/engine", "tests/runtime", "tests/schedulers")],
    ids=["gpu", "engine-runtime-schedulers"],
)
def test_tests_are_collected_without_the_packages_that_a_gpu_machine_lacks(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    plugins = ("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    command = ("-m", "pytest", *plugins, "--collect-only", "-q", "-n", "0", *arguments)
    done = run_python(*command, missing=GPU_MACHINE, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "tests/engine/test_graphs.py::" in done.stdout


@pytest.mark.slow
def test_images_and_prompts_are_generated_without_packages_of_other_features(tmp_path: Path) -> None:
    done = run_python("-c", GENERATE, missing=GPU_MACHINE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "128 128 True\n"
    missing = tuple(name for name in GPU_MACHINE if name != "pydantic")  # which typer needs from version 0.29 on
    image = tmp_path / "fox.png"
    command = ("-m", "diffserve", "generate", "a fox", "--model", "embedded-turbo", "--steps", "1", "-o", image)
    done = run_python(*command, missing=missing, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    done = run_python("-m", "diffserve", "rewrite", "a fox", missing=missing, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fox" in done.stdout


def test_a_command_names_the_package_that_it_needs(tmp_path: Path) -> None:
    done = run_python("-m", "diffserve", "serve", "--model", "embedded", missing=("uvicorn",), folder=tmp_path)
    assert done.returncode == 2
    assert "needs the Python package uvicorn" in done.stderr
    assert "Traceback" not in done.stderr
