"""Scatter and gather against plain slicing."""

from __future__ import annotations

import pytest
import torch

from diffserve.runtime.kv import Gathered, KVSpec, LayerSpec, PagePlan, PagePool, PageTable, PageTableError
from tests.device import DEVICE
from tests.runtime.kv.story import LLM, UNET, assert_holds, gather, ten_pages, write, write_sequence, write_tokens

WIDTHS = (LayerSpec(2, 8), LayerSpec(1, 24), LayerSpec(4, 16), LayerSpec(3, 5))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Rows = list[tuple[torch.Tensor, torch.Tensor]]


def wide_pool(dtype: torch.dtype, device: str = DEVICE) -> PagePool:
    """Layers of four widths; every page holds NaN in any dtype until written."""
    spec = KVSpec("t", WIDTHS, dtype, page_tokens=16)
    pool = PagePool(40, PagePlan.smallest_page_bytes([spec]), device=device)
    pool.register(spec)
    pool.arena.data.fill_(255)
    return pool


def numbers(pool: PagePool, layer: LayerSpec, lengths: list[int], seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    dtype, device = pool.plan("t").spec.dtype, pool.arena.data.device
    shapes = [(length, layer.num_heads, layer.head_dim) for length in lengths]
    return [tuple(torch.randn(shape, generator=generator).to(device, dtype) for _ in "kv") for shape in shapes]  # type: ignore[misc]


def assert_rows(got: Gathered, rows: Rows, longest: int) -> None:
    """Each row reads as written, and zero beyond its length."""
    for index, tensor in enumerate((got.keys, got.values)):
        assert tensor.shape[:2] == (len(rows), longest)
        for row, pair in zip(tensor, rows, strict=True):
            assert torch.equal(row[: len(pair[index])], pair[index])
            assert row[len(pair[index]) :].eq(0).all()


def write_in_chunks(pool: PagePool, tables: list[PageTable], lengths: list[int], cuts: list[int]) -> dict[int, Rows]:
    """Write every layer in two forwards, the second starting where ``cuts`` say; returns what was written by layer."""
    written = {at: numbers(pool, layer, lengths, at) for at, layer in enumerate(WIDTHS)}
    for starts, ends in (([0] * len(tables), cuts), (cuts, lengths)):
        batch = pool.batch(tables, starts, ends)
        for at, rows in written.items():
            parts = [(k[s:e], v[s:e]) for (k, v), s, e in zip(rows, starts, ends, strict=True)]
            batch.write(at, torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts]))
    return written


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_rows_written_in_chunks_read_back_and_the_padding_is_zero(dtype: torch.dtype) -> None:
    pool = wide_pool(dtype)
    lengths, cuts = [1, 33, 16, 20], [0, 17, 16, 5]
    tables = [pool.open("t", reserve=length)[0] for length in lengths]
    written = write_in_chunks(pool, tables, lengths, cuts)
    batch = pool.batch(tables)
    for at, rows in written.items():
        assert_rows(batch.gather(at), rows, 33)


@pytest.mark.gpu
def test_a_pool_on_the_gpu_reads_back_what_was_written() -> None:
    pool = wide_pool(torch.bfloat16, "cuda")
    tables = [pool.open("t", reserve=length)[0] for length in (40, 7)]
    for at, rows in write_in_chunks(pool, tables, [40, 7], [3, 7]).items():
        assert_rows(gather(pool, tables, at), rows, 40)
    fork = pool.fork(tables[0])
    pool.reserve(fork, 41)
    assert torch.equal(gather(pool, [fork], 0, [40]).keys, gather(pool, [tables[0]], 0).keys)


def test_one_table_may_fill_several_rows_and_lengths_may_be_shorter() -> None:
    pool = wide_pool(torch.float32)
    table, _ = pool.open("t", reserve=20)
    ((keys, values),) = numbers(pool, WIDTHS[2], [20], 0)
    write(pool, table, 2, 0, keys, values)
    got = gather(pool, [table, table], 2, lengths=[20, 3])
    assert_rows(got, [(keys, values), (keys[:3], values[:3])], 20)


