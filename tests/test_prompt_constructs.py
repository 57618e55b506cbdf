"""Prompt editing, alternation and AND in A1111's syntax, and warnings about constructs that are not supported."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_schedule import (
    Area,
    PartText,
    is_scheduled,
    num_parts,
    split_parts,
    texts_by_step,
    texts_read,
)
from diffserve.api.prompt_syntax import encoded_text, in_a1111, parse_prompt, unserved_constructs
from diffserve.api.types import GenerationRequest
from diffserve.cli import main
from diffserve.models.loras import Lora, read_tags
from diffserve.models.vocabulary import unknown_words


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a [cat:dog:0.5] runs", ["a cat runs"] * 2 + ["a dog runs"] * 2),
        ("a [dog:1]", ["a ", "a dog", "a dog", "a dog"]),
        ("[cat::.75]", ["cat", "cat", "cat", ""]),
        ("a [(red:1.2) cat: a dog : 0.25 ]", ["a (red:1.2) cat", "a  a dog ", "a  a dog ", "a  a dog "]),
        ("[cat|dog] on a [red|blue|]", ["cat on a red", "dog on a blue", "cat on a ", "dog on a red"]),
        ("[a [b|c]:d:2]", ["a b", "a c", "d", "d"]),
        ("[[cat:dog:1]:bird:2]", ["cat", "dog", "bird", "bird"]),
        ("[a:b:-1] [a:b:9] [a:b:1.0]", ["b a a"] * 4),
        ("[a: b: c:2]", ["a: b", "a: b", " c", " c"]),
        ("[a:b|c:d]", ["a:b", "c:d", "a:b", "c:d"]),
        ("[<lora:ink:1>|dog]", ["<lora:ink:1>", "dog", "<lora:ink:1>", "dog"]),
    ],
)
def test_editing_and_alternation_choose_the_text_of_each_step(prompt: str, texts: list[str]) -> None:
    assert texts_by_step(prompt, 4, "prompt") == tuple(texts)
    assert is_scheduled(prompt, "") == is_scheduled("", prompt) is True


@pytest.mark.parametrize(
    "prompt",
    [
        *("a [cat] on a hill", "a (cat:0.5)", "[(cat:0.5)]", "a|b", "[cat", "cat:dog:0.5]", r"\[cat|dog\]", "3:4"),
        *(r"[cat\|dog]", "[a cat: a dog]", "(cat|dog)", "BREAK", "and ANDROID", "<", "a < b: c > d", "", r"a \AND b"),
        *(r"a \MASK(0 1, 0 1)", "MASK (0 1, 0 1)"),
        *("[(cat|dog]", "[cat:dog:0.5:]", "[cat:dog:]", "[cat:dog:five]", "[[cat]]"),
    ],
)
def test_other_texts_are_the_same_at_every_step(prompt: str) -> None:
    assert not is_scheduled(prompt, prompt)
    assert texts_by_step(prompt, 3, "prompt") == (prompt,) * 3
    assert split_parts(prompt) == (PartText(prompt),)
    assert texts_read(prompt, "prompt", [3]) == texts_read(prompt, "negative_prompt", [3]) == ()
    assert unserved_constructs(prompt) == []


def test_and_splits_the_prompt_into_weighted_parts() -> None:
    parts = split_parts("a cat AND a dog :0.5 AND (bird:1.3) AND  : -1 AND [a:b:2]AND ")
    expected = (("a cat", 1.0), ("a dog", 0.5), ("(bird:1.3)", 1.0), ("", -1.0), ("[a:b:2]", 1.0), ("", 1.0))
    assert parts == tuple(PartText(*each) for each in expected)
    assert num_parts("a cat AND a dog") == 2
    assert not is_scheduled("", "a cat AND a dog")


def test_a_part_with_an_area_acts_there_only() -> None:
    prompt = "a hill AND (a fox:1.2) MASK(0 .5,0.25 1) :0.5 AND MASK(0.5 1, 0 1.0)[cat|dog]"
    assert split_parts(prompt) == (
        PartText("a hill"),
        PartText("(a fox:1.2)", 0.5, Area(0, 0.5, 0.25, 1)),
        PartText("[cat|dog]", 1.0, Area(0.5, 1, 0, 1)),
    )
    assert split_parts("a fox MASK(0 1, 0 1)") == (PartText("a fox", 1.0, Area(0, 1, 0, 1)),)
    assert texts_read(prompt, "prompt", [3]) == ("a hill", "(a fox:1.2)", "cat", "dog")
    assert texts_read("a fox MASK(0 1, 0 1)", "negative_prompt", [3]) == ()
    assert unknown_words("a fox MASK(0 0.5, 0 1) AND a dog", ["a", "and", "fox"]) == ("dog",)
    assert Area(0, 0.5, 0.25, 1).slices(8, 16) == (slice(2, 8), slice(0, 8))
    assert Area(0.999, 1, 0, 0.001).slices(8, 16) == (slice(0, 1), slice(15, 16))


@pytest.mark.parametrize(
    "area",
    ["", "0 1", "0 1, 0", "0 1, 0 2", "1 0, 0 1", "0 0, 0 1", "-1 1, 0 1", "nan 1, 0 1", "0 1, 0 1e0", "a b, c d"],
)
def test_a_wrong_area_is_refused(area: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an area; write left and right"):
        split_parts(f"a hill AND a fox MASK({area})")


def test_a_filter_reads_every_text_that_a_prompt_becomes() -> None:
    request = GenerationRequest(prompt="a for[|bidden] cat AND a [red:blue:0.5] dog", negative_prompt="[a:b:3]")
    assert {"a forbidden cat", "a for cat", "a red dog", "a blue dog", "a", "b"} <= set(request.texts.values())
    assert {name.partition("#")[0] for name in request.texts} == {"prompt", "negative_prompt"}
    assert GenerationRequest(prompt="a cat").texts == {"prompt": "a cat", "negative_prompt": ""}
    prompts = GenerationRequest(prompt="a", image_prompts=("a", "b", "a"), num_images=3)
    assert list(prompts.texts.values()) == ["a", "b", ""]
    with pytest.raises(InvalidRequest, match="can have more than 128 different texts"):
        _ = GenerationRequest(prompt=f"[{'|'.join(map(str, range(129)))}]").texts


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
            "[" * 16_000 + "]" * 16_000,
            "a AND" * 6000,
            "MASK(0 1, 0 1)" * 2000,
            "MASK(" * 6000,
            "MASK(" + "0 " * 15_000 + ")",
        ),
        *("[" + ":1" * 15_000 + "]", "[a:" + " " * 30_000 + "]", "[a:" + "1" * 30_000 + "]"),
    ],
)
def test_long_prompts_are_parsed_quickly(prompt: str) -> None:
    started_s = time.process_time()
    assert all(len(sentence) < 400 for sentence in unserved_constructs(prompt))
    with suppress(InvalidRequest):
        texts_by_step(prompt, 50, "prompt")
    with suppress(InvalidRequest):
        split_parts(prompt)
    assert time.process_time() - started_s < 1.0


@pytest.mark.slow
def test_command_line_serves_them_and_warns_about_other_networks(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("a [cat|dog] AND a bird <hypernet:ink:1>", "--negative", "a [red:blue:0.5]", "--steps", "2")
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words, "-o", str(tmp_path / "a.png"), "--model", str(tiny_model("sd15"))])
    assert caught.value.code == 0
    errors = " ".join(capsys.readouterr().err.split())
    assert "note: '<hypernet:ink:1>' in the prompt was ignored" in errors
    assert "not supported" not in errors
