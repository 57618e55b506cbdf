"""Warnings about unsupported constructs of A1111's prompt syntax."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.api.prompt_syntax import encoded_text, in_a1111, parse_prompt, unserved_constructs
from diffserve.cli import main
from diffserve.models.loras import Lora, read_tags


@pytest.mark.parametrize(
    ("prompt", "quoted"),
    [
        ("a [cat:dog:0.5] runs", "'[cat:dog:0.5]'"),
        ("a [dog:10]", "'[dog:10]'"),
        ("a [cat::0.5]", "'[cat::0.5]'"),
        ("a [(red:1.2) cat: a dog : 0.25 ]", "'[(red:1.2) cat: a dog : 0.25 ]'"),
        ("a [cat|dog] on a [red|blue|] hill", "'[cat|dog]', '[red|blue|]'"),
        ("[a [b|c]:d:2]", "'[b|c]', '[a [b|c]:d:2]'"),
        ("[a|b] [c|d] [e|f] [g|h] [a|b]", "'[a|b]', '[c|d]', '[e|f]' and 1 more"),
    ],
)
def test_prompt_editing_and_alternation_produce_a_warning(prompt: str, quoted: str) -> None:
    for is_negative, name in ((False, "prompt"), (True, "negative prompt")):
        (sentence,) = unserved_constructs(prompt, is_negative=is_negative)
        assert sentence.startswith(f"{quoted} in the {name} is not supported (prompt editing);")


@pytest.mark.parametrize(
    "prompt",
    [
        *("a [cat] on a hill", "a (cat:0.5)", "[(cat:0.5)]", "a|b", "[cat", "cat:dog:0.5]", r"\[cat|dog\]", "3:4"),
        *(r"[cat\|dog]", "[a cat: a dog]", "(cat|dog)", "BREAK", "and ANDROID", "<", "a < b: c > d", ""),
    ],
)
def test_text_without_such_constructs_causes_no_warning(prompt: str) -> None:
    assert unserved_constructs(prompt) == []


def test_and_produces_a_warning_in_the_prompt_only() -> None:
    (sentence,) = unserved_constructs("a cat AND a dog :0.5 AND a bird")
    assert sentence == "'AND' in the prompt is not supported (prompt composition); it was read as a word."
    assert unserved_constructs("a cat AND a dog", is_negative=True) == []


@pytest.mark.parametrize("tag", ["<hypernet:ink:0.5>", "<Hypernet:ink>", "<other:a[b]:1>"])
def test_tags_of_other_networks_are_removed_with_a_warning(tag: str) -> None:
    prompt = f"a cat {tag}, a dog"
    assert encoded_text(prompt) == "a cat , a dog"
    (sentence,) = unserved_constructs(prompt)
    assert sentence == f"'{tag}' in the prompt was ignored; only LoRAs are supported in the prompt."
    assert read_tags(prompt) == (prompt, ())


@pytest.mark.parametrize("kind", ["lora", "LORA", "LoRa", "lyco", "LyCO"])
def test_lora_tags_are_read_in_any_case_and_with_both_names(kind: str) -> None:
    assert read_tags(f"a cat <{kind}:ink:0.5>") == ("a cat", (Lora("ink", 0.5),))


def test_plain_prompt_has_no_constructs() -> None:
    text = "[cat:dog:0.5] [cat|dog] AND BREAK <hypernet:ink:1> <LORA:ink> \\AND"
    written = in_a1111(text, "plain")
    assert unserved_constructs(written) == []
    assert [piece.text for section in parse_prompt(written) for piece in section] == [text]
    assert read_tags(written) == (written, ())


@pytest.mark.parametrize(
    "prompt",
    [
        *(
            "[a:" * 10_000,
            "[a|" * 10_000 + "]" * 10_000,
            "[a:" * 10_000 + "1]" * 10_000,
            "<a:" * 10_000,
            "[a|b]" * 6000,
        ),
        *("[" + ":1" * 15_000 + "]", "[a:" + " " * 30_000 + "]", "[a:" + "1" * 30_000 + "]"),
    ],
)
def test_long_prompts_are_parsed_quickly(prompt: str) -> None:
    started_s = time.perf_counter()
    sentences = unserved_constructs(prompt)
    assert time.perf_counter() - started_s < 1.0
    assert all(len(sentence) < 400 for sentence in sentences)


@pytest.mark.slow
def test_command_line_warns_about_unsupported_constructs(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("a [cat|dog] AND a bird", "--negative", "a [red:blue:0.5]", "--steps", "1", "-o", str(tmp_path / "a.png"))
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words, "--model", str(tiny_model("sd15"))])
    assert caught.value.code == 0
    errors = " ".join(capsys.readouterr().err.split())
    for beginning in (
        "'[cat|dog]' in the prompt is not supported", "'AND' in the prompt is not supported",
        "'[red:blue:0.5]' in the negative prompt is not supported",
    ):  # fmt: skip
        assert f"note: {beginning}" in errors