def test_a_batch_tells_where_its_new_tokens_stand() -> None:
    pool = wide_pool(torch.float32)
    tables = [pool.open("t", reserve=length)[0] for length in (18, 3)]
    batch = pool.batch(tables, [15, 3])
    assert (batch.num_new, batch.max_length) == (3, 18)
    assert batch.positions.tolist() == [15, 16, 17]
    assert batch.pages.shape == (pool.plan("t").num_groups, 2, 2)
    assert batch.pages[0].tolist() == [[0, 2], [4, 0]]  # two pages a logical page


def test_rows_of_no_tokens_gather_as_nothing() -> None:
    pool = wide_pool(torch.float32)
    table, _ = pool.open("t")
    got = gather(pool, [table], 0)
    assert got.keys.shape == (1, 0, 2, 8)
    assert gather(pool, [table, pool.open("t", reserve=1)[0]], 0).keys.shape == (2, 1, 2, 8)


def test_paged_views_show_the_same_numbers() -> None:
    pool = wide_pool(torch.float32)
    table, _ = pool.open("t", reserve=32)
    ((keys, values),) = numbers(pool, WIDTHS[1], [32], 0)
    write(pool, table, 1, 0, keys, values)
    view = pool.keys_values("t", 1)
    pages = [logical[view.group] for logical in table.pages]
    assert torch.equal(view.keys[pages].flatten(0, 1), keys)
    assert torch.equal(view.values[pages].flatten(0, 1), values)


def test_what_requires_gradients_leaves_none_in_the_pool() -> None:
    pool = wide_pool(torch.float32)
    table, _ = pool.open("t", reserve=2)
    keys = torch.ones((2, 2, 8), requires_grad=True, device=DEVICE)
    write(pool, table, 0, 0, keys, keys)
    assert not gather(pool, [table], 0).keys.requires_grad


def test_a_pool_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        pool = ten_pages(LLM)
    write_sequence(pool, "llm", range(4))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2, 8), torch.float32), ((2, 8, 2), torch.float32), ((2, 2, 8), torch.float16)]
)
def test_tensors_of_another_shape_or_dtype_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = ten_pages(LLM)
    table, _ = pool.open("llm", reserve=2)
    batch = pool.batch([table], [0])
    good, bad = (
        torch.zeros(sizes, dtype=kind, device=DEVICE) for sizes, kind in (((2, 2, 8), torch.float32), (shape, dtype))
    )
    with pytest.raises(PageTableError, match=r"values of layer 1 .* expected \(2, 2, 8\) torch.float32"):
        batch.write(1, good, bad)


def test_shared_and_filed_pages_are_never_written() -> None:
    pool = ten_pages(LLM)
    table = write_sequence(pool, "llm", range(6))
    with pytest.raises(PageTableError, match=r"token 1 .* reserve\(table, 6, start=1\)"):
        pool.batch([table], [1])
    fork = pool.fork(table)
    with pytest.raises(PageTableError, match=r"token 5 .* others see"):
        pool.batch([fork], [5])
    pool.reserve(fork, 6, start=1)
    write_tokens(pool, fork, [0, 11, 12, 13, 14, 15], 1)
    assert_holds(pool, fork, [0, 11, 12, 13, 14, 15])
    assert_holds(pool, table, range(6))
    pool.check_integrity()


def test_a_batch_is_stale_when_a_table_gets_other_pages() -> None:
    pool = ten_pages(LLM)
    tables = [pool.open("llm", reserve=4)[0] for _ in range(2)]
    batch = pool.batch(tables)
    batch.gather(0)
    pool.reserve(tables[1], 5)
    with pytest.raises(PageTableError, match="make a new one"):
        batch.gather(0)
    batch = pool.batch(tables[:1])
    pool.close(tables[0])
    with pytest.raises(PageTableError, match="make a new one"):
        batch.gather(0)


def test_a_batch_outlives_tokens_that_need_no_new_page() -> None:
    pool = ten_pages(LLM)
    table, _ = pool.open("llm", reserve=3)
    batch = pool.batch([table])
    pool.reserve(table, 4)
    assert batch.gather(0).keys.shape[1] == 3


def test_a_batch_needs_tables_of_one_tenant() -> None:
    pool = ten_pages(LLM, UNET)
    with pytest.raises(PageTableError, match="no tables"):
        pool.batch([])
    with pytest.raises(PageTableError, match="in one batch"):
        pool.batch([pool.open("llm")[0], pool.open("unet")[0]])
