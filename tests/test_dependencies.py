"""Versions: floors that hold, a lock with hashes that agrees with the constraints and with what is installed, tasks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import pytest
from packaging.markers import Marker
from packaging.version import Version
from PIL import Image

ROOT: Final = Path(__file__).resolve().parent.parent
PYPROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK: Final = (ROOT / "requirements.lock").read_text(encoding="utf-8")
#: Package, the first version that an advisory calls fixed, and the advisory. Packages that read what a network sends.
FIXED: Final = (
    ("aiohttp", "3.13.4", "CVE-2026-34525, several Host headers"),
    ("aiohttp", "3.14.1", "PYSEC-2026-2112, cookies of one host sent to others"),
    ("cryptography", "44.0.1", "CVE-2024-12797, a vulnerable OpenSSL in the wheels"),
    ("fastapi", "0.109.1", "CVE-2024-24762, exponential time for a content type"),
    ("gradio", "6.7.0", "CVE-2026-28414, files read by an absolute path"),
    ("gradio", "6.15.0", "CVE-2026-48545, cookies shared between users of the proxy"),
    ("gradio", "6.20.0", "CVE-2026-59806, redirects and requests to any address"),
    ("h11", "0.16.0", "CVE-2025-43859, request smuggling"),
    ("httpx", "0.23.0", "CVE-2021-41945, an address that is read as another"),
    ("idna", "3.7", "CVE-2024-3651, quadratic time for a host name"),
    ("jinja2", "3.1.6", "CVE-2025-27516, a way out of the sandbox"),
    ("mcp", "1.23.0", "CVE-2025-66416, DNS rebinding"),
    ("pillow", "12.2.0", "CVE-2026-42308, an overflow in fonts"),
    ("pillow", "12.3.0", "CVE-2026-59199, a write outside of the heap in crop and paste"),
    ("pyasn1", "0.6.4", "CVE-2026-59885, quadratic time for identifiers"),
    ("pydantic", "2.4.0", "CVE-2024-3772, quadratic time for an address"),
    ("python-multipart", "0.0.26", "CVE-2026-40347, a preamble of any length"),
    ("python-multipart", "0.0.30", "CVE-2026-53539, quadratic time for forms"),
    ("ray", "2.52.0", "CVE-2025-62593, code by DNS rebinding"),
    ("requests", "2.32.4", "CVE-2024-47081, credentials sent to another host"),
    ("starlette", "0.49.1", "CVE-2025-62727, quadratic time for ranges"),
    ("starlette", "1.0.1", "CVE-2026-48710, a Host header that changes the path"),
    ("starlette", "1.3.0", "CVE-2026-54282, a path that changes the host"),
    ("torch", "2.6.0", "CVE-2025-32434, code in weights that are loaded with weights_only"),
    ("urllib3", "2.6.3", "CVE-2026-21441, decompression without a bound"),
    ("uvicorn", "0.11.7", "CVE-2020-7695, response splitting"),
)
START_S: Final = 120.0
COMPILE: Final = """
import sys
from pathlib import Path
import torch
from diffserve.disk_cache import DiskCache
from diffserve.runtime import load_model
from diffserve.runtime.unet import compiled
from diffserve.runtime.unet.compiled import FlatUNet, Packages
from diffserve.runtime.unet.random_rows import random_call
from tests.tiny_models import ONE_LEVEL, save_model
folder = Path(sys.argv[1])
model = load_model(save_model(ONE_LEVEL, folder / "model"), dtype="float32", device="cpu")
compiled.openvino_version = lambda: None
call = random_call(model, (64, 64, 77), 2)
for compiled.MOST_BAKED_BYTES in (1 << 27, 0):
    packages = Packages(model, DiskCache(folder))
    with torch.no_grad():
        package = packages.load(packages.compile(call), 2)
        expected = FlatUNet(model.unet.network, call)(*call.tensors)
    assert torch.allclose(package(call.tensors), expected, rtol=1e-3, atol=1e-4)
    print(torch.__version__.partition("+")[0], packages.is_baked)
