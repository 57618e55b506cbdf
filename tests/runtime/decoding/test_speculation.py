"""Speculative decoding: the same tokens, or the same distribution, in fewer steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from diffserve.api.errors import ConfigError, NumericalError
from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.decoding import Choice, PromptLookup, SamplingState, TokenConstraint, accept, choose, draft_next
from diffserve.runtime.decoding.adjustments import distribution
from tests.runtime.decoding.tiny_lms import END, KINDS, all_logits, next_logits, tiny_lm
from tests.runtime.decoding.word_constraints import word_constraint

SIZE = 6  # tokens of the little language below: the next token depends on the last one alone
TEXTS = 3000
TOKENS = 3


def table(seed: int) -> Tensor:
    """(SIZE, SIZE) logits of the next token after each token."""
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 1.2


MODEL, DRAFTER = table(0), table(1)


def accepted(logits: Tensor, rows: Sequence[SamplingState], *args: Any) -> list[list[Choice]]:
    results = accept(logits, rows, *args)
    assert not any(isinstance(result, NumericalError) for result in results)
    return [result for result in results if isinstance(result, list)]


def take(row: SamplingState, choices: list[Choice]) -> None:
    for choice in choices:
        if row.finish_reason is None:
            row.append(choice.token_id)


def new_rows(params: SamplingParams, first_seed: int = 0) -> list[SamplingState]:
    return [SamplingState(params, [index % SIZE], seed=first_seed + index) for index in range(TEXTS)]


def model_lines(rows: Sequence[SamplingState], drafts: Sequence[Sequence[int]]) -> Tensor:
    lasts = [token_id for row, draft in zip(rows, drafts, strict=True) for token_id in (row.token_ids[-1], *draft)]
    return MODEL[lasts]


def looked_up(rows: list[SamplingState]) -> None:
    """Drafts that have nothing to do with the model: always 1, 2."""
    drafts = [row.crop([1, 2]) for row in rows]
    for row, choices in zip(rows, accepted(model_lines(rows, drafts), rows, drafts), strict=True):
        take(row, choices)


def drafted(rows: list[SamplingState]) -> None:
    """Drafts of two tokens drawn from another model."""
    ahead = [row.fork() for row in rows]
    drafts: list[list[int]] = [[] for _ in rows]
    probs = []
    for _ in range(2):
        tokens, step_probs = draft_next(DRAFTER[[row.token_ids[-1] for row in ahead]], ahead)
        probs.append(step_probs)
        for row, draft, token_id in zip(ahead, drafts, tokens, strict=True):
            row.append(token_id)
            draft.append(token_id)
    drafts = [row.crop(draft) for row, draft in zip(rows, drafts, strict=True)]
    stacked = torch.stack(probs, 1)  # (rows, 2, SIZE)
    cut = [stacked[index, : len(draft)] for index, draft in enumerate(drafts)]
    for row, choices in zip(rows, accepted(model_lines(rows, drafts), rows, drafts, cut), strict=True):
        take(row, choices)


def plain(rows: list[SamplingState]) -> None:
    for row, choice in zip(rows, choose(MODEL[[row.token_ids[-1] for row in rows]], rows), strict=True):
        assert isinstance(choice, Choice)
        row.append(choice.token_id)


def expected_share(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each text of TOKENS tokens, over the mix of first tokens."""
    step = distribution(MODEL, [params] * SIZE).double()
    step /= step.sum(-1, keepdim=True)
    shares: dict[tuple[int, ...], float] = {}
    for first, *tokens in itertools.product(range(SIZE), repeat=TOKENS + 1):
        share = 1 / SIZE
        for last, token_id in itertools.pairwise([first, *tokens]):
            share *= float(step[last, token_id])
        shares[tuple(tokens)] = shares.get(tuple(tokens), 0.0) + share
    return shares


