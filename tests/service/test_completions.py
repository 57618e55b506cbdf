"""Text completions over a real socket with the ``openai`` client.

The prompt ``<say 0>`` selects the model's first scripted answer; see ``tests.engine.rewriting.scripted``.
"""

from __future__ import annotations

import math

import openai
import pytest
from openai import OpenAI
from openai.types import CompletionChoice

from tests.service.talker import FOX, SCRIPT
from tests.service.test_chat import LIKELIEST

pytestmark = pytest.mark.slow

SAY_FOX, SAY_EITHER, SAY_UNSURE = (f"<say {list(SCRIPT).index(word)}>" for word in ("fox", "either", "unsure"))


def choices_of(client: OpenAI, *, is_stream: bool, prompt: object, **settings: object) -> list[CompletionChoice]:
    """Return all complete choices; the chunks of a stream are joined."""
    answer = client.completions.create(model="talker", prompt=prompt, stream=is_stream, **settings)
    if not is_stream:
        return list(answer.choices)
    parts: dict[int, CompletionChoice] = {}
    for chunk in answer:
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            merged = parts.setdefault(choice.index, choice)
            if merged is not choice:
                merged.text += choice.text
                merged.finish_reason = choice.finish_reason
                for name in choice.logprobs.model_fields_set if choice.logprobs else ():
                    getattr(merged.logprobs, name).extend(getattr(choice.logprobs, name))
    return [parts[index] for index in sorted(parts)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_is_continued(text_client: OpenAI, is_stream: bool) -> None:
    [choice] = choices_of(text_client, is_stream=is_stream, prompt=SAY_FOX, temperature=0)
    assert (choice.text, choice.finish_reason, choice.logprobs) == (FOX, "stop", None)


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_prompts_are_answered_in_their_order(text_client: OpenAI, is_stream: bool) -> None:
    prompts = [SAY_EITHER, SAY_FOX]
    choices = choices_of(text_client, is_stream=is_stream, prompt=prompts, temperature=0, n=2)
    assert [(choice.index, choice.text) for choice in choices] == list(enumerate(["a boat"] * 2 + [FOX] * 2))


def test_tokens_may_be_given_in_place_of_a_text(text_client: OpenAI) -> None:
    marks = [list(SCRIPT).index("fox"), list(SCRIPT).index("either")]
    answer = text_client.completions.create(model="talker", prompt=SAY_FOX, temperature=0, logprobs=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1
    one_by_one = [choices_of(text_client, is_stream=False, prompt=f"<say {at}>", temperature=0)[0].text for at in marks]
    assert one_by_one == [FOX, "a boat"]
    some_byte = text_client.completions.create(model="talker", prompt=[5, 6, 7], max_tokens=1)
    lists = text_client.completions.create(model="talker", prompt=[[5, 6], [7]], max_tokens=1)
    assert some_byte.usage is not None
    assert lists.usage is not None
    assert (some_byte.usage.prompt_tokens, lists.usage.prompt_tokens, len(lists.choices)) == (3, 3, 2)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_have_offsets_into_the_text(text_client: OpenAI, is_stream: bool) -> None:
    [choice] = choices_of(text_client, is_stream=is_stream, prompt=SAY_FOX, temperature=0, logprobs=2)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(SCRIPT["fox"])
    assert choice.logprobs.text_offset == [0, len("a red fox"), len("a red fox, deep snow")]
    assert choice.logprobs.token_logprobs == pytest.approx([0.0] * 3, abs=1e-3)
    assert choice.logprobs.top_logprobs is not None
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2, 2, 2]


def test_temperature_and_top_p_change_sampling_but_not_reported_logprobs(text_client: OpenAI) -> None:
    def drawn(**settings: float) -> set[str]:
        return {choice.text for choice in choices_of(text_client, is_stream=False, prompt=SAY_EITHER, **settings)}

    assert drawn(n=16, seed=0) == set(SCRIPT["either"])
    assert drawn(n=16, seed=0, top_p=LIKELIEST - 0.01) == {"a boat"}
    assert drawn(n=16, seed=0, temperature=0.01) == {"a boat"}
    [choice] = choices_of(text_client, is_stream=False, prompt=SAY_EITHER, temperature=0.01, logprobs=0)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([math.log(LIKELIEST)], abs=1e-3)


def test_penalties_keep_the_model_from_repeating_itself(text_client: OpenAI) -> None:
    plain = choices_of(text_client, is_stream=False, prompt="a", temperature=0, max_tokens=8)[0].text
    penalised = choices_of(
        text_client,
        is_stream=False,
        prompt="a",
        temperature=0,
        max_tokens=8,
        presence_penalty=2.0,
        frequency_penalty=2.0,
    )[0].text
    assert len(set(plain)) < len(set(penalised))


def test_a_bias_makes_a_token_certain_or_impossible(text_client: OpenAI) -> None:
    def text(**fields: object) -> str:
        return str(choices_of(text_client, is_stream=False, prompt="a", temperature=0, max_tokens=1, **fields)[0].text)

    best, certain = text(), text(logit_bias={"70": 100})
    assert text(logit_bias={"70": 100, "71": -100}) == certain != best
    assert text(logit_bias={"70": -100}) == best


def test_the_default_is_sixteen_tokens(text_client: OpenAI) -> None:
    answer = text_client.completions.create(model="talker", prompt="a", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    longer = text_client.completions.create(model="talker", prompt="a", max_tokens=40, extra_body={"min_tokens": 40})
    assert longer.usage is not None
    assert (longer.usage.completion_tokens, longer.choices[0].finish_reason) == (40, "length")


def test_a_refusal_before_the_first_token_of_a_stream_is_a_plain_error(text_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        text_client.completions.create(model="talker", prompt="a" * 3000, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