"""
"""Compiles a tiny UNet with AOTInductor, its weights in the package and then not, and compares the results."""
PAINT: Final = ("generate", "a red fox", "--model", "embedded-turbo", "--seed", "3", "-o", "fox.png")


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def floors(*, with_extras: bool = False) -> dict[str, str]:
    """Package -> floor of the dependencies, and of every extra."""
    extras = PYPROJECT["project"]["optional-dependencies"].values() if with_extras else ()
    lines = [*PYPROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    pairs = (re.split("[;,]", re.sub(r"\[.*?\]", "", line))[0].split(">=") for line in lines if ">=" in line)
    return dict(pair for pair in pairs if len(pair) == 2)


def locked() -> dict[str, str]:
    """Package -> version on this platform, a local label such as +cpu left out."""
    versions = {}
    for name, number, marker, hashes in re.findall(
        r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=\S+(?: \\)?\n)+)", LOCK, re.MULTILINE
    ):
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes.replace("\\", " ").split())
        if not marker or Marker(marker).evaluate():
            versions[name] = number.partition("+")[0]
    return versions


@pytest.mark.parametrize(
    ("name", "fixed", "advisory"), FIXED, ids=[advisory.partition(",")[0] for *_, advisory in FIXED]
)
def test_no_floor_and_no_pin_is_below_the_fixed_version_of_an_advisory(name: str, fixed: str, advisory: str) -> None:
    versions = {"floor": floors(with_extras=True).get(name), "pin": constraints()[name], "lock": locked()[name]}
    for kind, version_ in versions.items():  # what is not asked for by itself has no floor
        assert version_ is None or Version(version_) >= Version(fixed), f"the {kind} of {name}: {advisory}"


def test_every_dependency_that_a_network_reaches_has_a_floor_in_the_table() -> None:
    network = {"fastapi", "gradio", "h11", "httpx", "mcp", "pillow", "pydantic", "python-multipart", "ray", "starlette"}
    assert network <= floors(with_extras=True).keys() & {name for name, *_ in FIXED}


def test_floors_are_not_above_what_is_tested() -> None:
    pins = constraints()
    assert all(Version(floor) <= Version(pins[name]) for name, floor in floors().items())


def test_lock_has_the_constraints_with_hashes_and_names_no_host() -> None:
    assert locked() == constraints()
    assert len(re.findall(r"^[a-z0-9-]+==", LOCK, re.MULTILINE)) >= len(constraints())
    assert "://" not in LOCK


def test_what_is_installed_is_what_is_locked() -> None:
    pins = constraints()
    if version("torch").partition("+")[0] != pins["torch"]:
        pytest.skip("another set than the tested one is installed")
    versions = {}
    for name in pins:
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            assert name not in floors()
    assert versions == {name: pins[name] for name in versions}


@pytest.mark.slow
def test_tasks_of_the_contributors_page_exist_and_run() -> None:
    tasks = PYPROJECT["tool"]["poe"]["tasks"]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    task_names = set(re.findall(r"\bpoe ([a-z][a-z-]*)", page)) - {"alone"}
    assert {"lint", "format", "types", "test", "test-all"} <= task_names == task_names & tasks.keys()
    command = [sys.executable, "-m", "poethepoet", "test", "tests/test_wait_policy.py", "-n", "0", "-q"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def fresh_environment(folder: Path) -> Path:
    """Create an environment with the package; return its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    return folder / ("Scripts" if sys.platform == "win32" else "bin")


def install(commands: Path, *arguments: str | Path) -> None:
    done = subprocess.run(
        [commands / "python", "-m", "pip", "install", "-q", *arguments], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def paint_and_serve(commands: Path, folder: Path) -> None:
    """Generate an image from the shell; then start a server with the page and a rewriter, and generate another."""
    subprocess.run([commands / "diffserve", *PAINT], cwd=folder, check=True, timeout=300)
    with Image.open(folder / "fox.png") as image:
        assert image.size == (128, 128)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "serve.log").open("w") as log:
        # a cache of its own: a server builds packages, which other tests of this run would use
        environment = {"DIFFSERVE_SERVE_DATA_DIR": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
        env = {**os.environ, **environment}
        command = [str(commands / "diffserve"), "serve", "--port", origin[-5:]]
        server = subprocess.Popen(command, cwd=folder, stderr=log, env=env)
        try:
            wait_until_ready(origin, server)
            assert b"gradio" in fetch(f"{origin}/")
            assert b"two dogs on the beach" in fetch(
                f"{origin}/v1/prompts/rewrite", b'{"prompt": "2 doggos on teh beach"}'
            )
            assert b"b64_json" in fetch(
                f"{origin}/v1/images/generations", b'{"prompt": "a fox", "num_inference_steps": 4}'
            )
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0


def wait_until_ready(origin: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended before it was ready"
        try:
            fetch(f"{origin}/readyz")
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"not ready after {START_S} s")


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


@pytest.mark.network
@pytest.mark.timeout(2400)
def test_every_floor_paints_and_serves(tmp_path: Path) -> None:
    """Three and a half minutes. The lowest torch has a test of its own: on Linux its wheel brings CUDA."""
    commands = fresh_environment(tmp_path / "venv")
    pins = {**floors(), "torch": constraints()["torch"]}
    file = tmp_path / "floors.txt"
    file.write_text("".join(f"{name}=={number}\n" for name, number in pins.items()), encoding="utf-8")
    install(commands, "-c", file, ROOT)
    paint_and_serve(commands, tmp_path)


@pytest.mark.network
@pytest.mark.timeout(4800)
def test_the_lowest_torch_compiles_a_unet(tmp_path: Path) -> None:
    """Downloads 3 GB and needs 6 GB of disk; ten minutes or more, most of them for unpacking."""
    commands = fresh_environment(tmp_path / "venv")
    file = tmp_path / "floors.txt"
    file.write_text(f"torch=={floors()['torch']}\n", encoding="utf-8")
    install(commands, "-c", file, "torch", "accelerate", "cachetools", "diffusers", "msgspec", "pillow", "transformers")
    done = subprocess.run(
        [commands / "python", "-c", COMPILE, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [(Version(number), is_baked) for number, is_baked in compiled] == [
        (Version(floors()["torch"]), "True"),
        (Version(floors()["torch"]), "False"),
    ]


@pytest.mark.network
@pytest.mark.timeout(2400)
def test_lock_installs_file_by_file_and_paints_and_serves(tmp_path: Path) -> None:
    commands = fresh_environment(tmp_path / "venv")
    install(commands, "--require-hashes", "-r", ROOT / "requirements.lock")
    install(commands, "--no-deps", ROOT)
    paint_and_serve(commands, tmp_path)
