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
#: Package -> the first version without what an advisory describes, and the advisory.
MENDED: Final = {
    "pillow": ("12.2", "CVE-2026-42308, an overflow in fonts"),
    "python-multipart": ("0.0.30", "CVE-2026-53539, quadratic time for forms"),
    "starlette": ("1.3.0", "CVE-2026-54282, a host of the client's choice; CVE-2025-62727, quadratic time for ranges"),
}
START_S: Final = 120.0
PAINT: Final = ("generate", "a red fox", "--model", "embedded-turbo", "--seed", "3", "-o", "fox.png")


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def floors() -> dict[str, str]:
    return dict(line.partition(";")[0].split(">=") for line in PYPROJECT["project"]["dependencies"])


def locked() -> dict[str, str]:
    """Package -> version on this platform, a local label such as +cpu left out."""
    found = {}
    for name, number, marker, hashes in re.findall(
        r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=\S+(?: \\)?\n)+)", LOCK, re.MULTILINE
    ):
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes.replace("\\", " ").split())
        if not marker or Marker(marker).evaluate():
            found[name] = number.partition("+")[0]
    return found


@pytest.mark.parametrize("name", MENDED)
def test_floor_is_not_below_what_an_advisory_names(name: str) -> None:
    mended, advisory = MENDED[name]
    assert Version(floors()[name]) >= Version(mended), advisory


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
    found = {}
    for name in pins:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            assert name not in floors()
    assert found == {name: pins[name] for name in found}


@pytest.mark.slow
def test_tasks_of_the_contributors_page_exist_and_run() -> None:
    tasks = PYPROJECT["tool"]["poe"]["tasks"]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bpoe ([a-z][a-z-]*)", page)) - {"alone"}
    assert {"lint", "format", "types", "test", "test-all", "house"} <= named == named & tasks.keys()
    command = [sys.executable, "-m", "poethepoet", "test", "tests/test_wait_policy.py", "-n", "0", "-q"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def fresh_environment(folder: Path) -> Path:
    """Its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    return folder / ("Scripts" if sys.platform == "win32" else "bin")


def install(commands: Path, *arguments: str | Path) -> None:
    done = subprocess.run(
        [commands / "python", "-m", "pip", "install", "-q", *arguments], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-2000:]


def paint_and_serve(commands: Path, folder: Path) -> None:
    """A picture from the shell; then a server with the page, a rewriter and another picture."""
    subprocess.run([commands / "diffserve", *PAINT], cwd=folder, check=True, timeout=300)
    with Image.open(folder / "fox.png") as image:
        assert image.size == (128, 128)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "serve.log").open("w") as log:
        env = {**os.environ, "DIFFSERVE_SERVE_DATA_DIR": str(folder / "data")}
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
    """Three and a half minutes. torch's own floor is not installed: on Linux its older wheels bring CUDA."""
    commands = fresh_environment(tmp_path / "venv")
    pins = {**floors(), "torch": constraints()["torch"]}
    file = tmp_path / "floors.txt"
    file.write_text("".join(f"{name}=={number}\n" for name, number in pins.items()), encoding="utf-8")
    install(commands, "-c", file, ROOT)
    paint_and_serve(commands, tmp_path)


@pytest.mark.network
@pytest.mark.timeout(2400)
def test_lock_installs_file_by_file_and_paints_and_serves(tmp_path: Path) -> None:
    commands = fresh_environment(tmp_path / "venv")
    install(commands, "--require-hashes", "-r", ROOT / "requirements.lock")
    install(commands, "--no-deps", ROOT)
    paint_and_serve(commands, tmp_path)
