"""Five thousand random operations on ten pages: the books balance after each, numbers read back, no page leaks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from diffserve.runtime.kv import PagePool, PageTable, PoolBusy, PoolTooSmall
from tests.runtime.kv.story import LLM, NUM_PAGES, UNET, assert_holds, ten_pages, write_tokens

NUM_OPERATIONS = 5000
SALTS = (b"", b"", b"", b"another key")


@dataclass(eq=False)
class Sequence:
    """The expected content of one table: ``tokens`` written so far, opened with ``salt``."""

    table: PageTable
    tokens: list[int]
    salt: bytes


@dataclass
class Walk:
    """A pool, what it should hold, and what happened how often."""

    rng: random.Random
    pool: PagePool = field(default_factory=lambda: ten_pages(LLM, UNET))
    live: list[Sequence] = field(default_factory=list)
    event_counts: Counter[str] = field(default_factory=Counter)

    def step(self) -> None:
        """One operation of a kind that is possible now; a refusal must change nothing."""
        kinds = {"open": 5, "forget": 0.02}
        if self.live:
            kinds |= {"grow": 3, "commit": 5, "truncate": 1, "rewrite": 1, "fork": 1, "close": 1.2 * len(self.live)}
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        before = (self.pool.draw(), self.pool.num_available, [(s.table.pages, s.table.num_tokens) for s in self.live])
        try:
            getattr(self, kind)()
            self.event_counts[kind] += 1
        except (PoolBusy, PoolTooSmall) as refusal:
            self.event_counts[type(refusal).__name__] += 1
            after = [(s.table.pages, s.table.num_tokens) for s in self.live]
            assert (self.pool.draw(), self.pool.num_available, after) == before

    def open(self) -> None:
        tenant, salt = self.rng.choice(["llm", "unet", "unet"]), self.rng.choice(SALTS)
        prompt = self.words(self.rng.choice([0, 0, 0, 1]), self.rng.choice([3, 6, 6, 9, 13, 22]))
        table, num_cached = self.pool.open(tenant, prompt, salt, reserve=len(prompt))
        self.event_counts["found"] += num_cached > 0
        self.event_counts["found all"] += num_cached == len(prompt)
        write_tokens(self.pool, table, prompt, num_cached, salt)
        self.live.append(Sequence(table, prompt, salt))

    def grow(self) -> None:
        sequence = self.pick()
        longer = [*sequence.tokens, *self.words(self.rng.randint(0, 1), self.rng.randint(1, 6))]
        self.pool.reserve(sequence.table, len(longer))
        write_tokens(self.pool, sequence.table, longer, len(sequence.tokens), sequence.salt)
        sequence.tokens = longer

    def rewrite(self) -> None:
        sequence = self.pick()
        start = self.rng.randint(0, len(sequence.tokens))
        other = [*sequence.tokens[:start], *self.words(7, len(sequence.tokens) - start)]
        pages = sequence.table.pages
        self.pool.reserve(sequence.table, len(other), start=start)
        self.event_counts["copied"] += sequence.table.pages != pages
        write_tokens(self.pool, sequence.table, other, start, sequence.salt)
        sequence.tokens = other

    def commit(self) -> None:
        sequence = self.pick()
        prefix = sequence.tokens[: self.rng.choice([len(sequence.tokens), self.rng.randint(0, len(sequence.tokens))])]
        self.pool.commit(sequence.table, prefix)

    def truncate(self) -> None:
        sequence = self.pick()
        sequence.tokens = sequence.tokens[: self.rng.randint(0, len(sequence.tokens))]
        self.pool.truncate(sequence.table, len(sequence.tokens))

    def fork(self) -> None:
        sequence = self.pick()
        length = self.rng.choice([len(sequence.tokens), self.rng.randint(0, len(sequence.tokens))])
        self.live.append(Sequence(self.pool.fork(sequence.table, length), sequence.tokens[:length], sequence.salt))

    def close(self) -> None:
        sequence = self.pick()
        self.live.remove(sequence)
        self.pool.close(sequence.table)

    def forget(self) -> None:
        self.pool.forget(self.rng.choice(["llm", "unet"]))

    def pick(self) -> Sequence:
        return self.rng.choice(self.live)

    def words(self, start: int, count: int) -> list[int]:
        """Few different beginnings, so that prompts meet."""
        return [(start * 5 + at // 3) % 11 for at in range(count)]

    def check(self) -> None:
        """Check the pool's totals and the content of one random sequence."""
        self.pool.check_integrity()
        if self.live:
            sequence = self.pick()
            assert sequence.table.num_tokens == len(sequence.tokens)
            assert_holds(self.pool, sequence.table, sequence.tokens, sequence.salt)

    def end(self) -> None:
        """Everything is closed, and no page is missing."""
        for sequence in self.live:
            assert_holds(self.pool, sequence.table, sequence.tokens, sequence.salt)
            self.pool.close(sequence.table)
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert (stats.held_pages, stats.num_tables, self.pool.num_available) == (0, 0, NUM_PAGES)
        assert self.pool.forget("llm") + self.pool.forget("unet") + stats.free_pages == NUM_PAGES
        assert self.pool.draw() == ". . . . . . . . . ."


def test_a_walk_of_5000_operations_over_ten_pages_leaks_nothing() -> None:
    walk = Walk(random.Random(0))
    for _ in range(NUM_OPERATIONS):
        walk.step()
        walk.check()
    tenants = walk.pool.stats().tenants
    walk.event_counts["evicted"] = sum(tenant.evicted_pages for tenant in tenants.values())
    walk.event_counts["merged"] = sum(tenant.merged_pages for tenant in tenants.values())
    rare = [what for what in EVERYTHING if walk.event_counts[what] < EVERYTHING[what]]
    assert not rare, f"the walk saw too little of {rare}: {walk.event_counts}"
    walk.end()


@settings(max_examples=20, deadline=None)
@given(rng=st.randoms(use_true_random=False), num_operations=st.integers(1, 40))
def test_the_shortest_walk_that_goes_wrong_would_be_found(rng: random.Random, num_operations: int) -> None:
    walk = Walk(rng)
    for _ in range(num_operations):
        walk.step()
        walk.check()
    walk.end()


EVERYTHING = {
    "open": 300,
    "grow": 300,
    "commit": 300,
    "truncate": 100,
    "rewrite": 50,
    "fork": 100,
    "close": 300,
    "forget": 5,
    "PoolBusy": 100,
    "PoolTooSmall": 20,
    "found": 100,
    "found all": 15,
    "copied": 10,
    "evicted": 300,
    "merged": 5,
}
"""What must have happened at least so often, or the walk proves little."""
