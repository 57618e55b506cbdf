"""Attention over pages against attention written out for one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffserve.runtime.kv import KVSpec, LayerSpec, PagePool, PageTable
from diffserve.runtime.language import row_groups
from diffserve.runtime.language.attention import PagedCall, Scoring, paged_attention
from diffserve.runtime.language.row_groups import Span, Workspace
from tests.device import DEVICE, tolerance
from tests.runtime.kv.story import gather, write

HEADS, KEY_HEADS, DIM = 6, 2, 8
SPEC = KVSpec("llm", (LayerSpec(KEY_HEADS, DIM),) * 2, torch.float32, page_tokens=4)
SPANS = [Span(1, 30), Span(20, 33), Span(3, 20), Span(1, 1), Span(7, 7), Span(18, 18), Span(1, 9), Span(5, 40)]
"""Decode rows, a long chunk with history, drafts, a first token, whole short and long prompts."""


def written_out(query: Tensor, keys: Tensor, values: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """(Q, H, D) of the last Q tokens of one sequence of T: query (Q, H, D), keys and values (T, G, D)."""
    num_new, length = len(query), len(keys)
    keys, values = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query, keys) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - num_new, length, device=query.device)[:, None]
    positions = torch.arange(length, device=query.device)
    mask = positions <= position
    if window is not None:
        mask &= positions > position - window
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


def make_pool() -> PagePool:
    pool = PagePool.for_specs(400 * 1024, [SPEC], device=DEVICE)
    pool.arena.data.fill_(255)  # every float is NaN until it is written
    return pool


@pytest.mark.parametrize("long", [4096, 9])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 2.0), (6, 2.0), (1, None)])
def test_mixed_batch_attends_as_each_sequence_alone(
    window: int | None, softcap: float | None, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(row_groups.LONG_CONTEXT, torch.device(DEVICE).type, long)
    monkeypatch.setattr(row_groups, "CHUNK_TOKENS", 8)
    torch.manual_seed(0)
    pool = make_pool()
    tables: list[PageTable] = []
    keys, values = ([randn(span.length, KEY_HEADS, DIM) for span in SPANS] for _ in range(2))
    for span, key, value in zip(SPANS, keys, values, strict=True):
        table, _ = pool.open("llm", (), reserve=span.length)
        if span.length > span.num_new:
            write(pool, table, 1, 0, key[: -span.num_new], value[: -span.num_new])
        tables.append(table)
    queries = [randn(span.num_new, HEADS, DIM) for span in SPANS]
    call = PagedCall(pool, tables, SPANS, Workspace())
    output = call(
        1,
        torch.cat([queries[index] for index in call.order]),
        torch.cat([keys[index][-SPANS[index].num_new :] for index in call.order]),
        torch.cat([values[index][-SPANS[index].num_new :] for index in call.order]),
        Scoring(0.3, window, softcap),
    )
    pieces = output.split([SPANS[index].num_new for index in call.order])
    for index, piece in zip(call.order, pieces, strict=True):
        expected = written_out(queries[index], keys[index], values[index], window, softcap)
        torch.testing.assert_close(piece, expected, rtol=1e-4, atol=tolerance(1e-5))


def test_new_keys_and_values_are_kept_in_their_own_layer() -> None:
    pool = make_pool()
    table, _ = pool.open("llm", (), reserve=3)
    call = PagedCall(pool, [table], [Span(3, 3)], Workspace())
    keys, values = randn(3, KEY_HEADS, DIM), randn(3, KEY_HEADS, DIM)
    call(0, randn(3, HEADS, DIM), keys, values, Scoring())
    actual = gather(pool, [table], 0)
    assert torch.equal(actual.keys[0], keys)
    assert torch.equal(actual.values[0], values)
    assert bool(gather(pool, [table], 1).keys.isnan().all())


def test_workspace_serves_small_forwards_after_large_ones() -> None:
    source = torch.arange(24.0, device=DEVICE).view(6, 2, 2, 1)
    workspace = Workspace()
    for pages in ([0, 1, 2, 3, 4, 5, 0, 1], [5], [3, 3]):
        index, padding = torch.tensor(pages, device=DEVICE), torch.tensor([1], device=DEVICE)
        expected = source[index].flatten(0, 1).index_fill(0, padding, 0)
        assert torch.equal(workspace.gather("keys", source, index, padding), expected)


def test_it_refuses_to_run_without_pages_or_with_a_mask() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    for mask in (None, torch.zeros(1)):
        with pytest.raises(RuntimeError, match="LanguageRunner"):
            paged_attention(None, tensor, tensor, tensor, mask)
