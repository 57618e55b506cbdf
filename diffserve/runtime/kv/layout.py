"""What a tenant keeps for each token, and where in its pages each layer lies.

A *logical page* is the unit of sharing: ``page_tokens`` consecutive tokens of one sequence in all layers of a tenant.
It is folded into ``num_groups`` pages of equal bytes. Layers are put, in order, into the first page of the logical page
that still has room, and stay at that (group, offset) for good::

    SD 1.5's first five layers, 320 to 1280 channels, pages as large as 16 tokens of 1280 channels

    group 0  | 320 | 320 |    640    |           layers 0, 1, 2
    group 1  |    640    |           |           layer  3      (a later 640 fills the rest)
    group 2  |         1280          |           layer  4
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from diffserve.api.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_ALIGNMENT_BYTES = 64
"""Pages start on cache lines, and every dtype divides their size."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer: ``num_heads`` key/value heads (not query heads) of ``head_dim`` numbers each."""

    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.head_dim < 1:
            raise ValueError(f"a layer needs at least one head of one number, got {self.num_heads} x {self.head_dim}.")


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one tenant of the pool, per token.

    tenant: its name in errors, counters and calls ("llm", "text_encoder", "unet").
    layers: in the order in which callers number them.
    dtype: float32, bfloat16 or float16; tensors written must have it.
    page_tokens: tokens on a logical page. 16 wastes 4 % of a prompt of 77 tokens; 256 would waste 70 %.
    model_digest: identity of the weights (and of a fused adapter): pages of other weights are never found.
    whole_sequences: ``commit`` also files the last, partly filled logical page, and ``open`` may find all of a
        sequence. For padded prompts whose keys and values are read and never computed again (UNet); an LLM must compute
        at least its last token, so it leaves this off.

    Raises ValueError for anything that cannot be.
    """

    tenant: str
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    page_tokens: int = 16
    model_digest: bytes = b""
    whole_sequences: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.tenant or not self.layers:
            raise ValueError(f"a tenant needs a name and at least one layer, got {self.tenant!r} and {self.layers}.")
        if self.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"tenant {self.tenant!r}: dtype is {self.dtype}, keys and values are kept in {names}.")
        if self.page_tokens < 1:
            raise ValueError(f"tenant {self.tenant!r}: page_tokens is {self.page_tokens}, at least 1 is needed.")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: which tenant, weights, shapes and dtype. Tenants that differ in any of them share nothing."""
        shapes = [(layer.num_heads, layer.head_dim) for layer in self.layers]
        words = repr((self.tenant, shapes, str(self.dtype), self.page_tokens, self.model_digest.hex()))
        return hashlib.blake2b(words.encode(), digest_size=32).digest()

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one logical page's keys and values in ``layer``."""
        spec = self.layers[layer]
        return 2 * self.page_tokens * spec.num_heads * spec.head_dim * self.dtype.itemsize

    def num_logical_pages(self, num_tokens: int) -> int:
        """Logical pages that ``num_tokens`` tokens touch."""
        return -(-num_tokens // self.page_tokens)


class LayerPlace(NamedTuple):
    """Place of a layer on every logical page: page ``group`` of the logical page, ``offset_bytes`` from its start."""

    group: int
    offset_bytes: int


@dataclass(frozen=True)
class PagePlan:
    """Layout of a tenant's logical page on ``num_groups`` pages of ``page_bytes``; ``places`` has each layer's place.

    Raises ValueError, with both sizes, when one layer's part of a logical page is larger than a page.
    """

    spec: KVSpec
    page_bytes: int
    places: tuple[LayerPlace, ...] = field(init=False)
    num_groups: int = field(init=False)

    def __post_init__(self) -> None:
        filled: list[int] = []
        places = tuple(self._place(layer, filled) for layer in range(len(self.spec.layers)))
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "num_groups", len(filled))

    def _place(self, layer: int, filled: list[int]) -> LayerPlace:
        need = self.spec.layer_bytes(layer)
        if need > self.page_bytes:
            raise ValueError(
                f"tenant {self.spec.tenant!r}: layer {layer} needs {need} bytes for {self.spec.page_tokens} tokens and "
                f"a page has {self.page_bytes}: use pages of PagePlan.smallest_page_bytes(specs)."
            )
        group = next((g for g, used in enumerate(filled) if used + need <= self.page_bytes), len(filled))
        if group == len(filled):
            filled.append(0)
        filled[group] += need
        return LayerPlace(group, filled[group] - need)

    @staticmethod
    def smallest_page_bytes(specs: Iterable[KVSpec]) -> int:
        """Return the page size for these tenants: the largest single layer among them, rounded up to a cache line."""
        largest = max(spec.layer_bytes(layer) for spec in specs for layer in range(len(spec.layers)))
        return -(-largest // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES

    def num_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of ``num_tokens`` tokens takes, sharing nothing."""
        return self.spec.num_logical_pages(num_tokens) * self.num_groups


class LayerView(NamedTuple):
    """View of one tenant's layer over all pages of the arena.

    The page of a logical page for the layer is ``logical.pages[group]``. Only pages that belong to the tenant hold
    numbers of this layer; the contents of other pages are meaningless and may be NaN.
    """

    group: int
    keys: torch.Tensor  # (num_pages, page_tokens, heads, head_dim)
    values: torch.Tensor  # (num_pages, page_tokens, heads, head_dim)


class Arena:
    """``data``: uint8 (num_pages, page_bytes) on ``device``. Never cleared: pages hold what was last written.

    All of it is touched here, so that a process does not grow for hours while pages are used for the first time.

    Raises ConfigError when the pages cannot be.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        if num_pages < 1 or page_bytes < 1 or page_bytes % PAGE_ALIGNMENT_BYTES:
            raise ConfigError(
                f"a pool of {num_pages} pages of {page_bytes} bytes cannot be: at least one page is needed, of a "
                f"multiple of {PAGE_ALIGNMENT_BYTES} bytes (PagePlan.smallest_page_bytes gives one)."
            )
        with torch.inference_mode(False):
            self.data = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device).zero_()

    def views(self, plan: PagePlan) -> tuple[LayerView, ...]:
        """Every layer of ``plan``, writing through to the arena."""
        with torch.inference_mode(False):  # views made inside could only be written inside
            typed = self.data.view(plan.spec.dtype)  # (num_pages, page_bytes / itemsize)
            return tuple(self._view(typed, plan, layer) for layer in range(len(plan.places)))

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages, ``sources[i]`` to ``targets[i]``."""
        if sources:
            device = self.data.device
            pages = self.data.index_select(0, torch.tensor(sources, device=device))
            self.data.index_copy_(0, torch.tensor(targets, device=device), pages)

    def _view(self, typed: torch.Tensor, plan: PagePlan, layer: int) -> LayerView:
        place, spec = plan.places[layer], plan.spec.layers[layer]
        itemsize = plan.spec.dtype.itemsize
        part = typed.narrow(1, place.offset_bytes // itemsize, plan.spec.layer_bytes(layer) // itemsize)
        both = part.unflatten(1, (2, plan.spec.page_tokens, spec.num_heads, spec.head_dim))
        return LayerView(place.group, both[:, 0], both[:, 1])
