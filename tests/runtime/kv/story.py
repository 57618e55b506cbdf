"""Small tenants and a pool of ten pages, and numbers that say which token they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffserve.runtime.kv import Gathered, KVSpec, LayerSpec, PagePool, PageTable
from tests.device import DEVICE

NUM_PAGES, PAGE_BYTES = 10, 512
LLM = KVSpec("llm", (LayerSpec(2, 8), LayerSpec(2, 8)), torch.float32, page_tokens=4)
"""Two pages a logical page: five logical pages fill the pool."""

UNET = KVSpec("unet", (LayerSpec(2, 4), LayerSpec(4, 2)), torch.float32, page_tokens=4, whole_sequences=True)
"""One page a logical page, two layers on it; whole prompts may be found."""


def ten_pages(*specs: KVSpec) -> PagePool:
    """Return a pool of ten pages with these tenants."""
    pool = PagePool(NUM_PAGES, PAGE_BYTES, device=DEVICE)
    for spec in specs:
        pool.register(spec)
    return pool


def history_numbers(token_ids: Sequence[int], salt: bytes = b"") -> list[float]:
    """One number for each token, of all tokens up to it: what a causal model would compute, exact in float32."""
    numbers, state = [], sum(salt)
    for token in token_ids:
        state = (31 * state + token + 7) % 10007
        numbers.append(float(state))
    return numbers


def write_tokens(pool: PagePool, table: PageTable, token_ids: Sequence[int], start: int, salt: bytes = b"") -> None:
    """Write tokens ``start`` onwards in all layers: keys are history numbers plus half the layer, values minus that."""
    numbers = torch.tensor(history_numbers(token_ids, salt)[start:], device=DEVICE)
    spec = table.plan.spec
    batch = pool.batch([table], [start], [len(token_ids)])
    for index, layer in enumerate(spec.layers):
        keys = (numbers + 0.5 * index)[:, None, None].expand(-1, layer.num_heads, layer.head_dim)
        batch.write(index, keys, -keys)


def write(pool: PagePool, table: PageTable, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store keys and values (T, heads, head_dim) of tokens ``start`` onwards: ``batch`` and ``write`` at once."""
    pool.batch([table], [start], [start + len(keys)]).write(layer, keys, values)


def gather(pool: PagePool, tables: Sequence[PageTable], layer: int, lengths: Sequence[int] | None = None) -> Gathered:
    """Keys and values (B, T, heads, head_dim), zero beyond each length: ``batch`` and ``gather`` at once."""
    return pool.batch(tables, lengths=lengths).gather(layer)


def assert_holds(pool: PagePool, table: PageTable, token_ids: Sequence[int], salt: bytes = b"") -> None:
    """Check that every layer of ``table`` reads as ``write_tokens`` writes these tokens."""
    numbers = torch.tensor(history_numbers(token_ids, salt), device=DEVICE)
    batch = pool.batch([table], lengths=[len(token_ids)])
    for index in range(len(table.plan.spec.layers)):
        keys, values = batch.gather(index)
        expected = (numbers + 0.5 * index)[None, :, None, None].expand_as(keys)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)


def write_sequence(pool: PagePool, tenant: str, token_ids: Sequence[int], salt: bytes = b"") -> PageTable:
    """Open, write and commit a sequence."""
    table, num_cached = pool.open(tenant, token_ids, salt, reserve=len(token_ids))
    write_tokens(pool, table, token_ids, num_cached, salt)
    pool.commit(table, token_ids)
    return table
