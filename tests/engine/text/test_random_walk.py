"""Twelve hundred random submits, ticks, cancels, evictions, failures over ten pages: nothing is lost, nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import DeadlineUnreachable, InvalidRequest, QueueFull
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextConfig, TextFinished, TextRequest
from diffserve.api.types import Cancelled, Failed
from diffserve.engine.text import TextEngine, TickBudget
from diffserve.runtime.kv import PageTable, PoolBusy
from diffserve.runtime.language import LanguageModel, load_language_model
from tests.device import DEVICE
from tests.engine.text.conftest import pages_of
from tests.engine.text.text_requests import greedy, token_ids_of
from tests.runtime.language import tiny

PROMPTS = [tiny.random_ids(length, seed=seed) for seed, length in enumerate((2, 4, 5, 9, 13, 17, 22, 29))]
PROMPTS += [[*PROMPTS[5][:12], *PROMPTS[3]], [*PROMPTS[5][:12], *PROMPTS[2]]]


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """One layer, so that a tick is cheap."""
    directory: Path = tiny.save(tmp_path_factory.mktemp("walk") / "llama", "llama", num_hidden_layers=1)
    return load_language_model(directory, dtype="float32", device=DEVICE)


class Walk:
    """An engine, a stranger who holds pages of the same pool, and dice."""

    def __init__(self, model: LanguageModel, seed: int, *, has_draft: bool, reads_late: bool) -> None:
        self.dice = random.Random(seed)
        pool = pages_of(*([model, model] if has_draft else [model]), num_pages=10)
        config = TextConfig(
            page_tokens=4, max_batch_tokens=24, max_sequences=6, max_waiting=12, num_draft_tokens=3, min_ngram=1
        )
        draft_model = model if has_draft else None
        self.engine = TextEngine(
            model, pool, config, draft_model=draft_model, clock=lambda: self.now_s, reads_late=reads_late
        )
        self.pool = pool
        self.now_s = 0.0
        self.stranger: list[PageTable] = []
        self.requests: dict[str, TextRequest] = {}
        self.ends: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.fails_next = False
        self.hook = model.network.get_input_embeddings().register_forward_pre_hook(self._maybe_fail)

    def _maybe_fail(self, module: Any, inputs: Any) -> None:
        if self.fails_next:
            raise ArithmeticError("the dice said so")

    def step(self) -> None:
        """One random deed."""
        deeds = [self.submit, self.tick, self.cancel, self.take, self.give, self.forget, self.fail, self.late]
        deed = self.dice.choices(deeds, weights=[20, 55, 6, 4, 6, 1, 2, 1])[0]
        self.counts[deed.__name__] += 1
        deed()

    def submit(self) -> None:
        width = self.dice.choice([{}, {}, {}, {"num_texts": 2}, {"num_texts": 3}, {"num_beams": 2}, {"num_beams": 3}])
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": self.dice.randint(1, 14)}
        if "num_beams" in width:
            settings |= width
        elif self.dice.random() < 0.3:
            settings |= {"temperature": 1.0, "seed": self.dice.randint(0, 5)}
        request = TextRequest(
            token_ids=tuple(self.dice.choice(PROMPTS)),
            params=SamplingParams(**settings),
            num_texts=width.get("num_texts", 1),
            speculation=self.dice.choice(["auto", "off", "prompt_lookup"]),
            deltas=self.dice.random() < 0.5,
            cache_salt=self.dice.choice([b"", b"", b"salt"]),
            deadline_s=self.dice.choice([None, None, None, 5.0]),
        )
        try:
            self.engine.submit(request)
            self.requests[request.request_id] = request
        except (QueueFull, InvalidRequest, DeadlineUnreachable) as error:  # the last on a busy machine
            self.counts[type(error).__name__] += 1

    def tick(self) -> None:
        self.now_s += 0.1
        budget = TickBudget(max_tokens=self.dice.choice([None, None, 3, 10]))
        for event in self.engine.tick(budget):
            if isinstance(event, TextFinished | Failed | Cancelled):
                assert event.request_id not in self.ends, "a request ended twice"
                self.ends[event.request_id] = event
        self.counts["unread"] += self.engine._unread is not None

    def cancel(self) -> None:
        live = [name for name in self.requests if name not in self.ends]
        if live:
            self.engine.cancel(self.dice.choice(live))

    def take(self) -> None:
        try:
            reserve = self.dice.randint(1, 12)
            self.stranger.append(self.pool.open("llm", range(reserve), b"stranger", reserve=reserve)[0])
        except PoolBusy:
            self.counts["busy"] += 1

    def give(self) -> None:
        if self.stranger:
            self.pool.close(self.stranger.pop(self.dice.randrange(len(self.stranger))))

    def forget(self) -> None:
        self.pool.forget("llm")

    def fail(self) -> None:
        self.fails_next = True
        self.tick()
        self.fails_next = False

    def late(self) -> None:
        self.now_s += 3.0

    def check(self) -> None:
        """Check the pool's totals: all held pages belong to the engine or to the other tenant."""
        stranger = {page for table in self.stranger for logical in table.pages for page in logical}
        self.engine.scheduler.check_integrity(other_pages=len(stranger))

    def finish(self) -> None:
        """Finish all requests and check that every page is free."""
        while self.stranger:
            self.give()
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.tick()
        self.hook.remove()
        assert set(self.ends) == set(self.requests)
        self.engine.check_integrity()
        assert self.pool.stats().held_pages == 0
        assert self.pool.stats().num_tables == 0