@pytest.mark.parametrize("advance", [plain, looked_up, drafted])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}])
def test_texts_are_distributed_as_the_model_says(
    advance: Callable[[list[SamplingState]], None], settings: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=TOKENS, **settings)  # type: ignore[arg-type]
    rows = new_rows(params, first_seed=10_000)
    while alive := [row for row in rows if row.finish_reason is None]:
        advance(alive)
    text_counts = Counter(tuple(row.output_ids) for row in rows)
    shares = expected_share(params)
    likely = [text for text, share in shares.items() if share * TEXTS >= 5]
    remainder = 1 - sum(shares[text] for text in likely)
    counts = [text_counts[text] for text in likely] + [TEXTS - sum(text_counts[text] for text in likely)]
    expected = [shares[text] * TEXTS for text in likely] + [remainder * TEXTS]
    assert all(shares[text] > 0 for text in text_counts)
    keep = [index for index, count in enumerate(expected) if count > 1e-3]
    assert chisquare([counts[i] for i in keep], [expected[i] for i in keep]).pvalue > 1e-3


def test_a_drafted_token_is_accepted_as_often_as_the_models_agree() -> None:
    params = SamplingParams(max_tokens=50)
    rows = new_rows(params)
    tokens, probs = draft_next(DRAFTER[[row.token_ids[-1] for row in rows]], rows)
    drafts = [[token_id] for token_id in tokens]
    choices = accepted(model_lines(rows, drafts), rows, drafts, [line[None] for line in probs])
    overlap = torch.minimum(MODEL.softmax(-1), DRAFTER.softmax(-1)).sum(-1).mean()
    assert sum(len(row_choices) == 2 for row_choices in choices) / TEXTS == pytest.approx(float(overlap), abs=0.03)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 12},
    {"seed": 3},
    {"seed": 4, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"seed": 5, "top_k": 8, "repetition_penalty": 1.1, "min_tokens": 9},
)


def finished_without_drafts(model: Any, rows: list[SamplingState]) -> list[list[int]]:
    while alive := [row for row in rows if row.finish_reason is None]:
        for row, choice in zip(alive, choose(next_logits(model, [row.token_ids for row in alive]), alive), strict=True):
            assert isinstance(choice, Choice)
            row.append(choice.token_id)
    return [row.output_ids for row in rows]


def finished_with_drafts(
    model: Any, rows: list[SamplingState], propose: Callable[[SamplingState], list[int]]
) -> tuple[list[list[int]], int]:
    """Return the outputs and the number of model calls."""
    num_calls = 0
    while alive := [row for row in rows if row.finish_reason is None]:
        drafts = [row.crop(propose(row)) for row in alive]
        lines = [
            all_logits(model, [*row.token_ids, *draft], len(draft) + 1)
            for row, draft in zip(alive, drafts, strict=True)
        ]
        num_calls += len(alive)
        for row, choices in zip(alive, accepted(torch.cat(lines), alive, drafts), strict=True):
            for choice in choices:
                row.append(choice.token_id)
    return [row.output_ids for row in rows], num_calls


