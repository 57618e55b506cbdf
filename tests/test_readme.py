"""The commands, snippets, tables and links of the README and the documentation are carried out or compared here."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from diffserve.api.fields import REQUEST_FIELDS
from diffserve.cli import main
from diffserve.settings.layers import KEYS, load_settings
from schedulers import SAMPLERS, SIGMA_SCHEDULES, SPACINGS
from tests import reference
from tests.readme import DOCS, README, ROOT, Block, blocks, command
from tests.service.server import RunningServer

SAMPLERS_PAGE = DOCS / "samplers.md"
FRESH = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt "
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command, and tells in KiB how much memory it had at most."""


def here(line: str) -> list[str]:
    """Return a README command for this interpreter, without the README's virtual environment."""
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


def output_of(call: Callable[[], object], folder: Path) -> str:
    """Return the output of ``call``, run in ``folder``; a warning is an error.

    The calls share one process, which imports the libraries once.
    """
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            call()
        except SystemExit as ended:
            if ended.code:
                raise
    return printed.getvalue()


def run_script(script: Path, *arguments: str, folder: Path) -> str:
    """Run a Python file as a script in this process; return its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", [*sys.path])
        return output_of(lambda: runpy.run_path(str(script), run_name="__main__"), folder)


def run_snippet(text: str, folder: Path) -> str:
    """Run a snippet of the README; return its output."""
    script = folder.with_name(f"{folder.name}.py")
    script.write_text(text, encoding="utf-8")
    return run_script(script, folder=folder)


def run_command(line: str, folder: Path) -> str:
    """Run a ``diffserve`` command of the README in this process; return its output."""
    return output_of(lambda: main(here(line)[3:]), folder)


def python_blocks() -> list[Block]:
    """Return the Python snippets of the README and the documentation."""
    return [block for page in (README, *sorted(DOCS.glob("*.md"))) for block in blocks("python", page)]


def other_commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    return [line for line in lines if line.startswith(".venv/bin/")]


def test_first_command_is_one_line_from_nothing_to_a_picture() -> None:
    line = command("paint")
    assert line.startswith(f"{FRESH}. && .venv/bin/diffserve generate ")
    assert '"a fox next to a cactus on the beach"' in line


def test_second_command_is_one_line_from_nothing_to_passed_tests() -> None:
    assert command("test") == f'{FRESH}-e ".[test]" && .venv/bin/pytest'


@pytest.mark.slow
def test_first_command_paints_the_fox_and_the_cactus_within_its_memory(tmp_path: Path) -> None:
    from diffserve.world.checker import read_picture

    output = run([sys.executable, "-c", PEAK, *here(command("paint").split(" && ")[-1])], tmp_path)
    assert output.startswith("fox.png  seed ")
    assert int(output.split()[-1]) * 1024 <= 1.2e9
    with Image.open(tmp_path / "fox.png") as image:
        assert "parameters" in image.info
        reading = read_picture(np.asarray(image.convert("RGB")))
    assert reading.background == "beach"
    assert sorted(detected_object.name for detected_object in reading.objects) == ["cactus", "fox"]


@pytest.mark.network  # .ci/run does the same
@pytest.mark.timeout(1800)
def test_first_command_works_word_by_word_in_an_empty_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=120)
    subprocess.run(["bash", "-euo", "pipefail", "-c", command("paint")], cwd=clone, check=True, timeout=1700)
    with Image.open(clone / "fox.png") as image:
        assert image.size == (128, 128)


@pytest.mark.slow
def test_command_line_examples_work_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_runs = (" serve",)
    lines = [line for line in other_commands() if not any(word in line for word in long_runs)]
    assert len(lines) == 4
    assert [line.split()[1] for line in lines] == ["generate", "generate", "rewrite", "doctor"]
    assert " --steps 10 " in lines[0]
    monkeypatch.setenv("DIFFSERVE_MODEL_NUM_STEPS", "3")  # where a line says no number of its own
    output = {line.split()[1]: run_command(line.replace("--steps 10", "--steps 2"), tmp_path) for line in lines}
    assert all(output.values())
    assert output["rewrite"] == "two dogs on the beach\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crown-1.png", "crown-2.png", "owl.png"]
    with Image.open(tmp_path / "crown-1.png") as image:
        assert image.size == (192, 128)


@pytest.mark.slow
def test_benchmark_command_explains_itself(tmp_path: Path) -> None:
    output = run_script(ROOT / "benchmarks/bench_engine.py", "--help", folder=tmp_path)
    for word in ("--device", "--dtype", "--model", "sdxl-random"):
        assert word in output


@pytest.mark.slow
def test_python_examples_paint_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffserve.engine.image import engine

    files = {
        "readme-0": {"fox.png"},
        "readme-1": set(),
        "paint": {"a-penguin.png", "a-castle-at-night.png", "two-apples.png"},
        "previews": {"fox.png", "preview-05.png"},
        "rewrite_and_paint": {"dogs.png"},
    }
    needs_server = re.compile(r"base_url|127\.0\.0\.1")  # other tests run these
    snippets = [block.text for block in python_blocks() if not needs_server.search(block.text)]
    for name in files:
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DIFFSERVE_MODEL_NUM_STEPS", "6")  # where an example says no number of its own
    monkeypatch.setattr(engine, "load_settings", lambda *, model, env: load_settings(model=model))
    monkeypatch.setattr(engine.Engine, "from_pretrained", functools.cache(engine.Engine.from_pretrained))
    outputs = {f"readme-{n}": run_snippet(text, tmp_path / f"readme-{n}") for n, text in enumerate(snippets)}
    examples = [name for name in files if name not in outputs]
    outputs |= {name: run_script(ROOT / "examples" / f"{name}.py", folder=tmp_path / name) for name in examples}
    assert outputs.keys() == files.keys()
    assert {name: {path.name for path in (tmp_path / name).iterdir()} for name in files} == files
    num_lines = {name: len(text.splitlines()) for name, text in outputs.items()}
    assert (num_lines.pop("readme-0"), num_lines.pop("readme-1")) == (0, 4)
    assert min(num_lines.values()) >= 1


@pytest.mark.slow
def test_examples_for_a_server_get_their_pictures_and_prompts(page_server: RunningServer, tmp_path: Path) -> None:
    started = page_server.process.args
    assert isinstance(started, list)
    commands = [here(line.replace("8000", "0")) for line in other_commands() if " serve" in line]
    assert len(commands) == 1
    assert all(set(words) <= set(started) for words in commands)  # the same command, on a free port
    address = f"127.0.0.1:{page_server.port}"
    openai, server_block, job_block = (block.text for block in python_blocks() if "127.0.0.1:8000" in block.text)
    run_snippet(openai.replace("127.0.0.1:8000", address), tmp_path)
    with Image.open(tmp_path / "penguin.png") as image:
        assert image.size == (512, 512)
        assert "Seed: 7" in image.info["parameters"]
    output_lines = run_snippet(server_block.replace("127.0.0.1:8000", address), tmp_path).splitlines()
    assert output_lines.count("PartialImage") == 2
    assert output_lines[-2:] == ["CompletedImage", "two dogs on the beach"]
    output_lines = run_snippet(job_block.replace("127.0.0.1:8000", address), tmp_path).splitlines()
    assert output_lines[-1] == "succeeded"
    with Image.open(tmp_path / "job.png") as image:
        assert "Seed: 7" in image.info["parameters"]
    (curl,) = (block.text for block in blocks("sh") if block.text.startswith("curl"))
    words = shlex.split(curl.partition(" | ")[0])
    url, body = words[2].replace("127.0.0.1:8000", address), words[words.index("-d") + 1]
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60.0)
    assert ' | jq -r ".data[0].b64_json" | base64 -d > penguin.png' in curl
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]).startswith(b"\x89PNG")
    output = run_script(ROOT / "examples" / "ask_a_server.py", f"http://{address}", folder=tmp_path)
    assert output.splitlines()[-1].endswith("seed 7")


def test_configuration_example_is_understood(tmp_path: Path) -> None:
    (example,) = blocks("toml", DOCS / "configuration.md")
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
    written = [line for line in SAMPLERS_PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [line for line in written if "Scheduler`" in line] == rows


def test_every_spacing_and_sigma_schedule_is_named() -> None:
    text = SAMPLERS_PAGE.read_text(encoding="utf-8")
    for name in (*SPACINGS, *SIGMA_SCHEDULES):
        assert f"`{name}`" in text


def test_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert pictures
    for picture in pictures:
        with Image.open(ROOT / picture) as image:
            image.verify()


@pytest.mark.parametrize("name", sorted(reference.PARTS))
def test_generated_parts_of_the_documentation_are_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == reference.page(name), "run python tests/reference.py"


@pytest.mark.parametrize("name", ["cli.md", "configuration.md"])
def test_every_option_and_every_key_has_a_meaning(name: str) -> None:
    lines = reference.PARTS[name]().splitlines()
    assert not [line for line in lines if line.endswith("|  |")]


def test_the_configuration_reference_has_every_key() -> None:
    missing = [key for key in KEYS if f"| `{key.partition('.')[2]}` |" not in reference.configuration()]
    assert missing == [], missing


def test_the_table_of_request_fields_has_every_field_with_its_meaning() -> None:
    rows = dict(row.split(" | ", 1) for row in reference.request_fields().splitlines()[2:])
    assert rows.keys() == {f"| `{name}`" for name in REQUEST_FIELDS}
    assert all(field.help for field in REQUEST_FIELDS.values())
    assert all(field.default_text for field in REQUEST_FIELDS.values())


def test_the_architecture_page_names_every_package_of_diffserve() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = {file.parent.name for file in (ROOT / "diffserve").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`diffserve\.(\w+)`", text))


def test_readme_is_short_and_its_paragraphs_are_short() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 140
    prose = [part for part in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n") if part[:1] not in "-|"]
    assert max(len(paragraph.splitlines()) for paragraph in prose) <= 4


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_of_the_documentation_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
