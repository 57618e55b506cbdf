"""Prompt templates: braces, wildcards, random choices by a seed, and numbered combinations."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest
from diffserve.models.loras import Lora
from diffserve.models.templates import (
    WildcardChecker,
    Wildcards,
    combination,
    count_combinations,
    resolve_templates,
    template_fields,
)

NO_FILES = Wildcards("")


@pytest.fixture
def wildcards(tmp_path: Path) -> Wildcards:
    """Return a folder with wildcards, one of which names itself, and a file outside of the folder."""
    folder = tmp_path / "words"
    (folder / "style").mkdir(parents=True)
    (folder / "colors.txt").write_text("# all colors\nred\n\n3::blue\n{light|dark} green\n")
    (folder / "style" / "ink.txt").write_text("\ufeffink on __colors__ paper\r\n", encoding="utf-8")
    (folder / "loop.txt").write_text("a __loop__\n")
    (folder / "empty.txt").write_text("# nothing\n")
    (tmp_path / "secret.txt").write_text("password\n")
    return Wildcards(str(folder))


def all_texts(template: str, wildcards: Wildcards = NO_FILES) -> list[str]:
    return [combination(template, index, wildcards) for index in range(count_combinations(template, wildcards))]


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("plain (text:1.2), [a|b]", ["plain (text:1.2), [a|b]"]),
        ("a {red|blue} {cat|dog}", ["a red cat", "a red dog", "a blue cat", "a blue dog"]),
        ("{a|{b|c}}", ["a", "b", "c"]),
        ("{2$$a|b|c}", ["a, b", "a, c", "b, c"]),
        ("{1-2$$ and $$a|b}", ["a", "b", "a and b"]),
        ("{0-1$$a} x", ["x", "a x"]),
        ("{-$$a|b}", ["", "a", "b", "a, b"]),
        ("{2::a|0.5::b}", ["a", "b"]),
        (r"\{a\|b\} {a\|b|\}}", [r"{a\|b} a|b", r"{a\|b} }"]),
        ("{[a|b]|c}", ["[a|b]", "c"]),
        (r"\__colors__", ["__colors__"]),
        ("a {|very }big cat", ["a big cat", "a very big cat"]),
        ("snake_case and a__b", ["snake_case and a__b"]),
    ],
)
def test_combinations_are_numbered_and_random_choices_are_among_them(template: str, texts: list[str]) -> None:
    assert all_texts(template) == texts
    resolved, warnings = resolve_templates(template, "random", range(40), NO_FILES)
    orders = {text for text in texts} | {", ".join(reversed(text.split(", "))) for text in texts} | {"b and a"}
    assert set(resolved) <= orders
    assert not warnings
    assert resolved == resolve_templates(template, "random", range(40), NO_FILES)[0]


def test_weights_apply_to_random_choices() -> None:
    counts = Counter(resolve_templates("{3::a|b|0::c}", "random", range(4000), NO_FILES)[0])
    assert counts["c"] == 0
    assert 2850 < counts["a"] < 3150


def test_wildcards_are_lines_of_files_and_read_again(wildcards: Wildcards, tmp_path: Path) -> None:
    assert wildcards.names() == ["colors", "empty", "loop", "style/ink"]
    assert all_texts("a __colors__ cat", wildcards) == [
        f"a {color} cat" for color in ("red", "blue", "light green", "dark green")
    ]
    assert all_texts("__style/ink__", wildcards)[0] == "ink on red paper"
    (tmp_path / "words" / "colors.txt").write_text("black\n")
    assert all_texts("__colors__", wildcards) == ["black"]


def test_a_wildcard_file_in_another_encoding_is_refused_and_a_pipe_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café\n".encode("latin-1"))
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "missing.txt").symlink_to(tmp_path / "nowhere")
    wildcards = Wildcards(str(tmp_path))
    assert wildcards.names() == ["latin", "missing"]
    with pytest.raises(
        InvalidRequest, match=r"__latin__; its file is not UTF-8 text \(at byte 3\); convert it to UTF-8"
    ):
        wildcards.lines("latin")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        wildcards.lines("missing")


def test_a_check_follows_the_wildcards_in_the_lines_of_a_file(wildcards: Wildcards, tmp_path: Path) -> None:
    files = {"a": "red\n{big|__b__} fox", "b": "__c__", "c": "__colors__ {x|{y|__a__}}"}
    files |= {"to_c": "__c__", "bad": "__no__"} | {f"deep{level}": f"__deep{level - 1}__" for level in range(1, 9)}
    files["deep0"] = "end"
    for name, lines in files.items():
        (tmp_path / "words" / f"{name}.txt").write_text(lines)
    reasons = {
        "loop": r"__loop__ includes itself \(loop.txt -> loop.txt\); remove it from one of these files.",
        "b": r"__b__ includes itself \(b.txt -> c.txt -> a.txt -> b.txt\)",
        "to_c": r"__c__ includes itself \(c.txt -> a.txt -> b.txt -> c.txt\)",
        "bad": r"names __no__; there is no no.txt",
        "deep8": r"nested more than 8 deep",
        "empty": r"its file has no lines",
    }
    for checker in (WildcardChecker(wildcards), None):  # one for all files, and one for each of them
        for name in ("colors", "style/ink", *(f"deep{level}" for level in range(8))):
            (checker or WildcardChecker(wildcards)).check(name)
        for name, reason in reasons.items():
            with pytest.raises(InvalidRequest, match=reason):
                (checker or WildcardChecker(wildcards)).check(name)


def test_images_of_a_request_get_their_own_prompts() -> None:
    fields, warnings = template_fields("a {cat|dog|fox}", "combinatorial", 7, 2, NO_FILES)
    assert fields == {
        "prompt": "a cat", "image_prompts": ("a cat", "a dog"), "template": "a {cat|dog|fox}", "seed": 7,
    }  # fmt: skip
    assert warnings == ["the template has 3 combinations; 2 of them, from the first on, were painted."]
    many, _ = template_fields("a {cat|dog|fox}", "random", 7, 10, NO_FILES)
    for index, prompt in enumerate(many["image_prompts"]):
        alone, _ = template_fields("a {cat|dog|fox}", "random", 7 + index, 1, NO_FILES)
        assert alone == {"prompt": prompt, "image_prompts": (), "template": "a {cat|dog|fox}", "seed": 7 + index}
    drawn, _ = template_fields("a {cat|dog|fox}", "random", None, 4, NO_FILES)
    assert 0 <= drawn["seed"] < 2**32 - 4
    assert template_fields("a {cat", "off", None, 1, NO_FILES) == ({"prompt": "a {cat", "seed": None}, [])
    escaped, _ = template_fields("{[a]|b}", "combinatorial", 1, 1, NO_FILES, lambda text: text.replace("[", "\\["))
    assert escaped["prompt"] == "\\[a]"


def test_lora_tags_of_all_images_must_agree() -> None:
    fields, _ = template_fields("{cat|dog} <lora:ink:0.5>", "combinatorial", 1, 2, NO_FILES)
    request = GenerationRequest(num_images=2, **fields)
    assert (request.prompt, request.image_prompts) == ("cat", ("cat", "dog"))
    assert request.diffusion.loras == (Lora("ink", 0.5),)
    fields, _ = template_fields("cat {<lora:ink:1>|<lora:fur:1>}", "combinatorial", 1, 2, NO_FILES)
    with pytest.raises(InvalidRequest, match="would use different LoRAs; take their tags out of the template's braces"):
        GenerationRequest(num_images=2, **fields)
    fields, _ = template_fields("cat {<lora:ink:1>|<lora:fur:1>}", "combinatorial", 1, 1, NO_FILES)
    assert GenerationRequest(**fields).diffusion.loras == (Lora("ink"),)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a {cat", r"opens a brace that it does not close: '\{cat'; close it"),
        ("a cat}", r"closes a brace at character 6 that it does not open"),
        ("{" * 9 + "}" * 9, "nested more than 8 deep"),
        ("{3$$a|b}", r"asks for 3 of 2 alternatives in '\{3\$\$a\|b\}'; give at most 2"),
        ("{2-1$$a|b}", "asks for 2-1 of 2 alternatives"),
        ("{0::a}", r"all weights in '\{0::a\}' are 0; give one of them a weight above 0"),
        ("__nope__", r"names __nope__; there is no nope.txt \(wildcards: colors, empty, loop, style/ink\)"),
        ("__../secret__", r"names __../secret__; give a path below the folder"),
        ("__/etc/passwd__", "give a path below the folder"),
        ("__empty__", "names __empty__; its file has no lines"),
        ("__loop__", "braces and wildcards nested more than 8 deep at __loop__"),
    ],
)
@pytest.mark.parametrize("mode", ["random", "combinatorial"])
def test_what_cannot_be_resolved_is_refused_in_a_sentence(
    template: str, message: str, mode: str, wildcards: Wildcards
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        template_fields(template, mode, 1, 2, wildcards)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_modes_folders_and_numbers_of_combinations_are_checked(wildcards: Wildcards, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="template is 'all'; give off or random or combinatorial"):
        template_fields("a", "all", 1, 1, NO_FILES)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="names __colors__; no folder of wildcards is configured: start with"):
        resolve_templates("__colors__", "random", [1], NO_FILES)
    with pytest.raises(InvalidRequest, match="has 1048576 combinations; at most 10000 are allowed: use template"):
        count_combinations("{a|b}" * 20, NO_FILES)
    (tmp_path / "words" / "bomb.txt").write_text("{a|b}" * 3000 + "\n")
    (tmp_path / "words" / "bombs.txt").write_text("__bomb__ " * 3000 + "\n")
    with pytest.raises(InvalidRequest, match="reads more than 100000 alternatives and wildcards"):
        resolve_templates("__bombs__", "random", [1], wildcards)


@pytest.mark.parametrize(
    "template",
    [
        *("__a" * 8000, "_" * 30_000, "{a|" * 8 + "b" + "}" * 8, "{" + "|".join(["x"] * 9000) + "}", "[" * 30_000),
        *("{1-16$$" + "|".join(["x"] * 12_000) + "}", "{" * 30_000, "}" * 30_000, "|" * 30_000, "\\" * 30_000),
        *("{a|b}" * 6000, "__a " * 8000),
    ],
)
def test_long_templates_are_resolved_or_refused_quickly(template: str, wildcards: Wildcards) -> None:
    started_s = time.process_time()
    for mode in ("random", "combinatorial"):
        with suppress(InvalidRequest):
            resolve_templates(template, mode, [1, 2], wildcards)
    assert time.process_time() - started_s < 4.0
