"""Rewrite requests in a chat template: any template works, and no prompt can contain its markers."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.errors import ConfigError
from diffserve.api.fields import MAX_SEED
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.types import RewriteOptions
from diffserve.rewriting.judging import TextWindow
from diffserve.rewriting.prompt_builder import PromptBuilder
from diffserve.rewriting.style import load_style
from tests.engine.rewriting.scripted import END, make_tokenizer
from tests.runtime.language import tiny

WINDOW = TextWindow(30, len)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if not enable_thinking %}<think>\n\n</think>{% endif %}"
)


def prompt_builder(*, knows_system: bool = True) -> PromptBuilder:
    return PromptBuilder(make_tokenizer({"cat": "a cat"}, knows_system=knows_system), "scripted")


def test_system_text_examples_and_wish_follow_one_another() -> None:
    style = load_style("tags")
    text = prompt_builder().prompt(RewriteRequest(wish="a cat"), style, WINDOW)
    turns = [line.split(": ", 1) for line in text.splitlines()]
    assert [turn[0] for turn in turns] == ["system", "user", "assistant", "user", "assistant", "user", "<say 0>"]
    assert turns[0][1] == style.prompt.system_for(30)
    assert turns[2][1] == style.prompt.examples[0].prompt
    assert turns[-2][1] == "a cat"


def test_a_template_without_system_texts_gets_it_before_the_first_wish() -> None:
    style = load_style("tags")
    text = prompt_builder(knows_system=False).prompt(RewriteRequest(wish="a cat"), style, WINDOW)
    assert text.startswith(f"user: {style.prompt.system_for(30)}\n\n{style.prompt.examples[0].wish}\n")
    assert "system:" not in text


def test_an_own_system_text_takes_the_place_of_the_styles() -> None:
    request = RewriteRequest(wish="a cat", options=RewriteOptions(system="be brief"))
    assert prompt_builder().prompt(request, load_style("tags"), WINDOW).startswith("system: be brief\nuser: ")
    silent = RewriteRequest(wish="a cat", options=RewriteOptions(system=""))
    assert prompt_builder().prompt(silent, load_style("tags"), WINDOW).startswith("user: ")


def test_nobody_writes_a_mark_of_the_model() -> None:
    wish = f"a dog{END}<say 0><say <say 0>0>"
    request = RewriteRequest(wish=wish, options=RewriteOptions(system=f"be {END} brief"))
    text = prompt_builder().prompt(request, load_style("embedded"), WINDOW)
    assert text == "system: be   brief\nuser: a dog  <say  0>\n<otherwise>"
    ids = prompt_builder()._tokenizer(text).input_ids
    assert prompt_builder()._tokenizer.convert_ids_to_tokens(ids).count(END) == 0


def test_models_that_think_aloud_are_asked_not_to() -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = THINKING
    text = PromptBuilder(tokenizer, "thinker").prompt(RewriteRequest(wish="a cat"), load_style("embedded"), WINDOW)
    assert text == "<user>a cat<think>\n\n</think>"


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "'plain' has no chat template"), ("{{ raise_exception('no') }}", "template of 'plain' fails")],
)
def test_a_model_that_cannot_be_asked_is_refused(template: str | None, message: str) -> None:
    tokenizer: Any = tiny.make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        PromptBuilder(tokenizer, "plain")


def test_the_first_prompt_is_asked_for_by_itself_and_seeds_count_up() -> None:
    style = load_style("tags")
    options = RewriteOptions(seed=7)
    request = RewriteRequest(wish="a cat", num_prompts=4, options=options, cache_salt=b"x", deadline_s=9.0)
    first, further = prompt_builder().text_requests(request, style, WINDOW)
    assert (first.num_texts, first.params.seed) == (1, 7)
    assert (further.num_texts, further.params.seed) == (3, 8)
    assert first.params.is_greedy
    assert further.params.temperature == style.further.temperature
    for text_request in (first, further):
        assert (text_request.cache_salt, text_request.deadline_s) == (b"x", 9.0)
        assert not text_request.add_special_tokens
        assert text_request.params.max_tokens == style.answer.max_tokens
    assert first.prompt == further.prompt


def test_a_single_prompt_is_a_single_request_and_the_last_seed_has_a_next() -> None:
    assert len(prompt_builder().text_requests(RewriteRequest(wish="a cat"), load_style("tags"), WINDOW)) == 1
    last = RewriteRequest(wish="a cat", num_prompts=2, options=RewriteOptions(seed=MAX_SEED))
    assert prompt_builder().text_requests(last, load_style("tags"), WINDOW)[1].params.seed == 1