def lm_rows(constraint: TokenConstraint | None = None) -> list[SamplingState]:
    return [
        SamplingState(
            SamplingParams(max_tokens=24, **row_settings), [1, 5 + index, 6], end_ids=[END], constraint=constraint
        )
        for index, row_settings in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_looked_up_draft_changes_no_token_of_a_mixed_batch(kind: str) -> None:
    model = tiny_lm(kind)
    expected = finished_without_drafts(model, lm_rows())
    right = {tuple(row.token_ids): tokens for row, tokens in zip(lm_rows(), expected, strict=True)}

    def half_right(row: SamplingState) -> list[int]:
        tokens = right[tuple(row.token_ids[: row.num_prompt_tokens])]
        ahead = tokens[row.num_output_tokens : row.num_output_tokens + 5]
        return [*ahead[:3], *((token_id + 1) % 40 for token_id in ahead[3:])]

    outputs, num_calls = finished_with_drafts(model, lm_rows(), half_right)
    assert outputs == expected
    assert num_calls <= sum(map(len, expected)) / 2

    lookup = PromptLookup(num_draft_tokens=4)
    outputs, num_calls = finished_with_drafts(model, lm_rows(), lambda row: lookup.propose(row.token_ids))
    assert outputs == expected
    assert num_calls <= sum(map(len, expected))


def test_greedy_with_lookup_is_generate_and_takes_fewer_calls_where_text_repeats() -> None:
    model = tiny_lm("llama", 1)
    params = SamplingParams(temperature=0, max_tokens=60)
    rows = [SamplingState(params, [1, first, 6], end_ids=[END]) for first in (5, 9, 30)]
    lookup = PromptLookup()
    outputs, num_calls = finished_with_drafts(model, rows, lambda row: lookup.propose(row.token_ids))
    for row in rows:
        prompt = torch.tensor([row.token_ids[:3]])
        assert model.generate(prompt, do_sample=False, max_new_tokens=60)[0].tolist() == row.token_ids
    assert num_calls < sum(map(len, outputs))


def test_a_constraint_and_its_forced_tokens_change_no_token() -> None:
    words = [[5, 6, 7], [8], [9, 10, 11, 12]]
    constraint = word_constraint(words, words, end_ids=[END])
    model = tiny_lm("gpt2")
    expected = finished_without_drafts(model, lm_rows(constraint))
    outputs, num_calls = finished_with_drafts(
        model, lm_rows(constraint), lambda row: constraint.forced(row.state, 8) or [8, 40]
    )
    assert outputs == expected
    assert num_calls < sum(map(len, expected))


def test_no_text_follows_a_stop_token() -> None:
    logits = torch.full((4, 8), -5.0)
    logits[:, 4] = 5.0
    for temperature in (0.0, 1.0):
        row = SamplingState(SamplingParams(temperature=temperature, seed=0), [1], end_ids=[4])
        (choices,) = accepted(logits, [row], [[4, 4, 4]])
        assert [choice.token_id for choice in choices] == [4]
    q = torch.zeros(3, 8)
    q[:, 4] = 1.0
    (choices,) = accepted(logits, [SamplingState(SamplingParams(top_k=1), [1], end_ids=[4])], [[4, 4, 4]], [q])
    assert [choice.token_id for choice in choices] == [4]


def test_each_choice_of_a_draft_tells_of_its_own_line() -> None:
    logits = table(7)[:3]
    greedy = logits.argmax(-1).tolist()
    row = SamplingState(SamplingParams(temperature=0, logprobs=2), [1])
    (choices,) = accepted(logits, [row], [greedy[:2]])
    assert [choice.token_id for choice in choices] == greedy
    for line, choice in enumerate(choices):
        assert choice.logprob == pytest.approx(float(logits[line].log_softmax(-1).max()), abs=1e-5)
        assert choice.top[0] == (choice.token_id, choice.logprob)
    assert row.output_ids == []


def test_bad_logits_after_a_refused_token_do_no_harm() -> None:
    logits = table(7)[:3].clone()
    wrong = (int(logits[0].argmax()) + 1) % SIZE
    logits[1:] = float("nan")
    row = SamplingState(SamplingParams(temperature=0), [1])
    (choices,) = accepted(logits, [row], [[wrong, 0]])
    assert len(choices) == 1
    (spoilt,) = accept(logits, [row], [[int(logits[0].argmax()), 0]])
    assert isinstance(spoilt, NumericalError)


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    row = SamplingState(SamplingParams(), [1])
    with pytest.raises(ConfigError, match="must share the model's vocabulary"):
        accept(MODEL[:2], [row], [[1]], [torch.ones(1, SIZE + 1) / SIZE])


def test_a_greedy_drafter_puts_everything_on_one_token() -> None:
    rows = [SamplingState(SamplingParams(temperature=0), [1]), SamplingState(SamplingParams(seed=1), [1])]
    tokens, probs = draft_next(DRAFTER[:2], rows)
    assert tokens[0] == int(DRAFTER[0].argmax())
    assert probs[0].tolist() == [float(token_id == tokens[0]) for token_id in range(SIZE)]
    torch.testing.assert_close(probs[1], DRAFTER[1].softmax(-1))


def test_a_draft_is_no_longer_than_the_remaining_token_limit() -> None:
    row = SamplingState(SamplingParams(max_tokens=4), [1], end_ids=[END])
    assert row.crop([5, 6, 7, 8, 9]) == [5, 6, 7]
    assert row.crop([5, END, 7]) == [5, END]
    row.append(5)
    row.append(6)
    row.append(7)
    assert row.crop([5]) == []


def test_the_longest_ending_is_looked_up_first() -> None:
    #        1 2 3 stands at 0, 2 3 also at 4
    tokens = [1, 2, 3, 50, 2, 3, 60, 61, 62, 1, 2, 3]
    assert PromptLookup(num_draft_tokens=2, max_ngram=3).propose(tokens) == [50, 2]
    assert PromptLookup(num_draft_tokens=2, max_ngram=2).propose(tokens) == [60, 61]
    assert PromptLookup(num_draft_tokens=0).propose(tokens) == []
    assert PromptLookup(min_ngram=3, max_ngram=3).propose([1, 2, 9, 1, 2]) == []


def test_a_place_with_a_whole_draft_after_it_is_preferred() -> None:
    assert PromptLookup(num_draft_tokens=3, max_ngram=1).propose([7, 1, 2, 3, 7, 4, 7]) == [1, 2, 3]
    assert PromptLookup(num_draft_tokens=2, max_ngram=1).propose([7, 1, 2, 3, 7, 4, 7]) == [4, 7]
    assert PromptLookup(num_draft_tokens=9, max_ngram=1).propose([5, 5, 5]) == [5, 5]


def slow_lookup(tokens: list[int], count: int, max_ngram: int, min_ngram: int) -> list[int]:
    for ngram in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        ends = [end for end in range(ngram, len(tokens)) if tokens[end - ngram : end] == tokens[-ngram:]]
        roomy = [end for end in ends if end + count <= len(tokens)]
        if ends:
            end = roomy[-1] if roomy else ends[0]
            return tokens[end : end + count]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 256, 65536, 1 << 40]), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_lookup_finds_what_a_slow_search_finds(tokens: list[int], count: int, longest: int, shortest: int) -> None:
    longest = max(longest, shortest)
    lookup = PromptLookup(num_draft_tokens=count, max_ngram=longest, min_ngram=shortest)
    assert lookup.propose(tokens) == slow_lookup(tokens, count, longest, shortest)


