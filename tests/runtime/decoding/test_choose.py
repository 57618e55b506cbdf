"""Choosing tokens: transformers' scores row by row, draws that know no neighbours, honest numbers about the choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffserve.api.errors import InvalidRequest, NumericalError
from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.decoding import Choice, SamplingState, choose
from diffserve.runtime.decoding.adjustments import _nucleus, adjust, filtered
from diffserve.runtime.decoding.sampling_state import Uniforms, draw
from tests.runtime.decoding.tiny_lms import END, KINDS, VOCAB, next_logits, tiny_lm
from tests.runtime.decoding.word_constraints import word_constraint

PROMPT = [1, 20, 21, 22, 20, 9]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_p": 0.0},
    {"top_k": 1000},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 1.3},
    {"min_tokens": 9, "temperature": 2.0},
    {"logit_bias": ((3, 4.0), (21, -100.0), (VOCAB + 5, 1.0)), "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3, "min_tokens": 4},
)


def numbers(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def choose_rows(logits: Tensor, rows: list[SamplingState]) -> list[Choice]:
    choices = choose(logits, rows)
    assert all(isinstance(choice, Choice) for choice in choices)
    return [choice for choice in choices if isinstance(choice, Choice)]


def their_run(settings: dict[str, Any]) -> Any:
    """Run transformers' sampling with these settings; return tokens, logits and processed scores of each step."""
    generate_kwargs = {"min_new_tokens" if name == "min_tokens" else name: value for name, value in settings.items()}
    if bias := generate_kwargs.pop("logit_bias", None):
        generate_kwargs["sequence_bias"] = {(token_id,): value for token_id, value in bias if token_id < VOCAB}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return tiny_lm("llama").generate(
            torch.tensor([PROMPT]),
            do_sample=True,
            max_new_tokens=12,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
            **({"top_k": 0} | generate_kwargs),
        )


def test_scores_of_a_mixed_batch_are_transformers_row_by_row() -> None:
    runs = [their_run(settings) for settings in SETTINGS]
    rows = [SamplingState(SamplingParams(**settings), PROMPT, end_ids=[END]) for settings in SETTINGS]
    alive = list(range(len(rows)))
    for step in range(12):
        alive = [index for index in alive if step < len(runs[index].scores)]
        batch = [rows[index] for index in alive]
        logits = torch.cat([runs[index].logits[step] for index in alive])
        actual = filtered(adjust(logits, batch), [row.params for row in batch])
        expected = torch.cat([runs[index].scores[step] for index in alive])
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        for index in alive:
            rows[index].append(int(runs[index].sequences[0, len(PROMPT) + step]))
    assert len(alive) >= 2


def test_top_p_after_top_k_keeps_what_transformers_keeps() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    params = [SamplingParams(top_k=3 + line % 20, top_p=0.05 + 0.9 * (line / 200)) for line in range(200)]
    logits = numbers(200, 64, seed=3)
    tied = (logits * 2).round() / 2  # many equal: which of them stay is chance in transformers, how many is not
    actual, found_tied = filtered(logits, params), filtered(tied, params)
    for line, row_params in enumerate(params):
        top_k, top_p = TopKLogitsWarper(row_params.top_k), TopPLogitsWarper(row_params.top_p)
        expected, expected_tied = (top_p(None, top_k(None, tensor[line : line + 1])) for tensor in (logits, tied))
        assert torch.equal(actual[line], expected[0])
        assert torch.equal(found_tied[line].sort().values, expected_tied[0].sort().values)


