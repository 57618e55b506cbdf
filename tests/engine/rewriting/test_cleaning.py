"""The prompt is found in whatever a chatty model wraps around it."""

from __future__ import annotations

import pytest

from diffserve.rewriting.cleaning import clean, without_thoughts
from diffserve.rewriting.job import VisibleText

PROMPT = "a red fox in the snow, warm light"


@pytest.mark.parametrize(
    "answer",
    [
        PROMPT,
        f"  {PROMPT}\n",
        f'"{PROMPT}"',
        f"“{PROMPT}”",
        f"**{PROMPT}**",
        f"`{PROMPT}`",
        f"```\n{PROMPT}\n```",
        f"```text\n{PROMPT}",
        f"Here is your prompt:\n\n```\n{PROMPT}\n```\nEnjoy!",
        f"Here's the rewritten prompt: {PROMPT}",
        f"Sure! Here is a prompt for Stable Diffusion:\n\n{PROMPT}",
        f"Certainly, here’s one:\n{PROMPT}",
        f"**Prompt:** {PROMPT}",
        f'Stable Diffusion prompt: "{PROMPT}"',
        f"Rewritten prompt:\n\n{PROMPT}\n\nThis prompt keeps the fox.",
        f"{PROMPT}\n\nLet me know if you want another!",
        f"{PROMPT}\nNote: I added the light.",
        f"{PROMPT}\n(I have added warm light.)",
        f"<think>They want a fox.</think>\n\n{PROMPT}",
        f"<think>\n\n</think>\n\nOkay! Prompt: {PROMPT}",
        f"They want a fox.</think>{PROMPT}",
        f"# Prompt:\n{PROMPT}",
        f"1. {PROMPT}",
        f"- {PROMPT}",
    ],
)
@pytest.mark.parametrize("parts", ["tags", "sentences", "whole"])
def test_the_prompt_alone_is_left(answer: str, parts: str) -> None:
    assert clean(answer, parts) == PROMPT  # type: ignore[arg-type] # one of the three


@pytest.mark.parametrize(
    "answer",
    [
        "a sign with the words: fresh bread",
        "ok corral at noon",
        "great wall of china at dawn",
        "a poster. Its caption reads: the end",
        'a sign that says "Open"',
        '"Open" and "Closed"',
        "a yes-or-no sign: two lamps",
        "12 drummers drumming",
    ],
)
def test_what_only_looks_like_an_introduction_stays(answer: str) -> None:
    assert clean(answer, "sentences") == answer


def test_lines_become_tags_or_one_line_of_prose() -> None:
    answer = "- a red fox,\n- deep snow\n\n- not this"
    assert clean(answer, "tags") == "a red fox, deep snow"
    assert clean("A fox\n is here.\nSnow falls.", "sentences") == "A fox is here. Snow falls."


@pytest.mark.parametrize("answer", ["", "  \n", "<think>I wonder", "<think>", "```\n```", '""'])
def test_nothing_is_left_of_nothing(answer: str) -> None:
    assert clean(answer, "tags") in ("", '""')
    assert not any(letter.isalnum() for letter in clean(answer, "tags"))


def test_thoughts_are_what_stands_before_the_last_end_of_one() -> None:
    assert without_thoughts("a<think>b</think>c") == "c"
    assert without_thoughts("a<think>b") == "a"
    assert without_thoughts("a") == "a"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_watcher_sees_the_answer_without_thoughts_however_it_is_cut(size: int) -> None:
    def watched(text: str) -> str:
        showing = VisibleText()
        return "".join(showing.push(text[at : at + size]) for at in range(0, len(text), size))

    assert watched("<think>hm</think>\n\na fox") == "a fox"
    assert watched("a fox") == "a fox"
    assert watched("<thick fog") == "<thick fog"
    assert watched("<think>hm") == ""
