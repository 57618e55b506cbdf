"""Everything the README says is done here: its commands, its snippets, its table, its tree."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffserve.config import load_settings
from schedulers import SAMPLERS, SIGMA_SCHEDULES, SPACINGS
from tests import house
from tests.readme import README, ROOT, blocks, command

START_S = 120.0
STEP_S = 0.1
FRESH = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt "


def here(line: str) -> list[str]:
    """A README command as this interpreter runs it, without the README's virtual environment."""
    words = shlex.split(line)
    assert words[0].startswith(".venv/bin/")
    name = words[0].removeprefix(".venv/bin/")
    if name == "diffserve":
        return [sys.executable, "-m", "diffserve", *words[1:]]
    assert name == "python"
    return [sys.executable, *words[1:]]


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def other_commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    return [line for line in lines if not line.startswith("python3 -m venv")]


def test_first_command_is_one_line_from_nothing_to_a_picture() -> None:
    line = command("paint")
    assert line.startswith(f"{FRESH}. && .venv/bin/diffserve generate ")
    assert '"a fox next to a cactus on the beach"' in line


def test_second_command_is_one_line_from_nothing_to_passed_tests() -> None:
    assert command("test") == f'{FRESH}-e ".[test]" && .venv/bin/pytest'


@pytest.mark.slow
def test_first_command_paints_the_fox_and_the_cactus(tmp_path: Path) -> None:
    from diffserve.world.checker import read_picture

    output = run(here(command("paint").split(" && ")[-1]), tmp_path)
    assert output.startswith("fox.png  seed ")
    with Image.open(tmp_path / "fox.png") as image:
        assert "parameters" in image.info
        reading = read_picture(np.asarray(image.convert("RGB")))
    assert reading.background == "beach"
    assert sorted(found.name for found in reading.objects) == ["cactus", "fox"]


@pytest.mark.network  # .ci/run does the same
@pytest.mark.timeout(1800)
def test_first_command_works_word_by_word_in_an_empty_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=120)
    subprocess.run(["bash", "-euo", "pipefail", "-c", command("paint")], cwd=clone, check=True, timeout=1700)
    with Image.open(clone / "fox.png") as image:
        assert image.size == (128, 128)


@pytest.mark.slow
def test_command_line_examples_work_in_their_order(tmp_path: Path) -> None:
    long_runs = (" serve", " sweep ", "benchmarks/")
    lines = [line for line in other_commands() if not any(word in line for word in long_runs)]
    assert len(lines) == 4
    output = {line.split()[1]: run(here(line), tmp_path) for line in lines}
    assert all(output.values())
    assert output["rewrite"] == "two dogs on the beach\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crown-1.png", "crown-2.png", "owl.png"]
    with Image.open(tmp_path / "crown-1.png") as image:
        assert image.size == (192, 128)


@pytest.mark.slow
def test_benchmark_command_explains_itself() -> None:
    (line,) = [line for line in other_commands() if "benchmarks/" in line]
    output = run(here(line), ROOT)
    for word in ("--device", "--dtype", "--model", "sdxl-random"):
        assert word in output


RUN_EACH = """
import contextlib, os, pathlib, runpy, sys
for script in map(pathlib.Path, sys.argv[1:]):
    folder = pathlib.Path.cwd() / script.stem
    folder.mkdir()
    with contextlib.chdir(folder), open(f"{folder}.out", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
"""
"""Every script in a folder of its own, what it prints beside it; a warning is an error. One process imports once."""


@pytest.mark.slow
def test_python_examples_paint_what_they_say(tmp_path: Path) -> None:
    files = {
        "readme-0": {"fox.png"},
        "readme-1": set(),
        "paint": {"a-penguin.png", "a-castle-at-night.png", "two-apples.png"},
        "previews": {"fox.png", *(f"preview-{step:02d}.png" for step in (5, 10, 15, 20))},
        "rewrite_and_paint": {"dogs.png"},
    }
    snippets = [block.text for block in blocks("python") if "127.0.0.1" not in block.text]
    scripts = [ROOT / "examples" / f"{name}.py" for name in files if not name.startswith("readme-")]
    (tmp_path / "snippets").mkdir()
    for number, snippet in enumerate(snippets):
        scripts.append(tmp_path / "snippets" / f"readme-{number}.py")
        scripts[-1].write_text(snippet, encoding="utf-8")
    run([sys.executable, "-W", "error", "-c", RUN_EACH, *map(str, scripts)], tmp_path)
    assert {script.stem for script in scripts} == set(files)
    assert {name: {path.name for path in (tmp_path / name).iterdir()} for name in files} == files
    num_lines = {name: len((tmp_path / f"{name}.out").read_text(encoding="utf-8").splitlines()) for name in files}
    assert (num_lines.pop("readme-0"), num_lines.pop("readme-1")) == (0, 4)
    assert min(num_lines.values()) >= 1


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The README's server on a free port, until the test is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
    (line,) = [line for line in other_commands() if " serve " in line]
    arguments = here(line.replace("8000", str(free)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            wait_until_ready(free, server)
            yield free
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(STEP_S)
    raise TimeoutError(f"not ready after {START_S} s")


@pytest.mark.slow
def test_examples_for_a_server_get_their_pictures_and_prompts(port: int, tmp_path: Path) -> None:
    openai, own = (block.text for block in blocks("python") if "127.0.0.1:8000" in block.text)
    run([sys.executable, "-c", openai.replace(":8000", f":{port}")], tmp_path)
    with Image.open(tmp_path / "penguin.png") as image:
        assert image.size == (512, 512)
        assert "Seed: 7" in image.info["parameters"]
    said = run([sys.executable, "-c", own.replace(":8000", f":{port}")], tmp_path).splitlines()
    assert said.count("PartialImage") == 2
    assert said[-2:] == ["CompletedImage", "two dogs on the beach"]
    asked = run([sys.executable, str(ROOT / "examples" / "ask_a_server.py"), f"http://127.0.0.1:{port}"], tmp_path)
    assert asked.splitlines()[-1].endswith("seed 7")


def test_configuration_example_is_understood(tmp_path: Path) -> None:
    (example,) = blocks("toml")
    file = tmp_path / "my.toml"
    file.write_text(example.text, encoding="utf-8")
    origins = load_settings(config=file, env={}).origins
    keys = [f"{table}.{key}" for table, entries in tomllib.loads(example.text).items() for key in entries]
    assert keys
    assert {origins[key] for key in keys} == {str(file)}


def test_every_sampler_is_in_the_table_as_it_is() -> None:
    noise = {name: "fresh" if s.stochastic else "eta" if s.takes_eta else "none" for name, s in SAMPLERS.items()}
    rows = [
        f"| `{s.name}` | {s.label} | `{s.diffusers_class}` | {s.order} | {s.evaluations_per_step} | {noise[s.name]} "
        f"| {s.summary} |"
        for s in SAMPLERS.values()
    ]
    written = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [line for line in written if "Scheduler`" in line] == rows


def test_every_spacing_and_sigma_schedule_is_named() -> None:
    text = README.read_text(encoding="utf-8")
    for name in (*SPACINGS, *SIGMA_SCHEDULES):
        assert f"`{name}`" in text


def test_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert pictures
    for picture in pictures:
        with Image.open(ROOT / picture) as image:
            image.verify()


def test_the_tree_of_the_house_is_as_its_files_say() -> None:
    assert house.HOUSE.read_text(encoding="utf-8") == house.whole(), "run python3 tests/house.py"


def test_the_front_page_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 280
