"""Conversations reach the model as its own template writes them, and what a template cannot say is refused in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from diffserve.api.errors import InvalidRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import ChatMessage, TextConfig, TextRequest
from diffserve.engine.text import TextEngine
from diffserve.runtime.language.model import fold_system, render
from diffserve.training import rewriter_model
from tests.engine.text.conftest import Load
from tests.runtime.language import tiny

PLAIN = (
    "{%- for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{%- endfor %}"
    "{%- if add_generation_prompt %}[me]{%- endif %}"
)
WITHOUT_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}" + PLAIN
)
PICKY = "{{ raise_exception('Roles must alternate.\nsecond line') }}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)

Chat = Callable[[str | None], TextEngine]


def conversation(*turns: tuple[Any, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in turns)


HELLO = conversation(("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "and now?"))


def tokenizer_with(template: str | None) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def chat(language: Load) -> Chat:
    """``chat(template)``: an engine on a tiny model whose tokenizer has this template."""

    def make(template: str | None) -> TextEngine:
        model = dataclasses.replace(language("llama"), tokenizer=tokenizer_with(template))
        return TextEngine.from_model(model, TextConfig(page_tokens=4), pool_bytes=1 << 20)

    return make


def test_a_conversation_is_answered_as_its_rendered_text_is(chat: Chat) -> None:
    engine = chat(PLAIN)
    rendered = "[system]be brief[user]hello[assistant]hi[user]and now?[me]"
    by_messages, by_prompt = engine.generate(
        [TextRequest(messages=HELLO, params=GREEDY), TextRequest(prompt=rendered, params=GREEDY)]
    )
    assert by_messages.results[0].token_ids == by_prompt.results[0].token_ids
    assert by_messages.usage.prompt_tokens == len(rendered)


def test_a_template_has_put_the_special_tokens_already(language: Load) -> None:
    tokenizer = tokenizer_with("<end>" + PLAIN)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", tiny.END_ID)]
    )
    assert tokenizer("a").input_ids == [tiny.END_ID, *tokenizer("a", add_special_tokens=False).input_ids]
    engine = TextEngine.from_model(dataclasses.replace(language("llama"), tokenizer=tokenizer), pool_bytes=1 << 20)
    answer = engine.generate([TextRequest(messages=conversation(("user", "hello")), params=GREEDY)])[0]
    assert answer.usage.prompt_tokens == 1 + len("[user]hello[me]")


def test_developer_is_the_newer_name_of_system() -> None:
    assert render(tokenizer_with(PLAIN), conversation(("developer", "be brief"), ("user", "a")), "m") == (
        "[system]be brief[user]a[me]"
    )


def test_a_template_without_system_texts_gets_them_in_the_first_turn_of_the_user() -> None:
    assert render(tokenizer_with(WITHOUT_SYSTEM), HELLO, "m") == (
        "[user]be brief\n\nhello[assistant]hi[user]and now?[me]"
    )


def test_there_is_nothing_to_fold_without_a_system_text_or_a_user() -> None:
    assert fold_system([{"role": "user", "content": "a"}]) is None
    assert fold_system([{"role": "system", "content": "a"}]) is None


@pytest.mark.parametrize("messages", [HELLO, HELLO[1:]])
def test_what_the_template_refuses_is_refused_in_its_own_words(messages: tuple[ChatMessage, ...], chat: Chat) -> None:
    engine = chat(PICKY)
    with pytest.raises(InvalidRequest, match=r"does not accept these messages: Roles must alternate\.$") as caught:
        engine.submit(TextRequest(messages=messages))
    assert caught.value.param == "messages"
    assert not engine.has_work


def test_a_model_without_a_template_takes_no_conversation_and_goes_on_with_prompts(chat: Chat) -> None:
    engine = chat(None)
    with pytest.raises(InvalidRequest, match="has no chat template; send a prompt in place of messages") as caught:
        engine.submit(TextRequest(messages=HELLO))
    assert caught.value.param == "messages"
    assert len(engine.generate([TextRequest(prompt="hello", params=GREEDY)])[0].results[0].token_ids) > 0


@pytest.mark.parametrize("num_chars", [tiny.CONTEXT_TOKENS, 1_000_000])
def test_a_conversation_longer_than_the_context_is_refused_with_the_field_to_blame(num_chars: int, chat: Chat) -> None:
    engine = chat(PLAIN)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(TextRequest(messages=conversation(("user", "x" * num_chars))))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_the_embedded_template_says_what_the_rewriter_was_trained_on() -> None:
    tokenizer = tokenizer_with(rewriter_model.CHAT_TEMPLATE)
    messages = conversation(("system", "Be  brief"), ("user", "A <CAPTION> Fox"))
    assert render(tokenizer, messages, "m") == rewriter_model.prompt("A <CAPTION> Fox", "Be  brief")
