"""The shipped rewriter over pages says, token for token, what transformers' ``generate`` says with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextRequest
from diffserve.engine.text import TextEngine
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.training.rewriter_model import MAX_NEW_TOKENS, prompt, system_prompt
from diffserve.training.wishes import held_out_wishes
from tests.device import DEVICE
from tests.engine.text.conftest import pages_of

DIRECTORY = EMBEDDED_DIRECTORY.with_name("rewriter")
WISHES = [wish.text for wish in held_out_wishes(12)]
PROMPTS = [prompt(wish, system_prompt() if index % 3 == 0 else "") for index, wish in enumerate(WISHES)]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_language_model(DIRECTORY, dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the greedy output of transformers for every prompt, computed one at a time."""
    network: Any = import_quietly("transformers", "AutoModelForCausalLM").from_pretrained(
        DIRECTORY, dtype=torch.float32
    )
    tokenizer: Any = import_quietly("transformers", "AutoTokenizer").from_pretrained(DIRECTORY)
    outputs = []
    for words in PROMPTS:
        ids = tokenizer(words, return_tensors="pt").input_ids
        output = network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        outputs.append(output[0, ids.shape[1] :].tolist())
    return outputs


def engine_of(model: LanguageModel, *, num_pages: int = 400, **config: Any) -> TextEngine:
    config = {"num_draft_tokens": 0, **config}
    return TextEngine(model, pages_of(model, num_pages=num_pages, page_tokens=16), TextConfig(**config))


def generate_ids(engine: TextEngine, prompts: list[str] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    answers = engine.generate([TextRequest(prompt=words, params=params, deltas=False) for words in prompts])
    engine.check_integrity()
    return [list(answer.results[0].token_ids) for answer in answers]


def test_alone(model: LanguageModel, expected: list[list[int]]) -> None:
    for words, answer in zip(PROMPTS[:3], expected, strict=False):
        assert generate_ids(engine_of(model), [words]) == [answer]


def test_in_a_mixed_batch_with_chunked_prompts(model: LanguageModel, expected: list[list[int]]) -> None:
    engine = engine_of(model, max_batch_tokens=48)
    assert generate_ids(engine) == expected
    assert any(len({row[2] for row in tick.rows}) > 1 for tick in engine.trace), "prompts and decoding never met"


def test_with_prefix_hits(model: LanguageModel, expected: list[list[int]]) -> None:
    engine = engine_of(model)
    assert generate_ids(engine) == expected
    assert generate_ids(engine) == expected
    assert engine.stats().cached_tokens > 0


def test_after_eviction_and_computing_again(model: LanguageModel, expected: list[list[int]]) -> None:
    engine = engine_of(model, num_pages=26)
    assert generate_ids(engine) == expected
    assert generate_ids(engine) == expected
    assert engine.pool.stats().tenants["llm"].evicted_pages > 0


def test_with_drafts_looked_up_in_the_prompt(model: LanguageModel, expected: list[list[int]]) -> None:
    engine = engine_of(model, num_draft_tokens=5)
    assert generate_ids(engine) == expected
    assert engine.stats().accepted_tokens > 0
