"""Sequences that share pages and diverge, with exact page ids. A logical page holds four tokens here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from diffserve.runtime.kv import KVSpec, LayerSpec, PagePlan, PagePool, PageTableError, salt_of
from tests.device import DEVICE
from tests.runtime.kv.story import LLM, UNET, assert_holds, ten_pages, write_sequence, write_tokens

PROMPT = list(range(10))


@pytest.fixture
def pool() -> Iterator[PagePool]:
    pool = ten_pages(LLM, UNET)
    yield pool
    pool.check_integrity()


def test_two_prompts_with_a_common_prefix_of_16_tokens_share_those_pages_in_all_layers() -> None:
    spec = KVSpec("unet", tuple(LayerSpec(2, width) for width in (8, 8, 16, 32)), torch.float32, whole_sequences=True)
    pool = PagePool(64, PagePlan.smallest_page_bytes([spec]), device=DEVICE)
    assert pool.register(spec).num_groups == 2  # 8 + 8 + 16 on one page, 32 on the other
    common = list(range(16))
    fox = write_sequence(pool, "unet", [*common, *range(100, 161)])
    owl, num_cached = pool.open("unet", [*common, *range(200, 261)], reserve=77)
    assert num_cached == 16
    assert fox.pages == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert owl.pages == ((0, 1), (10, 11), (12, 13), (14, 15), (16, 17))
    assert_holds(pool, owl, common)  # what was written through one is read through the other, in every layer


def test_a_whole_prompt_is_stored_once_for_32_requests() -> None:
    pool = ten_pages(UNET)
    first = write_sequence(pool, "unet", PROMPT)
    sequences = [pool.open("unet", PROMPT, reserve=10) for _ in range(31)]
    assert {num_cached for _, num_cached in sequences} == {10}
    assert {table.pages for table, _ in sequences} == {first.pages} == {((0,), (1,), (2,))}
    assert pool.stats().held_pages == 3
    pool.check_integrity()


def test_a_tenant_that_computes_its_last_token_never_finds_all_of_a_prompt(pool: PagePool) -> None:
    write_sequence(pool, "llm", PROMPT[:8])
    assert pool.num_cached("llm", PROMPT[:8]) == 4
    assert pool.num_cached("llm", PROMPT[:9]) == 8
    assert pool.num_cached("llm", []) == 0


def test_the_partial_end_of_a_whole_sequence_is_found_by_that_sequence_only(pool: PagePool) -> None:
    write_sequence(pool, "unet", PROMPT)
    assert pool.num_cached("unet", PROMPT) == 10
    assert pool.num_cached("unet", PROMPT[:9]) == 8
    assert pool.num_cached("unet", [*PROMPT, 10]) == 8


@pytest.mark.parametrize(("most_cached", "num_tokens"), [(10, 10), (9, 8), (8, 8), (7, 4), (0, 0)])
def test_most_cached_bounds_what_is_found(pool: PagePool, most_cached: int, num_tokens: int) -> None:
    write_sequence(pool, "unet", PROMPT)
    assert pool.open("unet", PROMPT, most_cached=most_cached)[1] == num_tokens


def test_another_salt_finds_nothing(pool: PagePool) -> None:
    ann, ben = salt_of(b"key of Ann"), salt_of(b"key of Ben")
    write_sequence(pool, "llm", PROMPT, ann)
    assert [pool.num_cached("llm", PROMPT, salt) for salt in (ann, ben, b"")] == [8, 0, 0]


def test_tenants_share_no_pages(pool: PagePool) -> None:
    write_sequence(pool, "unet", PROMPT)
    assert pool.num_cached("llm", PROMPT) == 0


def test_a_fork_shares_all_pages_and_the_first_to_write_copies_the_last(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT)
    beam = pool.fork(table)
    assert beam.pages == table.pages == ((0, 1), (2, 3), (4, 5))
    for each, token in ((beam, 60), (table, 70)):
        pool.reserve(each, 11)
        write_tokens(pool, each, [*PROMPT, token], 10)
    assert beam.pages == ((0, 1), (2, 3), (6, 7))
    assert table.pages == ((0, 1), (2, 3), (4, 5))
    assert_holds(pool, beam, [*PROMPT, 60])
    assert_holds(pool, table, [*PROMPT, 70])


def test_a_fork_at_a_page_boundary_copies_nothing(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT[:8])
    beam = pool.fork(table)
    pool.reserve(beam, 9)
    assert beam.pages == (*table.pages, (4, 5))


def test_a_shorter_fork_may_rewrite_what_it_left_out(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT)
    beam = pool.fork(table, 6)
    pool.reserve(beam, 7)
    write_tokens(pool, beam, [*PROMPT[:6], 60], 6)
    pool.commit(beam, [*PROMPT[:6], 60])
    assert beam.pages == ((0, 1), (6, 7))
    assert_holds(pool, beam, [*PROMPT[:6], 60])
    assert_holds(pool, table, PROMPT)


def test_truncation_gives_back_pages_and_keeps_the_rest(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT)
    pool.truncate(table, 8)
    assert (table.pages, table.num_tokens) == (((0, 1), (2, 3)), 8)
    assert pool.draw() == "1 1 1 1 . . . . . ."


def test_rejected_tokens_are_written_again_in_place(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT)
    pool.reserve(table, 12)  # two draft tokens, one of which is rejected
    write_tokens(pool, table, [*PROMPT, 10, 99], 10)
    pool.truncate(table, 11)
    pool.reserve(table, 12)
    write_tokens(pool, table, [*PROMPT, 10, 11], 11)
    pool.commit(table, [*PROMPT, 10, 11])
    assert table.pages == ((0, 1), (2, 3), (4, 5))
    assert_holds(pool, table, range(12))
    assert pool.num_cached("llm", range(13)) == 12


def test_going_on_differently_from_a_filed_page_withdraws_it(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT)
    pool.truncate(table, 6)
    pool.reserve(table, 7)
    write_tokens(pool, table, [*PROMPT[:6], 60], 6)
    assert table.pages == ((0, 1), (2, 3))
    assert pool.num_cached("llm", PROMPT) == 4


def test_going_on_differently_from_a_filed_page_that_others_hold_copies_it(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", PROMPT[:8])
    other, _ = pool.open("llm", PROMPT[:9])
    pool.truncate(table, 6)
    pool.reserve(table, 7)
    write_tokens(pool, table, [*PROMPT[:6], 60], 6)
    assert (table.pages, other.pages) == (((0, 1), (4, 5)), ((0, 1), (2, 3)))
    assert_holds(pool, table, [*PROMPT[:6], 60])
    assert_holds(pool, other, PROMPT[:8])


def test_a_table_that_fills_the_pool_can_still_rewrite_its_filed_end(pool: PagePool) -> None:
    table = write_sequence(pool, "llm", list(range(20)))
    pool.truncate(table, 18)
    pool.reserve(table, 20)
    assert pool.draw() == "1 1 1 1 1 1 1 1 1 1"


def test_growing_a_whole_sequence_leaves_what_others_hold_alone(pool: PagePool) -> None:
    write_sequence(pool, "unet", PROMPT)
    longer, num_cached = pool.open("unet", PROMPT, reserve=11)
    assert (num_cached, longer.pages) == (10, ((0,), (1,), (3,)))
    write_tokens(pool, longer, [*PROMPT, 10], 10)
    pool.commit(longer, [*PROMPT, 10])
    assert_holds(pool, longer, range(11))
    assert [pool.num_cached("unet", PROMPT), pool.num_cached("unet", range(11))] == [10, 11]


def test_the_same_prompt_computed_twice_at_once_is_kept_once(pool: PagePool) -> None:
    first, _ = pool.open("unet", PROMPT, reserve=10)
    second, num_cached = pool.open("unet", PROMPT, reserve=10)
    assert (num_cached, pool.draw()) == (0, "1 1 1 1 1 1 . . . .")
    for table in (first, second):
        write_tokens(pool, table, PROMPT, 0)
        pool.commit(table, PROMPT)
    assert second.pages == first.pages == ((0,), (1,), (2,))
    assert pool.draw() == "2 2 2 . . . . . . ."
    assert pool.stats().tenants["unet"].merged_pages == 3
    assert_holds(pool, second, PROMPT)


def test_merging_wakes_an_idle_twin(pool: PagePool) -> None:
    first, _ = pool.open("llm", PROMPT, reserve=10)
    second, _ = pool.open("llm", PROMPT, reserve=4)
    for table in (first, second):
        write_tokens(pool, table, PROMPT[: table.num_tokens], 0)
    pool.commit(first, PROMPT)
    pool.close(first)
    assert pool.draw() == "o o o o . . 1 1 . ."
    pool.commit(second, PROMPT[:4])
    assert pool.draw() == "1 1 o o . . . . . ."
    assert_holds(pool, second, PROMPT[:4])


def test_committing_chunk_by_chunk_files_what_is_full(pool: PagePool) -> None:
    table, _ = pool.open("llm", PROMPT)
    for end, num_tokens in ((3, 0), (5, 4), (8, 8), (10, 8)):
        start = table.num_tokens
        pool.reserve(table, end)
        write_tokens(pool, table, PROMPT[:end], start)
        pool.commit(table, PROMPT[:end])
        assert pool.num_cached("llm", PROMPT) == num_tokens


def test_a_page_filed_as_other_tokens_cannot_be_filed_again(pool: PagePool) -> None:
    table, _ = pool.open("llm", PROMPT, reserve=4)
    fork = pool.fork(table)
    pool.commit(table, [1, 2, 3, 4])
    with pytest.raises(PageTableError, match="filed as other tokens"):
        pool.commit(fork, [1, 2, 3, 5])
    pool.commit(fork, [1, 2, 3, 4])


def test_a_full_page_takes_the_place_of_its_own_beginning_in_the_index(pool: PagePool) -> None:
    table, _ = pool.open("unet", range(4), reserve=4)
    write_tokens(pool, table, range(4), 0)
    pool.commit(pool.fork(table, 3), range(3))
    assert pool.num_cached("unet", range(3)) == 3
    pool.commit(table, range(4))
    assert [pool.num_cached("unet", range(length)) for length in (3, 4)] == [0, 4]


def test_nothing_filed_is_found_after_forget(pool: PagePool) -> None:
    idle, table = write_sequence(pool, "llm", [1] * 8), write_sequence(pool, "llm", PROMPT[:5])
    pool.close(idle)
    assert pool.forget("llm") == 4
    assert (pool.num_cached("llm", PROMPT), pool.draw()) == (0, ". . . . 1 1 1 1 . .")
    assert_holds(pool, table, PROMPT[:5])
    pool.reserve(table, 10)
    write_tokens(pool, table, PROMPT, 5)
    pool.commit(table, PROMPT)  # old weights: never found
    assert pool.num_cached("llm", PROMPT) == 0
    fresh = write_sequence(pool, "unet", PROMPT)
    assert pool.num_cached("unet", PROMPT) == 10
    pool.close(fresh)
