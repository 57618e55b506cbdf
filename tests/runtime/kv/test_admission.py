"""One budget: what fits, what waits, what never will; and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.errors import ConfigError, InvalidRequest, QueueFull
from diffserve.runtime.kv import KVSpec, LayerSpec, PagePool, PageTableError, PoolBusy, PoolTooSmall
from tests.runtime.kv.story import LLM, UNET, ten_pages, write_sequence


def state_of(pool: PagePool) -> tuple[Any, ...]:
    """Everything a refusal must leave alone, the order of eviction included."""
    return pool.draw(), pool.stats(), [logical.pages for logical in pool._ledger.index.idle], list(pool._ledger.free)


def test_busy_and_too_small_are_distinct_errors() -> None:
    pool = ten_pages(LLM)
    pool.open("llm", reserve=12)
    assert [pool.can_hold(pages) for pages in (0, 4, 5, 10)] == [True, True, False, False]
    with pytest.raises(PoolBusy, match="8 pages are needed and 4 of 10 can be had now"):
        pool.open("llm", reserve=16)
    with pytest.raises(PoolTooSmall, match="12 pages are needed at once and the whole pool has 10"):
        pool.open("llm", reserve=21)
    with pytest.raises(PoolTooSmall, match="11 pages"):
        pool.can_hold(11)


def test_the_errors_are_those_of_the_tree() -> None:
    busy, small = PoolBusy("later"), PoolTooSmall("never")
    assert isinstance(busy, QueueFull)
    assert isinstance(small, InvalidRequest)
    assert (busy.code, busy.retry_after_s, small.code) == ("pool_busy", 1.0, "pool_too_small")


def test_idle_pages_count_as_available() -> None:
    pool = ten_pages(LLM)
    pool.close(write_sequence(pool, "llm", range(20)))
    assert pool.draw() == "o o o o o o o o o o"
    assert (pool.num_available, pool.can_hold(10)) == (10, True)


def test_a_refused_open_changes_nothing_not_even_what_goes_next() -> None:
    pool = ten_pages(LLM)
    write_sequence(pool, "llm", [90, 91, 92, 93])
    for first in (10, 20):
        pool.close(write_sequence(pool, "llm", range(first, first + 8)))
    before = state_of(pool)
    with pytest.raises(PoolBusy, match="6 pages are needed and 4 of 10"):  # 4 idle ones would be found, not evicted
        pool.open("llm", range(10, 30), reserve=20)
    with pytest.raises(PoolTooSmall):
        pool.open("llm", range(10, 40), reserve=30)
    assert state_of(pool) == before


def test_a_refused_reserve_changes_nothing() -> None:
    pool = ten_pages(LLM)
    table = write_sequence(pool, "llm", range(10))
    fork = pool.fork(table)
    pool.open("llm", reserve=4)
    before, pages = state_of(pool), fork.pages
    with pytest.raises(PoolBusy):
        pool.reserve(fork, 13)  # a copy of the last logical page and one more
    assert (state_of(pool), fork.pages, fork.num_tokens) == (before, pages, 10)
    pool.reserve(fork, 12)
    pool.check_integrity()


def test_the_least_recently_used_goes_first_and_of_a_sequence_its_end() -> None:
    pool = ten_pages(UNET)
    for first in (0, 100, 200):
        pool.close(write_sequence(pool, "unet", range(first, first + 12)))
    pool.close(pool.open("unet", range(12))[0])  # used again
    assert pool.draw() == "o o o o o o o o o ."
    pool.open("unet", reserve=12)
    assert pool.draw() == "o o o o 1 1 o o o 1"
    assert [pool.num_cached("unet", range(first, first + 12)) for first in (0, 100, 200)] == [12, 4, 12]
    assert pool.stats().tenants["unet"].evicted_pages == 2


def test_what_is_held_is_never_evicted() -> None:
    pool = ten_pages(UNET)
    table = write_sequence(pool, "unet", range(24))
    pool.open("unet", reserve=16)
    with pytest.raises(PoolBusy):
        pool.open("unet", reserve=1)
    assert table.pages == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_one_tenant_may_evict_anothers_idle_pages() -> None:
    pool = ten_pages(LLM, UNET)
    pool.close(write_sequence(pool, "unet", range(40)))
    pool.open("llm", reserve=4)
    assert pool.stats().tenants["unet"].idle_pages == 8
    pool.check_integrity()


def test_pages_are_counted_by_tenant_and_hits_by_token() -> None:
    pool = ten_pages(LLM, UNET)
    pool.close(write_sequence(pool, "unet", range(10)))
    pool.open("unet", range(10))
    pool.open("llm", range(5), reserve=5)
    stats = pool.stats()
    assert (stats.free_pages, stats.held_pages, stats.idle_pages, stats.num_tables) == (3, 7, 0, 2)
    unet, llm = stats.tenants["unet"], stats.tenants["llm"]
    assert (unet.held_pages, unet.opened, unet.asked_tokens, unet.found_tokens) == (3, 2, 20, 10)
    assert (unet.hit_rate, llm.hit_rate, llm.held_pages) == (0.5, 0.0, 4)


def test_pages_for_a_sequence_can_be_asked_beforehand() -> None:
    pool = ten_pages(LLM, UNET)
    assert [pool.num_pages_for("llm", tokens) for tokens in (0, 1, 4, 5)] == [0, 2, 2, 4]
    assert pool.num_pages_for("unet", 5) == 2


def test_a_closed_table_is_of_no_use() -> None:
    pool = ten_pages(LLM)
    table, _ = pool.open("llm", reserve=4)
    pool.close(table)
    for use in (
        lambda: pool.close(table),
        lambda: pool.reserve(table, 5),
        lambda: pool.truncate(table, 0),
        lambda: pool.commit(table, []),
        lambda: pool.fork(table),
        lambda: pool.batch([table]),
    ):
        with pytest.raises(PageTableError, match="closed"):
            use()
    assert pool.draw() == ". . . . . . . . . ."


def test_a_table_of_another_pool_is_refused() -> None:
    table, _ = ten_pages(LLM).open("llm", reserve=4)
    with pytest.raises(PageTableError, match="not open in this pool"):
        ten_pages(LLM).close(table)


def test_positions_that_are_not_there_are_refused() -> None:
    pool = ten_pages(LLM)
    table, _ = pool.open("llm", reserve=4)
    for use in (
        lambda: pool.reserve(table, 8, start=5),
        lambda: pool.truncate(table, 5),
        lambda: pool.truncate(table, -1),
        lambda: pool.fork(table, 5),
        lambda: pool.commit(table, range(5)),
        lambda: pool.batch([table], [0], [5]),
        lambda: pool.batch([table], [3], [2]),
    ):
        with pytest.raises(PageTableError, match="4 tokens"):
            use()


def test_reserving_what_is_there_already_does_nothing() -> None:
    pool = ten_pages(LLM)
    table, _ = pool.open("llm", reserve=6)
    pool.reserve(table, 6)
    pool.reserve(table, 2)
    assert (table.num_tokens, len(table.logical_pages), table.num_pages) == (6, 2, 4)


def test_a_tenant_is_registered_once_and_retired_when_idle() -> None:
    pool = ten_pages(LLM)
    assert pool.register(LLM) is pool.plan("llm")
    other = KVSpec("llm", (LayerSpec(1, 4),), LLM.dtype)
    with pytest.raises(ValueError, match="another spec: retire it first"):
        pool.register(other)
    table = write_sequence(pool, "llm", range(8))
    with pytest.raises(PageTableError, match="1 open tables"):
        pool.retire("llm")
    pool.close(table)
    pool.retire("llm")
    assert pool.draw() == ". . . . . . . . . ."
    with pytest.raises(PageTableError, match="no tenant 'llm'"):
        pool.open("llm")
    pool.register(other)
    pool.check_integrity()


def test_a_budget_in_bytes_becomes_pages() -> None:
    pool = PagePool.for_specs(10_000, [LLM, UNET])
    assert (pool.page_bytes, pool.num_pages, pool.num_available) == (512, 19, 19)
    with pytest.raises(ConfigError, match="has 100 bytes and one page takes 512"):
        PagePool.for_specs(100, [LLM])


@pytest.mark.parametrize(("num_pages", "page_bytes"), [(0, 64), (1, 0), (1, 65)])
def test_pages_that_cannot_be_are_refused(num_pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_pages} pages of {page_bytes} bytes"):
        PagePool(num_pages, page_bytes)