def check_answers(walk: Walk, model: LanguageModel) -> int:
    """Greedy texts that were finished are those that a quiet engine gives; returns how many were compared."""
    quiet = TextEngine.from_model(model, TextConfig(num_draft_tokens=0), pool_bytes=1 << 20)
    expected_by_request: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
    compared = 0
    for name, end in walk.ends.items():
        request = walk.requests[name]
        if isinstance(end, TextFinished) and request.params.is_greedy:
            key = (request.token_ids, request.params.max_tokens, request.params.num_beams)
            if key not in expected_by_request:
                beams = {"num_beams": key[2]} if key[2] > 1 else {}
                expected_by_request[key] = token_ids_of(quiet.generate(greedy(key[0], key[1], **beams))[0])
            assert [token_ids_of(end, index) for index in range(len(end.results))] == [expected_by_request[key]] * len(
                end.results
            )
            compared += 1
    return compared


def walk_for(model: LanguageModel, num_steps: int, seed: int, *, has_draft: bool, reads_late: bool) -> Walk:
    walk = Walk(model, seed, has_draft=has_draft, reads_late=reads_late)
    for _ in range(num_steps):
        walk.step()
        walk.check()
    walk.finish()
    return walk


WAYS = pytest.mark.parametrize(("has_draft", "reads_late"), [(False, False), (True, False), (False, True)])


@WAYS
def test_a_short_walk_keeps_the_books(has_draft: bool, reads_late: bool, smallest: LanguageModel) -> None:
    walk = walk_for(smallest, 300, seed=1, has_draft=has_draft, reads_late=reads_late)
    assert check_answers(walk, smallest) > 5
    assert (walk.counts["unread"] > 10) is reads_late


@pytest.mark.slow
@WAYS
def test_twelve_hundred_steps_keep_the_books(has_draft: bool, reads_late: bool, smallest: LanguageModel) -> None:
    walk = walk_for(smallest, 1200, seed=2, has_draft=has_draft, reads_late=reads_late)
    assert check_answers(walk, smallest) > 50
    assert walk.engine.stats().preemptions > 10
    assert walk.pool.stats().tenants["llm"].evicted_pages > 50
    kinds = Counter(type(end).__name__ for end in walk.ends.values())
    assert min(kinds[name] for name in ("TextFinished", "Failed", "Cancelled")) > 10
