"""A tick of texts as a GPU would meet it: the real engine on the meta device. Nothing waits, and transfers are few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextRequest
from diffserve.engine.text import TextEngine
from diffserve.runtime.decoding.adjustments import filtered
from diffserve.runtime.dry_run import DryRun, ListIndices, Work, dry_run
from diffserve.runtime.language import load_language_model
from tests.engine.text.text_requests import greedy
from tests.runtime.language import tiny


def open_engine(directory: Path, kind: str = "llama", *, num_draft_tokens: int = 0, **changes: Any) -> TextEngine:
    """Return an engine on a tiny model's shapes."""
    model = load_language_model(tiny.save(directory / kind, kind, **changes), dtype="float32", device="meta")
    return TextEngine.from_model(model, TextConfig(num_draft_tokens=num_draft_tokens), pool_bytes=1 << 20)


def ticks(engine: TextEngine, count: int) -> list[Work]:
    """Return the work of each of ``count`` ticks; fail if a text waits or two kinds are mixed."""
    tick_work = []
    for _ in range(count):
        with torch.inference_mode(), DryRun() as counted, ListIndices(counted.work):
            events = engine.tick()
        assert not [event for event in events if type(event).__name__ == "Failed"]
        tick_work.append(counted.work)
    return tick_work


def drawn(prompt_ids: range, **params: Any) -> TextRequest:
    """Return a request with random sampling."""
    return TextRequest(token_ids=tuple(prompt_ids), params=SamplingParams(max_tokens=20, seed=1, **params))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_no_tick_waits_for_the_device_and_transfers_are_few(tmp_path: Path, kind: str) -> None:
    engine = open_engine(tmp_path, kind)
    engine.submit(greedy(range(1, 50)))
    engine.submit(drawn(range(3, 90), temperature=0.8, top_p=0.9, top_k=7))
    ticks(engine, 1)
    engine.submit(greedy(range(40), min_tokens=2))  # two decode, one reads its prompt
    mixed, *steady = ticks(engine, 6)
    assert mixed.copies <= 8
    assert engine._unread is not None, "the last tick's tokens are on the device, and the next one goes on from them"
    for work in steady[3:]:
        assert work.copies <= 6, "pages, tokens, padding; the drawn row, its filters and its number"
        assert work.fetches == 1, "all that is told of the tokens"
        assert len(work.kernels) <= {"llama": 150, "gemma2": 220}[kind]


def test_a_greedy_tick_is_three_transfers_whatever_the_number_of_layers(tmp_path: Path) -> None:
    copies = set()
    for num_layers in (1, 3):
        engine = open_engine(tmp_path / str(num_layers), num_hidden_layers=num_layers)
        for length in (20, 31, 50):
            engine.submit(greedy(range(length)))
        copies |= {(work.copies, work.fetches) for work in ticks(engine, 5)[3:]}
    assert copies == {(3, 1)}


def test_drafts_beams_and_penalties_wait_only_for_their_inputs(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, num_draft_tokens=3)
    engine.submit(greedy([5, 6, 7] * 6))  # tokens on meta are always 1, so a draft is found soon
    ticks(engine, 4)
    (work,) = ticks(engine, 1)
    assert engine.last_tick is not None
    assert engine.last_tick.rows[0][3] > 0
    assert work.fetches == 2, "the tokens, and then what is told of those that are right"
    other = open_engine(tmp_path / "other")
    other.submit(greedy(range(9), num_beams=3, max_tokens=6))
    other.submit(drawn(range(20), temperature=1.0, repetition_penalty=1.2, min_p=0.1, logprobs=3))
    assert [work.fetches for work in ticks(other, 4)] == [2] * 4


def test_top_p_of_a_large_vocabulary_asks_nobody_whether_it_must_sort() -> None:
    large = torch.empty((2, 10_000), device="meta")
    work = dry_run(lambda: filtered(large, [SamplingParams(top_p=0.9), SamplingParams()]))
    assert (work.copies, work.fetches) == (2, 0)
