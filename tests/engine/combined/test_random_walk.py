"""Random pictures, texts, wishes, cancels, failures over one small pool: every request ends once, no page leaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest, QueueFull
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.api.types import DiffusionParams, GenerationRequest, RewriteOptions
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.runtime import DiffusionModel
from diffserve.runtime.language import LanguageModel
from tests.engine.combined.conftest import MakeStudio
from tests.engine.combined.test_isolation import tight_bytes

PROMPTS = ("a red fox", "a cat on the moon", "a dog", "the fox " * 30)


class Walk:
    """A studio, dice, and how every request ended."""

    def __init__(self, studio: CombinedEngine, seed: int) -> None:
        self.studio = studio
        self.dice = random.Random(seed)
        self.submitted: list[str] = []
        self.ends: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.fails_next = False

    def maybe_fail(self, *_: Any) -> None:
        if self.fails_next:
            raise ArithmeticError("the dice said so")

    def step(self) -> None:
        deeds = [self.paint, self.write, self.rewrite, self.tick, self.cancel, self.fail, self.break_a_tick]
        deed = self.dice.choices(deeds, weights=[6, 8, 5, 70, 4, 1, 0.2])[0]
        self.counts[deed.__name__] += 1
        deed()

    def paint(self) -> None:
        self.submit(
            self.studio.submit,
            GenerationRequest(
                prompt=self.dice.choice(PROMPTS),
                negative_prompt=self.dice.choice(("", "", "the moon")),
                num_images=self.dice.randint(1, 2),
                seed=1,
                width_px=64,
                height_px=64,
                diffusion=DiffusionParams(
                    num_steps=self.dice.randint(1, 3), guidance_scale=self.dice.choice((1.0, 5.0))
                ),
                rewriting=self.dice.choice((None, None, RewriteOptions())),
            ),
        )

    def write(self) -> None:
        num_tokens = self.dice.randint(1, 60)
        params = SamplingParams(seed=1, max_tokens=num_tokens, min_tokens=num_tokens)
        prompt = self.dice.choice(("x" * 50, "x" * 50 + "y" * 30, "z" * 20))
        salt = self.dice.choice((b"", b"key"))
        texts = self.dice.randint(1, 3)
        self.submit(self.studio.submit, TextRequest(prompt=prompt, params=params, num_texts=texts, cache_salt=salt))

    def rewrite(self) -> None:
        request = RewriteRequest(wish=self.dice.choice(PROMPTS), num_prompts=self.dice.randint(1, 3))
        self.submit(self.studio.submit, request)

    def submit(self, submit: Any, request: Any) -> None:
        try:
            submit(request)
            self.submitted.append(request.request_id)
        except (QueueFull, InvalidRequest) as error:
            self.counts[type(error).__name__] += 1

    def tick(self) -> None:
        for event in self.studio.tick():
            assert event.request_id in self.submitted, "news of a request that nobody made"
            assert event.request_id not in self.ends, "news of a request that is over"
            if isinstance(event, CombinedEngine.terminal):
                self.ends[event.request_id] = type(event).__name__

    def cancel(self) -> None:
        live = [name for name in self.submitted if name not in self.ends]
        if live:
            self.studio.cancel(self.dice.choice(live))

    def fail(self) -> None:
        self.fails_next = True
        self.tick()
        self.fails_next = False

    def break_a_tick(self) -> None:
        """Make the scheduler raise once, before it changes anything."""
        assert self.studio.texts is not None
        scheduler: Any = self.dice.choice([self.studio.texts.scheduler, self.studio.engine.scheduler])
        scheduler.expire = self.maybe_fail
        self.fail()
        del scheduler.expire

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.studio.has_work:
                break
            self.tick()
        assert set(self.ends) == set(self.submitted)


@pytest.fixture
def walk(make_studio: MakeStudio, painter: DiffusionModel, talker: LanguageModel) -> Iterator[Walk]:
    num_bytes = tight_bytes(make_studio(), spare_pages=90)
    walk = Walk(
        make_studio(pool_bytes=num_bytes, max_waiting=8, max_lanes=4, text={"max_sequences": 6, "max_waiting": 8}),
        seed=3,
    )
    hooks = [network.register_forward_pre_hook(walk.maybe_fail) for network in (painter.unet.network, talker.network)]
    yield walk
    for hook in hooks:
        hook.remove()


def go(walk: Walk, num_steps: int) -> Counter[str]:
    for _ in range(num_steps):
        walk.step()
        walk.studio.check_integrity()
    walk.finish()
    return Counter(walk.ends.values())


def test_a_short_walk_keeps_the_books(walk: Walk) -> None:
    ends = go(walk, 200)
    assert {"Finished", "TextFinished", "RewriteFinished"} <= set(ends), (ends, walk.counts)


@pytest.mark.slow
def test_a_thousand_steps_keep_the_books(walk: Walk) -> None:
    ends = go(walk, 1000)
    assert min(ends[name] for name in ("Finished", "TextFinished", "RewriteFinished", "Failed", "Cancelled")) > 5
    assert walk.counts["QueueFull"] > 2
    assert walk.studio.pool is not None
    tenants = walk.studio.pool.stats().tenants
    assert all(tenant.evicted_pages > 10 for tenant in tenants.values())
