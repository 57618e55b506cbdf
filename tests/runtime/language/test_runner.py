"""Logits over pages against transformers' own, for every class that is served."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from diffserve.api.errors import InvalidRequest
from diffserve.runtime.kv import PagePool, PageTable, PageTableError
from diffserve.runtime.language import LanguageModel, LanguageRunner, TokenChunk
from diffserve.runtime.language.model import few_lengths
from tests.runtime.language import tiny
from tests.runtime.language.conftest import Load

KINDS = (*tiny.KINDS, *tiny.OTHER_KINDS)


def make_runner(model: LanguageModel, page_tokens: int = 4) -> LanguageRunner:
    pool = PagePool.for_specs(1 << 20, [model.spec("llm", page_tokens=page_tokens)], device=model.device)
    pool.arena.data.fill_(255)  # every float is NaN until it is written
    return LanguageRunner(model, pool, page_tokens=page_tokens)


def opened(runner: LanguageRunner, num_tokens: int) -> PageTable:
    return runner.pool.open(runner.tenant, (), reserve=num_tokens)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_all_lengths_in_chunks_give_the_plain_logits(kind: str, language: Load) -> None:
    model = language(kind)
    runner = make_runner(model)
    texts = [tiny.random_ids(length, seed=length) for length in (1, 5, 23, 40, 64)]
    tables = [opened(runner, len(text)) for text in texts]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]
    at = [0] * len(texts)
    for step in range(40):
        live = [index for index, text in enumerate(texts) if at[index] < len(text)]
        if not live:
            break
        ends = {index: min(at[index] + (1, 3, 20, 7)[(index + step) % 4], len(texts[index])) for index in live}
        chunks = [TokenChunk(tables[n], at[n], texts[n][at[n] : ends[n]], num_logits=ends[n] - at[n]) for n in live]
        lines = runner.forward(chunks).split([ends[n] - at[n] for n in live])
        for index, line in zip(live, lines, strict=True):
            outputs[index].append(line)
            at[index] = ends[index]
    assert at == [len(text) for text in texts]
    for text, pieces in zip(texts, outputs, strict=True):
        torch.testing.assert_close(torch.cat(pieces), model.plain_logits(text), rtol=1e-4, atol=1e-4)


def test_logits_are_given_only_where_asked_in_the_order_of_the_chunks(language: Load) -> None:
    model = language("llama")
    runner = make_runner(model)
    texts = [tiny.random_ids(length, seed=length) for length in (20, 6, 1, 30)]
    order = (0, 2, 1, 5)
    chunks = [TokenChunk(opened(runner, len(ids)), 0, ids, num) for ids, num in zip(texts, order, strict=True)]
    logits = runner.forward(chunks)
    assert logits.shape == (sum(order), tiny.VOCAB_SIZE)
    ends = list(accumulate(order))
    for ids, num, end in zip(texts, order, ends, strict=True):
        torch.testing.assert_close(
            logits[end - num : end], model.plain_logits(ids)[len(ids) - num :], rtol=1e-4, atol=1e-4
        )


def test_a_forward_that_only_fills_pages_gives_no_logits(language: Load) -> None:
    runner = make_runner(language("llama"))
    assert runner.forward([TokenChunk(opened(runner, 5), 0, [1, 2, 3, 4, 5], 0)]).shape == (0, tiny.VOCAB_SIZE)


def test_pages_written_once_serve_another_sequence_with_the_same_beginning(language: Load) -> None:
    model = language("qwen3")
    runner = make_runner(model)
    first = tiny.random_ids(22, seed=1)
    table = opened(runner, len(first))
    runner.forward([TokenChunk(table, 0, first)])
    runner.pool.commit(table, first)
    runner.pool.close(table)
    second = [*first[:14], *tiny.random_ids(5, seed=2)]
    table, num_cached = runner.pool.open("llm", second, reserve=len(second))
    assert num_cached == 12
    logits = runner.forward([TokenChunk(table, num_cached, second[num_cached:])])
    torch.testing.assert_close(logits[0], model.plain_logits(second)[-1], rtol=1e-4, atol=1e-4)


def test_a_wrong_draft_that_is_cut_off_leaves_no_trace(language: Load) -> None:
    model = language("gpt2")
    runner = make_runner(model)
    text, wrong = tiny.random_ids(20, seed=1), tiny.random_ids(6, seed=2)
    table = opened(runner, 26)
    runner.forward([TokenChunk(table, 0, text)])
    runner.forward([TokenChunk(table, 20, wrong, num_logits=6)])
    runner.pool.truncate(table, 20)
    right = tiny.random_ids(3, seed=3)
    runner.pool.reserve(table, 23)
    logits = runner.forward([TokenChunk(table, 20, right)])
    torch.testing.assert_close(logits[0], model.plain_logits([*text, *right])[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("token_ids", [[3, tiny.VOCAB_SIZE], [-1]])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(token_ids: list[int], language: Load) -> None:
    runner = make_runner(language("llama"))
    with pytest.raises(InvalidRequest, match=f"vocabulary of {tiny.VOCAB_SIZE}"):
        runner.forward([TokenChunk(opened(runner, 4), 0, token_ids)])


def test_a_sequence_longer_than_the_context_is_refused(language: Load) -> None:
    runner = make_runner(language("gpt2"))
    ids = tiny.random_ids(tiny.CONTEXT_TOKENS + 1, seed=0)
    with pytest.raises(InvalidRequest, match=f"context of {tiny.CONTEXT_TOKENS}"):
        runner.forward([TokenChunk(opened(runner, len(ids)), 0, ids)])


def test_tokens_without_reserved_room_are_refused(language: Load) -> None:
    runner = make_runner(language("llama"))
    with pytest.raises(PageTableError, match="reserve"):
        runner.forward([TokenChunk(opened(runner, 4), 0, [1, 2, 3, 4, 5])])


@pytest.mark.parametrize(("token_ids", "num_logits"), [([], 0), ([1, 2], 3), ([1], -1)])
def test_a_chunk_that_makes_no_sense_cannot_be_built(token_ids: list[int], num_logits: int, language: Load) -> None:
    runner = make_runner(language("llama"))
    with pytest.raises(ValueError, match="logits"):
        TokenChunk(opened(runner, 4), 0, token_ids, num_logits)


def test_the_same_tenant_cannot_be_two_models(language: Load) -> None:
    runner = make_runner(language("llama"))
    with pytest.raises(ValueError, match="another spec"):
        LanguageRunner(language("qwen2"), runner.pool)


def test_calls_of_all_lengths_reach_the_network_in_a_few_lengths_for_each_costs_a_kernel_of_its_own(
    language: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language("llama")
    runner = make_runner(model)
    sizes: set[int] = set()
    inner = model.network.model.forward

    def forward(*arguments: Any, **kwargs: Any) -> Any:
        sizes.add(kwargs["input_ids"].shape[1])
        return inner(*arguments, **kwargs)

    monkeypatch.setattr(model.network.model, "forward", forward)
    for length in range(1, 65):
        table = opened(runner, length)
        ids = tiny.random_ids(length, seed=length)
        logits = runner.forward([TokenChunk(table, 0, ids)])
        assert torch.isfinite(logits).all()
        runner.pool.close(table)
    assert len(sizes) <= 16 + 8 + 8, sorted(sizes)
    assert max(sizes) == 64


def test_no_call_grows_by_more_than_an_eighth() -> None:
    lengths = {num: few_lengths(num) for num in range(1, 5000)}
    assert all(num <= length <= num * 9 / 8 for num, length in lengths.items())
    assert len(set(lengths.values())) < 100
