"""Long contexts in chunks against one attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.runtime.dry_run import Work, dry_run
from diffserve.runtime.kv import KVSpec, LayerSpec, PagePool
from diffserve.runtime.language import row_groups
from diffserve.runtime.language.attention import PagedCall, Scoring
from diffserve.runtime.language.row_groups import ROUND_BYTES, ChunkedRows, Span, Workspace, attend_weighed, written_out

HEADS, KEY_HEADS, DIM, PAGE = 6, 2, 8, 16
LENGTHS = (700, 1, 512, 1300, 513, 2049)


class Contexts:
    """Keys, values and queries (n, ...) of contexts of ``LENGTHS``, on pages in disorder; the rest of memory is NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        num_pages = [-(-length // PAGE) for length in LENGTHS]
        taken = torch.randperm(sum(num_pages) + 5, generator=generator)[: sum(num_pages)]
        self.tables = taken.split(num_pages)
        self.memory = torch.full((2, sum(num_pages) + 5, PAGE, KEY_HEADS, DIM), torch.nan)
        self.query = torch.randn((len(LENGTHS), HEADS, DIM), generator=generator)
        self.contexts = [torch.randn((2, length, KEY_HEADS, DIM), generator=generator) for length in LENGTHS]
        for table, context in zip(self.tables, self.contexts, strict=True):
            at = torch.arange(context.shape[1])
            self.memory[:, table[at // PAGE], at % PAGE] = context

    def attend(self, rows: Sequence[int]) -> Tensor:
        """(len(rows), H, D) of these rows, together."""
        pages = torch.nn.utils.rnn.pad_sequence([self.tables[row] for row in rows], batch_first=True)[None]
        chunked = ChunkedRows([Span(1, LENGTHS[row]) for row in rows], pages, PAGE, KEY_HEADS * DIM * 4)
        view = PagePool.for_specs(1 << 20, [SPEC]).keys_values("llm", 0)._replace(keys=self.memory[0])
        return chunked.attend(self.query[list(rows)], view._replace(values=self.memory[1]), Workspace(), 0.3)

    def expected(self, row: int) -> Tensor:
        """(H, D) by torch's own attention."""
        keys, values = self.contexts[row].transpose(1, 2)[:, None]
        query = self.query[row][None, :, None]
        return F.scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True)[0, :, 0]


SPEC = KVSpec("llm", (LayerSpec(KEY_HEADS, DIM),), torch.float32, page_tokens=PAGE)


def test_chunks_add_up_to_the_whole_and_a_row_has_the_same_bytes_in_any_company() -> None:
    contexts = Contexts()
    together = contexts.attend(range(len(LENGTHS)))
    for row in range(len(LENGTHS)):
        torch.testing.assert_close(together[row], contexts.expected(row), rtol=0, atol=2e-6)
        assert torch.equal(contexts.attend([row])[0], together[row])
    assert torch.equal(contexts.attend([5, 3])[1], together[3])
    contexts.memory[:, contexts.tables[0][0]] = torch.nan
    spoilt = contexts.attend(range(len(LENGTHS)))
    assert bool(spoilt[0].isnan().all())
    assert torch.equal(spoilt[1:], together[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_nothing_fused_is_right_the_plain_arithmetic_says_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, keys, values = torch.randn(3, 2, 2, 64, DIM).to(dtype)
    mask = torch.zeros(2, 1, 1, 64, dtype=dtype)
    mask[0, ..., 9:] = -torch.inf
    fused = attend_weighed(query[:, :, :4], keys, values, mask, 0.4)
    assert row_groups._is_right(query.device, dtype, DIM)
    monkeypatch.setattr(row_groups, "_fused", lambda *_: (torch.zeros_like(query[:, :, :3]), torch.zeros(2, 2, 3)))
    row_groups._is_right.cache_clear()
    plain = attend_weighed(query[:, :, :4], keys, values, mask, 0.4)
    row_groups._is_right.cache_clear()
    for actual, other, expected in zip(
        fused, plain, written_out(query[:, :, :4], keys, values, mask, 0.4), strict=True
    ):
        assert torch.equal(other, expected)
        torch.testing.assert_close(actual, other, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.02)


def work_of(length: int, num_rows: int, monkeypatch: pytest.MonkeyPatch, long: int) -> tuple[Work, int]:
    """Run one layer's decode over ``num_rows`` contexts of about ``length`` tokens on the meta device.

    Returns:
        Its work, and its peak number of bytes outside the pool.
    """
    monkeypatch.setitem(row_groups.LONG_CONTEXT, "meta", long)
    pool = PagePool.for_specs(num_rows * (length + 64) * KEY_HEADS * DIM * 8, [SPEC], device=torch.device("meta"))
    spans = [Span(1, length - row) for row in range(num_rows)]
    tables = [pool.open("llm", (), reserve=span.length)[0] for span in spans]
    query, new = (torch.empty((num_rows, heads, DIM), device="meta") for heads in (HEADS, KEY_HEADS))

    def run() -> None:
        PagedCall(pool, tables, spans, Workspace())(0, query, new, new, Scoring())

    work = dry_run(run)
    return work, work.peak_bytes - pool.arena.data.nbytes


def test_what_is_gathered_at_a_time_is_bounded_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUND_BYTES, "meta", 1024 * KEY_HEADS * DIM * 4)
    _, whole_bytes = work_of(4000, 2, monkeypatch, long=1 << 20)
    chunked, chunked_bytes = work_of(4000, 2, monkeypatch, long=1024)
    twice, twice_bytes = work_of(8000, 2, monkeypatch, long=1024)
    assert (chunked.copies, twice.copies) == (2, 2)
    assert chunked_bytes < 0.3 * whole_bytes
    assert twice_bytes < 1.5 * chunked_bytes
    attends = [kernel for kernel in chunked.kernels if "attention" in kernel.name]
    assert len(attends) == 8, "sixteen chunks, two at a time"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_fused_attention_of_a_gpu_is_right(dtype: torch.dtype, head_dim: int) -> None:
    assert row_groups._is_right(torch.device("cuda"), dtype, head_dim)