@pytest.mark.parametrize("wrong", [{"num_draft_tokens": -1}, {"min_ngram": 0}, {"min_ngram": 4}])
def test_a_lookup_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="prompt lookup with"):
        PromptLookup(**wrong)


def test_a_draft_under_a_constraint_is_forced_voted_or_usual() -> None:
    words = [[1], [2], [3, 4, 5], [6]]
    constraint = word_constraint(words, words, end_ids=[END])
    lookup = PromptLookup(num_draft_tokens=5, max_ngram=2)
    start = constraint.start

    def drafted(prompt: list[int], output_ids: list[int]) -> list[int]:
        state = start
        for token_id in output_ids:
            state = constraint.advance(state, token_id)
        return lookup.propose_allowed([*prompt, *output_ids], constraint, state)

    assert drafted([50, 3, 4, 5, 6, 51], [3]) == [4, 5, 6], "after 6 came 51, which may not be said"
    assert drafted([1, 50, 1, 50, 1, 2], [1]) == [2, 1, 2, 1, 2], "places that say what is not allowed have no vote"
    assert drafted([1, 2, 1, 6, 1, 3], [1]) == [], "a third of the votes is too little"
    assert drafted([2, 1, 6, 50, 1, 2, 50, 1, 2], [2, 1]) == [6], "a longer ending is believed before a shorter"
    assert drafted([50], [1]) == []
    constraint.observe([[1, 6, 6, END]] * 3)
    assert drafted([50], [1]) == [6] * 5, "what is usual where nothing was said before"
    assert drafted([1, 2, 50], [1])[0] == 2, "what was said before is believed first"
    assert PromptLookup(num_draft_tokens=0).propose_allowed([1, 2, 1], constraint, start) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=25), st.integers(0, 6), st.integers(1, 4))
def test_drafts_under_a_constraint_are_allowed_by_it(prompt: list[int], count: int, longest: int) -> None:
    words = [[1, 2], [3], [4, 5, 6]]
    constraint = word_constraint(words, words, end_ids=[7])
    constraint.observe([[1, 2, 3, 7], [3, 3, 4, 5, 6, 7]])
    draft = PromptLookup(num_draft_tokens=count, max_ngram=longest).propose_allowed(
        prompt, constraint, constraint.start
    )
    assert len(draft) <= count
    assert constraint.num_allowed(constraint.start, draft) == len(draft)
