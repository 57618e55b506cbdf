"""What is shipped: three packages, the configuration files, the weights, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import diffserve

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"bench", "c2pa", "cluster", "mcp", "otel", "postgresql", "test", "dev", "docs"}
WEIGHTS_LIMIT_BYTES = 60_000_000  # of all models together, in 16 bits
TRACKED_LIMIT_BYTES = 60 << 20
"""The checkout is carried to machines without a network, with the wheels they lack, in at most 64 MiB."""


def tracked(*places: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a git checkout says which files are tracked")
def test_tracked_files_stay_under_60_mebibytes() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked()}
    largest = sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:20]
    assert sum(sizes.values()) < TRACKED_LIMIT_BYTES, f"the largest files: {largest}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Names and sizes in the built wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


@pytest.mark.slow
def test_wheel_ships_exactly_the_three_packages(wheel: dict[str, int]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"diffserve", "schedulers", "ui", f"diffserve-{diffserve.__version__}.dist-info"}


@pytest.mark.slow
def test_wheel_ships_every_tracked_file_of_the_packages_and_the_configs(wheel: dict[str, int]) -> None:
    expected = tracked("diffserve", "schedulers", "ui") | {f"diffserve/{name}" for name in tracked("configs")}
    assert expected <= set(wheel)
    modules = {name for name in wheel if name.endswith(".py")}
    assert modules <= expected | {name for name in modules if (ROOT / name).is_file()}


@pytest.mark.slow
def test_wheel_ships_all_weights_within_sixty_megabytes(wheel: dict[str, int]) -> None:
    rooms = tuple(f"diffserve/embedded/{room}/" for room in ("weights", "turbo", "rewriter"))
    weights = {name: size for name, size in wheel.items() if name.startswith(rooms)}
    for part in ("unet", "vae", "text_encoder"):
        assert any(name.startswith(f"diffserve/embedded/weights/{part}/") for name in weights)
    assert 0 < sum(weights.values()) <= WEIGHTS_LIMIT_BYTES


@pytest.mark.slow
def test_wheel_says_that_it_is_typed_and_under_which_licence(wheel: dict[str, int]) -> None:
    assert {"diffserve/py.typed", "schedulers/py.typed", "ui/py.typed"} <= set(wheel)
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)


def test_version_is_stated_once_in_each_place() -> None:
    assert PROJECT["version"] == diffserve.__version__


def test_extras_are_the_ones_we_speak_of() -> None:
    assert set(PROJECT["optional-dependencies"]) == EXTRAS


def test_every_dependency_that_is_tested_has_an_exact_version_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0])
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0] for pin in pins}
    requirements = [*PROJECT["dependencies"]]
    for extra in EXTRAS - {"bench"}:
        requirements += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[\[>=<]", line)[0] for line in requirements} - {"diffserve"}
    assert names <= pinned


def test_package_offers_what_it_says_and_loads_it_on_first_use() -> None:
    assert diffserve.__all__ == sorted(diffserve.__all__)
    for name in diffserve.__all__:
        assert getattr(diffserve, name) is not None
    assert set(diffserve.__all__) <= set(dir(diffserve))
    with pytest.raises(AttributeError, match=f"it offers {', '.join(diffserve.__all__)}"):
        _ = diffserve.Enigne


@pytest.mark.parametrize("name", ["diffserve", "schedulers", "ui"])
def test_public_package_has_a_docstring_and_sorted_names(name: str) -> None:
    module = import_module(name)
    assert module.__doc__
    constants = [public for public in module.__all__ if public.isupper()]
    lowercase_names = [public for public in module.__all__ if not public.isupper()]
    assert module.__all__ == sorted(constants) + sorted(lowercase_names)


def test_licence_is_apache_in_full() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
