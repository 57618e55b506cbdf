"""Beam search: the tokens of transformers' generate, and which beam each new one forks from."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from diffserve.api.errors import InvalidRequest, NumericalError
from diffserve.api.sampling_params import SamplingParams
from diffserve.runtime.decoding import BeamSearch, Hypothesis, SamplingState
from tests.runtime.decoding.tiny_lms import END, KINDS, VOCAB, next_logits, tiny_lm
from tests.runtime.decoding.word_constraints import word_constraint

PROMPTS = ([1, 5, 6, 7], [1, 40, 9], [12])
ENDS = [END, 17]


def search(model: Any, prompt: list[int], params: SamplingParams, count: int = 1, **extra: Any) -> list[Hypothesis]:
    """Run a beam search to its end, checking on the way that every beam is its parent and one token."""
    row = SamplingState(params, prompt, end_ids=extra.pop("end_ids", ENDS), constraint=extra.pop("constraint", None))
    beams = BeamSearch(row, **extra)
    for _ in range(params.max_tokens):
        before = [row.token_ids for row in beams.rows]
        fork = beams.step(next_logits(model, before))
        pairs = zip(fork.parents, fork.token_ids, strict=True)
        assert [row.token_ids for row in beams.rows] == [[*before[parent], token_id] for parent, token_id in pairs]
        if beams.is_done:
            return beams.best(count)
    raise AssertionError("the search did not end at max_tokens")


def reference_beams(
    model: Any, prompt: list[int], params: SamplingParams, count: int, **extra: Any
) -> list[tuple[list[int], float]]:
    output = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=params.num_beams,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        num_return_sequences=count,
        output_scores=True,
        return_dict_in_generate=True,
        **({"eos_token_id": ENDS} | extra),
    )
    return [
        (_ended(ids[len(prompt) :]), score)
        for ids, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True)
    ]


def _ended(ids: list[int]) -> list[int]:
    """Up to its end token: transformers fills shorter sequences up with more of them."""
    ends = [index + 1 for index, token_id in enumerate(ids) if token_id in ENDS]
    return ids[: ends[0]] if ends else ids


def assert_same(mine: list[Hypothesis], expected: list[tuple[list[int], float]]) -> None:
    assert [beam.token_ids for beam in mine] == [ids for ids, _ in expected]
    assert [beam.score for beam in mine] == pytest.approx([score for _, score in expected], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_tokens_and_scores_are_those_of_generate(kind: str, early_stopping: Any) -> None:
    lengths = set()
    pairs = zip((0, 0, 1, 1), (*PROMPTS, PROMPTS[1]), strict=True)
    for (seed, prompt), num_beams in itertools.product(pairs, (2, 5)):
        params = SamplingParams(
            temperature=0, num_beams=num_beams, early_stopping=early_stopping, max_tokens=12, length_penalty=1.0
        )
        model = tiny_lm(kind, seed)
        mine = search(model, prompt, params, count=num_beams)
        assert_same(mine, reference_beams(model, prompt, params, num_beams))
        lengths |= {len(beam.token_ids) for beam in mine}
    assert len(lengths) > 3, "texts must end at different places for this to say much"


@pytest.mark.parametrize("length_penalty", [-1.5, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_length_penalties_are_those_of_generate(length_penalty: float, early_stopping: Any) -> None:
    for prompt in PROMPTS:
        params = SamplingParams(
            temperature=0, num_beams=4, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=12
        )
        assert_same(search(tiny_lm("llama"), prompt, params, 4), reference_beams(tiny_lm("llama"), prompt, params, 4))


def test_never_waits_for_texts_that_length_could_still_make_better() -> None:
    probs = torch.zeros(8)
    probs[[END, 5, 6]] = torch.tensor([0.4, 0.35, 0.25])  # best finished: the end at once, then 5 and the end

    def num_steps(early_stopping: Any) -> int:
        params = SamplingParams(temperature=0, num_beams=2, max_tokens=30, early_stopping=early_stopping)
        beams = BeamSearch(SamplingState(params, [1], end_ids=[END]))
        while not beams.is_done:
            beams.step(probs.log().expand(len(beams.rows), -1))
        assert beams.best(2)[0].token_ids == [END]
        return beams.num_steps

    second_best = (math.log(0.35) + math.log(0.4)) / 2
    hopeless = next(length for length in range(1, 31) if length * math.log(0.35) / 30 <= second_best)
    assert (num_steps(True), num_steps(False), num_steps("never")) == (2, 2, hopeless)
    assert hopeless > 20


def test_penalties_and_least_lengths_are_those_of_generate() -> None:
    for prompt in PROMPTS:
        params = SamplingParams(temperature=0, num_beams=3, repetition_penalty=1.6, min_tokens=6, max_tokens=14)
        assert_same(search(tiny_lm("gpt2"), prompt, params, 3), reference_beams(tiny_lm("gpt2"), prompt, params, 3))


def test_without_end_tokens_every_text_has_full_length() -> None:
    params = SamplingParams(temperature=0, num_beams=3, max_tokens=5)
    mine = search(tiny_lm("llama"), PROMPTS[0], params, 3, end_ids=[])
    model = tiny_lm("llama")
    assert_same(mine, reference_beams(model, PROMPTS[0], params, 3, eos_token_id=[VOCAB + 1]))
    assert [len(beam.token_ids) for beam in mine] == [5, 5, 5]


def test_a_constraint_holds_in_every_beam_as_in_generate() -> None:
    words = [[5, 6], [5, 6, 7], [8], [9, 9, 10], [11]]
    constraint = word_constraint(words, words, end_ids=ENDS)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        state = constraint.start
        for token_id in ids.tolist()[len(PROMPTS[0]) :]:
            state = constraint.advance(state, token_id)
        return list(constraint.moves(state)) or [0]

    params = SamplingParams(temperature=0, num_beams=3, max_tokens=8)
    model = tiny_lm("gpt2")
    mine = search(model, PROMPTS[0], params, 3, constraint=constraint)
    assert_same(mine, reference_beams(model, PROMPTS[0], params, 3, prefix_allowed_tokens_fn=allowed))


def test_fewer_continuations_than_beams_do_no_harm() -> None:
    constraint = word_constraint([[5, 6], [7]], end_ids=[END])
    params = SamplingParams(temperature=0, num_beams=5, max_tokens=8)
    beams = search(tiny_lm("llama"), PROMPTS[0], params, 5, constraint=constraint, end_ids=[END])
    assert sorted(text.token_ids for text in beams[:2]) == [[5, 6, END], [7, END]]


def test_a_text_may_end_for_another_reason_than_a_token() -> None:
    params = SamplingParams(temperature=0, num_beams=3, max_tokens=10)

    def ends(ids: Any) -> bool:
        return len(ids) >= 3

    beams = search(tiny_lm("llama"), PROMPTS[0], params, 3, is_stopped=ends)
    assert beams
    assert all(len(text.token_ids) <= 3 for text in beams)


def test_a_shorter_context_ends_the_search_earlier() -> None:
    params = SamplingParams(temperature=0, num_beams=2, max_tokens=50)
    beams = search(tiny_lm("llama"), PROMPTS[0], params, 1, max_tokens=4, end_ids=[])
    assert len(beams[0].token_ids) == 4


def test_a_hypothesis_carries_logprobs_and_entropies_of_the_model() -> None:
    model, prompt = tiny_lm("llama"), PROMPTS[0]
    text = search(model, prompt, SamplingParams(temperature=0, num_beams=3, max_tokens=8, length_penalty=0.0))[0]
    ids = list(prompt)
    for choice in text.choices:
        expected = torch.distributions.Categorical(logits=next_logits(model, [ids])[0])
        assert choice.logprob == pytest.approx(float(expected.logits[choice.token_id]), abs=1e-4)
        assert choice.entropy == pytest.approx(float(expected.entropy()), abs=1e-4)
        ids.append(choice.token_id)
    assert text.score == pytest.approx(sum(choice.logprob for choice in text.choices), abs=1e-3)


def test_bad_logits_end_the_search_with_an_error() -> None:
    beams = BeamSearch(SamplingState(SamplingParams(temperature=0, num_beams=2), [1], end_ids=[END]))
    with pytest.raises(NumericalError, match="not finite"):
        beams.step(torch.full((1, VOCAB), float("nan")))


def test_more_beams_than_a_vocabulary_has_room_for_are_refused() -> None:
    row = SamplingState(SamplingParams(temperature=0, num_beams=2), [1], end_ids=range(9))
    with pytest.raises(InvalidRequest, match="a vocabulary of 8 is too small"):
        BeamSearch(row).step(torch.zeros(1, 8))


def test_lines_and_beams_must_be_as_many() -> None:
    beams = BeamSearch(SamplingState(SamplingParams(temperature=0, num_beams=2), [1], end_ids=[END]))
    with pytest.raises(ValueError, match=r"1 beams, done: False, take no logits \(2, 48\)"):
        beams.step(torch.zeros(2, VOCAB))
