"""The bytes behind the pages, and typed views of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffserve.api.errors import ConfigError
from diffserve.runtime.kv.spec import PAGE_ALIGNMENT_BYTES, PagePlan


class LayerView(NamedTuple):
    """One layer of one tenant over all pages of the arena. A logical page's page for the layer is
    ``logical.pages[group]``.

    Only pages that belong to the tenant hold numbers of this layer; what other pages show is meaningless, NaN included.
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
