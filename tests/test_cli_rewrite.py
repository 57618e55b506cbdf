"""Tests of ``diffserve rewrite``: prompts on standard output, warnings on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from diffserve.cli import main
from tests.engine.rewriting import scripted

SCRIPT: scripted.Script = {
    "winter": ("Here is your prompt:", " A red fox", " in deep snow."),
    "plain": ("A cat", " on a mat."),
    "sign": "A shop window at night.",
    "either": ("A boat.", "A ship.", "A raft."),
}


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``diffserve rewrite`` with these arguments."""

    def run_main(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["rewrite", *map(str, arguments)])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)

    return run_main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted.save(tmp_path_factory.mktemp("rewriting") / "told", SCRIPT, forks={"either": 0.5})


def test_a_prompt_is_a_line_on_standard_output(run: Run, model: Path) -> None:
    assert run("something for winter", "--model", model) == (0, "A red fox in deep snow.\n", "")


def test_several_prompts_are_reproduced_by_the_seed(run: Run, model: Path) -> None:
    for seed in range(4):
        code, out, err = run("either", "-n", 3, "--model", model, "--seed", seed)
        lines = out.splitlines()
        assert (code, err, lines[0]) == (0, "", "A boat.")
        assert set(lines) == {"A boat.", "A ship.", "A raft."}
        assert run("either", "-n", 3, "--model", model, "--seed", seed).out == out


def test_fewer_different_prompts_than_requested_are_noted(run: Run, model: Path) -> None:
    code, out, err = run("either", "-n", 6, "--model", model)
    assert (code, len(out.splitlines())) == (0, 3)
    assert err == "note: 6 prompts were requested, but the model found only 3 different prompts.\n"


def test_rejected_rewrite_is_noted_once_and_the_wish_is_kept(run: Run, model: Path) -> None:
    code, out, err = run('a sign "Open"', "-n", 2, "--model", model)
    assert (code, out) == (0, 'a sign "Open"\n')
    assert err.startswith('note: the rewriter left out "Open"; the prompt was left as it is.\n')
    assert err.endswith("note: 2 prompts were requested, but the model found only 1 prompt.\n")


def test_streamed_text_is_not_repeated_unless_the_prompt_differs(run: Run, model: Path) -> None:
    assert run("plain", "--stream", "--model", model) == (0, "A cat on a mat.\n", "")
    streamed = "Here is your prompt: A red fox in deep snow."
    assert run("winter", "--stream", "--model", model).out == f"{streamed}\nA red fox in deep snow.\n"


def test_json_contains_all_details(run: Run, model: Path) -> None:
    answer = json.loads(run("winter", "-n", 2, "--json", "--model", model, "--style", "tags").out)
    assert (answer["style"], answer["model"]) == ("tags", "told")
    assert [rewrite["prompt"] for rewrite in answer["rewrites"]] == ["A red fox in deep snow"]
    assert answer["rewrites"][0]["answer"].startswith("Here is your prompt: ")
    assert answer["rewrites"][0]["fallback"] is None
    assert answer["usage"]["output_tokens"] == 8
    *deltas, end = map(json.loads, run("plain", "--json", "--stream", "--model", model).out.splitlines())
    assert "".join(delta["text"] for delta in deltas) == end["rewrites"][0]["prompt"] == "A cat on a mat."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty; give a prompt to rewrite."),
        (["a \udcff"], "prompt has a lone surrogate"),  # shell arguments that are not UTF-8
        (["a fox", "-n", "0"], "n is 0; ask for 1 to 64 prompts"),
        (["a fox", "-n", "many"], "'-n'"),
        (["a fox", "--seed", "-1"], "seed is -1; it must lie between 0"),
        (["a fox", "--style", "poem"], "style is 'poem'; choose one of embedded, prose, tags."),
        (["a fox", "--model", "/no/such"], "no language model at '/no/such': give the directory of an instruct model"),
        ([], "Missing argument 'WISH'"),
    ],
)
def test_a_mistake_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("diffserve: ")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused(run: Run, tmp_path: Path) -> None:
    from tests.runtime.language import tiny

    outcome = run("a fox", "--model", tiny.save(tmp_path / "plain", "llama"))
    assert (outcome.code, outcome.out) == (2, "")
    assert "'plain' has no chat template" in outcome.err


def test_missing_embedded_rewriter_gives_the_training_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diffserve.rewriting.style.DIRECTORY", tmp_path)
    outcome = run("a fox")
    assert outcome.code == 2
    assert "python -m diffserve.training.train rewriter" in outcome.err


def test_a_model_made_for_the_embedded_rewriters_prompt_gets_its_style(tmp_path: Path) -> None:
    from diffserve.cli.rewrite import open_rewriter
    from diffserve.training.rewriter_model import build_rewriter, build_tokenizer, export_rewriter

    tokenizer = build_tokenizer(num_wishes=500)
    directory = export_rewriter(tmp_path, build_rewriter(tokenizer), tokenizer)
    rewriter = open_rewriter(str(directory), None, device="cpu", dtype="float32")
    assert (rewriter.style.name, rewriter.window.num_tokens) == ("embedded", 30)
