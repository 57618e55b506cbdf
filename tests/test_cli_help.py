"""Tests of help texts, option suggestions, ``list``, ``keys`` and standard input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from diffserve.cli import main
from diffserve.cli.app import app
from diffserve.cli.mcp import problem_of
from diffserve.media.images import read_infotext
from diffserve.store import Database, Keys
from schedulers import SAMPLERS
from tests.service.server import RunningServer


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``diffserve`` with these arguments in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, arguments)))
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)

    return run_main


def command_paths(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    for name, command in getattr(group, "commands", {}).items():
        yield from command_paths(command, *names, name)


@pytest.mark.parametrize("words", list(command_paths(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_a_short_help_option(run: Run, words: tuple[str, ...]) -> None:
    short, long = run(*words, "-h"), run(*words, "--help")
    assert short == long
    assert (short.code, "Usage:" in short.out) == (0, True)


@pytest.mark.parametrize(
    ("command", "option", "right"),
    [
        ("generate", "--cfg", "--guidance"),
        ("generate", "--cfg-scale", "--guidance"),
        ("generate", "--width", "--size WIDTHxHEIGHT, such as --size 512x512"),
        ("generate", "-H", "--size WIDTHxHEIGHT, such as --size 512x512"),
        ("generate", "--negative-prompt", "--negative"),
        ("generate", "--scheduler", "--sampler"),
        ("generate", "--num-inference-steps", "--steps"),
        ("generate", "--count", "-n"),
        ("generate", "--out", "--output"),
        ("serve", "--listen", "--host"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(run: Run, command: str, option: str, right: str) -> None:
    words = [command, *(["a fox"] if command == "generate" else []), option, "5"]
    assert run(*words) == (2, "", f"diffserve: No such option: {option}; give {right}.\n")


def test_an_option_is_only_suggested_where_the_command_has_it(run: Run) -> None:
    assert "--guidance" not in run("serve", "--cfg", "5").err


def test_names_that_need_no_model_are_listed(run: Run, tmp_path: Path) -> None:
    samplers = run("list", "samplers")
    assert samplers.code == 0
    assert [line.partition("\t")[0] for line in samplers.out.splitlines()] == [
        *(sampler.name for sampler in SAMPLERS.values()),
        *(f"learned:embedded-{num_steps}" for num_steps in (4, 5, 6, 8)),
    ]
    Path("more.toml").write_text('[models]\nphoto = "embedded-turbo"\n')
    assert run("list", "models", "--config", "more.toml").out.splitlines()[-1] == "photo\tembedded-turbo"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "styles.csv").write_text("name,prompt,negative_prompt\nnoir,{prompt} film noir,\n")
    styles = run("list", "styles", "--data-dir", "data").out
    assert "tags\t" in styles
    assert "noir\tprompt style from styles.csv\n" in styles
    kinds = "samplers, models, loras, controlnets, upscalers, embeddings, styles"
    assert run("list", "wheels").err == f"diffserve: KIND is 'wheels'; give one of {kinds}.\n"


@pytest.mark.slow
def test_files_of_a_model_are_listed_and_those_that_cannot_be_used_are_noted(run: Run) -> None:
    Path("loras").mkdir()
    Path("loras/broken.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    listed = run("list", "loras", "--lora-dir", "loras")
    assert (listed.code, listed.out.split()) == (0, ["gift", "sepia"])
    assert "broken cannot be used:" in listed.err
    assert run("list", "controlnets") == (0, "", "")


@pytest.mark.slow
def test_the_names_of_a_server_are_listed(server: RunningServer, run: Run) -> None:
    assert "ddim\tDDIM" in run("list", "samplers", "--server", server.url).out.splitlines()
    [model] = [each["id"] for each in server.client.get("/v1/models").json()["data"] if each.get("capabilities")]
    assert model in run("list", "models", "--server", server.url).out.splitlines()
    assert run("list", "loras", "--server", server.url) == (0, "", "")


class Input:
    """Standard input with these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    "data",
    [b"a red fox\n\na blue owl\n", b'"a red fox"\n{"prompt": "a blue owl"}\n', "\ufeffa red fox\na blue owl".encode()],
    ids=["text", "json", "byte-order-mark"],
)
def test_a_batch_reads_standard_input(
    run: Run, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    config = Path("one.toml")
    config.write_text("[model]\nnum_steps = 1\n")
    monkeypatch.setattr(sys, "stdin", Input(data))
    outcome = run("batch", "-", "-o", "out", "--model", tiny_model("sd15"), "--config", config)
    assert outcome.code == 0, outcome.err
    images = sorted(Path("out").glob("*.png"))
    prompts = [str(read_infotext(image.read_bytes())).splitlines()[0] for image in images]
    assert prompts == ["a red fox", "a blue owl"]
    outcomes = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    assert len(outcomes) == 2


def test_a_batch_without_lines_on_standard_input_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Input(b" \n"))
    assert run("batch", "-", "-o", "out").err == "diffserve: standard input has no prompt; write one per line.\n"
    refused = run("batch", "-", "-o", "out", "--cluster")
    assert refused.err == (
        "diffserve: --cluster cannot read standard input; give a file that all workers can read instead of -.\n"
    )


def test_keys_name_their_folder_and_do_not_change_the_default_one_of_a_running_server(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DIFFSERVE_SERVE_DATA_DIR", raising=False)
    folder = tmp_path / ".local" / "share" / "diffserve"
    added = run("keys", "add", "first")
    assert added.code == 0
    assert f"data folder of the server: {folder}\n" in added.err
    with Database(folder).in_use():
        refused = run("keys", "add", "second")
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.endswith(
            f"a server is running with the default data folder; to confirm, give --data-dir {folder}.\n"
        )
        assert run("keys", "revoke", "first").code == 2
        assert run("keys", "add", "second", "--data-dir", folder).code == 0
        assert run("keys", "add", "third", "--data-dir", "elsewhere").code == 0
    assert run("keys", "revoke", "first").code == 0
    assert [key.name for key in Keys(Database(folder)).all() if key.revoked_s is None] == ["second"]


def test_keys_of_a_running_server_are_changed_after_a_yes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DIFFSERVE_SERVE_DATA_DIR", raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []
    answers = iter([False, True])

    def confirm(question: str, **_: Any) -> bool:
        questions.append(question)
        return next(answers)

    monkeypatch.setattr(typer, "confirm", confirm)
    folder = tmp_path / ".local" / "share" / "diffserve"
    with Database(folder).in_use():
        assert run("keys", "add", "first").code == 2
        assert run("keys", "add", "first").code == 0
    assert questions == [f"A server is running with the default data folder {folder}. Change its keys?"] * 2


@pytest.mark.slow
def test_mcp_says_at_its_start_whether_the_server_answers(server: RunningServer) -> None:
    assert problem_of(server.url, None) == ""
    assert problem_of("http://127.0.0.1:9", None) == "the server http://127.0.0.1:9 does not answer."


def test_keys_of_a_folder_that_is_missing_are_not_listed(run: Run, tmp_path: Path) -> None:
    for arguments in (("list",), ("revoke", "first")):
        done = run("keys", *arguments, "--data-dir", tmp_path / "missing")
        assert done.code == 2
        assert "there is no data folder" in done.err
    assert not (tmp_path / "missing").exists()
    assert run("keys", "add", "first", "--data-dir", tmp_path / "new").code == 0
    assert str(tmp_path / "new") in run("keys", "list", "--data-dir", tmp_path / "new").err