def test_top_p_of_a_large_vocabulary_keeps_what_transformers_keeps_without_sorting_all() -> None:
    from transformers import TopPLogitsWarper

    logits = numbers(24, 20_000, seed=4, scale=1.0)
    logits *= torch.linspace(0.5, 6, 24)[:, None]  # from spread over everything to a few tokens
    params = [SamplingParams(top_p=share) for share in (0.3, 0.9, 0.99, 0.0) * 6]
    actual = filtered(logits, params)
    for line, row_params in enumerate(params):
        assert torch.equal(actual[line], TopPLogitsWarper(row_params.top_p)(None, logits[line : line + 1])[0])
        assert torch.equal(actual[line], filtered(logits[line : line + 1], [row_params])[0])
    _, enough = _nucleus(logits, 1 - torch.tensor([[row_params.top_p] for row_params in params]))
    assert 0 < int(enough.sum()) < len(params), "both ways must be walked"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rows_say_what_generate_says(kind: str) -> None:
    model = tiny_lm(kind)
    prompts = [[1, 5, 6], [1, 40, 41, 42, 43], [7]]
    settings: list[dict[str, float]] = [{}, {"repetition_penalty": 1.4}, {"min_tokens": 16}]
    rows = [
        SamplingState(SamplingParams(temperature=0, max_tokens=20, **row_settings), ids, end_ids=[END])  # type: ignore[arg-type]
        for ids, row_settings in zip(prompts, settings, strict=True)
    ]
    while alive := [row for row in rows if row.finish_reason is None]:
        choices = choose_rows(next_logits(model, [row.token_ids for row in alive]), alive)
        for row, choice in zip(alive, choices, strict=True):
            row.append(choice.token_id)
    for row, ids, row_settings in zip(rows, prompts, settings, strict=True):
        generate_kwargs = {
            "min_new_tokens" if name == "min_tokens" else name: value for name, value in row_settings.items()
        }
        reference = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, **generate_kwargs)
        assert row.token_ids == reference[0].tolist()


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = SamplingState(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [1, 2])
    for token_id in (4, 4, 5):
        row.append(token_id)
    logits = numbers(1, 8)
    expected = logits.clone()
    expected[0, 4] -= 0.5 + 2 * 0.25
    expected[0, 5] -= 0.5 + 0.25
    torch.testing.assert_close(adjust(logits, [row]), expected)


def test_penalised_tokens_beyond_the_output_vocabulary_are_left_alone() -> None:
    row = SamplingState(SamplingParams(repetition_penalty=2.0), [1, 99])
    assert adjust(torch.ones(1, 8), [row]).tolist() == [[1, 0.5, 1, 1, 1, 1, 1, 1]]


def test_logits_are_not_changed_by_choosing() -> None:
    logits = numbers(3, VOCAB)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=1.5, top_k=4, top_p=0.5, min_p=0.1, min_tokens=2, seed=1)
    choose_rows(logits, [SamplingState(params, [1, 2], end_ids=[END])] * 3)
    assert torch.equal(logits, before)


def draws(rows: list[SamplingState], steps: int = 40) -> list[list[int]]:
    """Return the outputs of ``rows`` when each row's logits depend on its tokens alone."""
    for step in range(steps):
        logits = torch.stack([numbers(VOCAB, seed=1000 * row.token_ids[0] + step) for row in rows])
        for row, choice in zip(rows, choose_rows(logits, rows), strict=True):
            row.append(choice.token_id)
    return [row.output_ids for row in rows]


def drawing_rows() -> list[SamplingState]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0},
        {"temperature": 1.2, "top_k": 9},
        {"min_p": 0.01, "repetition_penalty": 1.2},
        {},
    ]
    return [
        SamplingState(SamplingParams(**row_settings, seed=index, max_tokens=99), [index])
        for index, row_settings in enumerate(settings)
    ]


def test_draws_do_not_depend_on_neighbours_or_place() -> None:
    together = draws(drawing_rows())
    backwards = draws(drawing_rows()[::-1])[::-1]
    alone = [draws([row])[0] for row in drawing_rows()]
    assert together == backwards == alone


def test_another_seed_draws_otherwise_and_the_same_seed_alike() -> None:
    def run(seed: int | None) -> list[int]:
        return draws([SamplingState(SamplingParams(seed=4), [1], seed=seed)])[0]

    assert run(None) == run(4) != run(5)


def test_without_a_seed_two_rows_differ() -> None:
    first, second = (SamplingState(SamplingParams(), [1]) for _ in range(2))
    assert first.uniforms.seed != second.uniforms.seed
    assert draws([first]) != draws([second])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_p": 0.85}, {"top_k": 3, "min_p": 0.2}])
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    from scipy.stats import chisquare

    params = SamplingParams(**settings)  # type: ignore[arg-type]
    logits = numbers(1, 12, scale=1.5)
    rows = [SamplingState(params, [1], seed=seed) for seed in range(6000)]
    choices = choose_rows(logits.expand(6000, -1), rows)
    probs = filtered(logits, [params]).softmax(-1)[0].double()
    counts = torch.bincount(torch.tensor([choice.token_id for choice in choices]), minlength=12)
    possible = probs > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], 6000 * probs[possible] / probs.sum()).pvalue > 1e-3


def test_a_token_of_weight_nought_is_never_drawn() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    almost_one = math.nextafter(1.0, 0.0)
    numbers_and_tokens = [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9, 3), (almost_one, 3)]
    lines = weights.expand(len(numbers_and_tokens), -1)
    assert draw(lines, [number for number, _ in numbers_and_tokens]) == [token_id for _, token_id in numbers_and_tokens]


def test_random_numbers_are_used_up_one_by_one_however_they_are_looked_at() -> None:
    looked_at, plain = Uniforms(3), Uniforms(3)
    expected = plain.take(100)
    outputs = []
    for count in (1, 40, 0, 7, 52):
        ahead = looked_at.peek(count + 5)
        outputs += looked_at.take(count)
        assert outputs[len(outputs) - count :] == ahead[:count]
    assert outputs == expected
    assert all(0 <= number < 1 for number in expected)


def test_logprobs_and_entropy_are_those_of_the_models_own_distribution() -> None:
    logits = numbers(2, VOCAB).bfloat16()
    params = [SamplingParams(temperature=0, repetition_penalty=5.0, logprobs=3), SamplingParams(top_k=2, logprobs=0)]
    rows = [SamplingState(row_params, list(range(VOCAB))) for row_params in params]
    model = torch.distributions.Categorical(logits=logits.float())
    for line, choice in enumerate(choose_rows(logits, rows)):
        assert choice.logprob == pytest.approx(float(model.logits[line, choice.token_id]), abs=1e-5)
        assert choice.entropy == pytest.approx(float(model.entropy()[line]), abs=1e-5)
    best = model.logits[0].topk(3)
    first, second = choose_rows(logits, rows)
    assert [token_id for token_id, _ in first.top] == best.indices.tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert second.top == ()


def test_entropy_is_nought_when_certain_and_the_logarithm_when_clueless() -> None:
    certain = torch.full((1, 10), -math.inf)
    certain[0, 4] = 0.0
    row = SamplingState(SamplingParams(temperature=0), [1])
    assert choose_rows(certain, [row])[0] == Choice(4, 0.0, 0.0)
    assert choose_rows(torch.zeros(1, 10), [row])[0].entropy == pytest.approx(math.log(10))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_cost_one_row_only(bad: float, temperature: float) -> None:
    logits = numbers(3, VOCAB)
    params = SamplingParams(temperature=temperature, seed=0)
    expected = choose_rows(logits, [SamplingState(params, [1]) for _ in range(3)])
    logits[1, 5] = bad
    first, second, third = choose(logits, [SamplingState(params, [1]) for _ in range(3)])
    assert isinstance(second, NumericalError)
    assert "not finite" in second.message
    assert (first, third) == (expected[0], expected[2])


def test_a_row_that_may_say_nothing_is_an_error() -> None:
    logits = numbers(2, VOCAB)
    logits[0, 7] = -math.inf
    constraint = word_constraint([[7]], end_ids=[END])
    for temperature in (0.0, 1.0):
        rows = [
            SamplingState(SamplingParams(temperature=temperature), [1], constraint=row_constraint)
            for row_constraint in (constraint, None)
        ]
        stuck, free = choose(logits, rows)
        assert isinstance(stuck, NumericalError)
        assert isinstance(free, Choice)


def test_lines_and_rows_must_be_as_many() -> None:
    with pytest.raises(ValueError, match=r"1 rows with 1 drafts take 1 lines of logits, not \(2, 48\)"):
        choose(numbers(2, VOCAB), [SamplingState(SamplingParams(), [1])])


def test_no_rows_are_no_choices() -> None:
    assert choose(torch.empty(0, VOCAB), []) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
        SamplingState(SamplingParams(), [])


def test_a_row_says_why_it_is_finished() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(9,))

    def after(*token_ids: int) -> str | None:
        row = SamplingState(params, [9], end_ids=[END])
        for token_id in token_ids:
            row.append(token_id)
        return row.finish_reason

    assert [after(), after(5), after(9), after(5, END), after(5, 5, 5), after(5, 5, END)] == [
        None,
        None,
        "stop",
        "stop",
        "length",
        "stop",
    ]


def test_a_fork_goes_its_own_way() -> None:
    row = SamplingState(SamplingParams(repetition_penalty=2.0), [1, 2])
    fork = row.fork()
    fork.append(5)
    assert (row.token_ids, fork.token_ids) == ([1, 2], [1, 2, 5])
    assert adjust(torch.ones(2, 8), [row, fork])[:, 5].tolist() == [1.0, 0.5]
