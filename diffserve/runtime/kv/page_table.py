"""The pages of one sequence: a handle that the pool fills, and callers read."""

from __future__ import annotations

import torch

from diffserve.runtime.kv.prefix_index import LogicalPage
from diffserve.runtime.kv.spec import PagePlan


class PageTable:
    """Which logical pages hold the keys and values of one sequence, and how many tokens have a place on them.

    Made by ``PagePool.open`` and ``PagePool.fork`` and changed by the pool only. ``logical_pages[i]`` holds tokens
    ``i * page_tokens`` onwards; the last may be partly filled. Logical pages may be shared with other tables: shared
    and filed ones are read-only, see ``PagePool.reserve``.
    """

    __slots__ = ("_page_ids", "is_open", "keys", "logical_pages", "num_tokens", "plan", "root", "version")

    def __init__(self, plan: PagePlan, root: bytes) -> None:
        self.plan = plan
        self.root = root
        self.is_open = True
        self.num_tokens = 0
        self.logical_pages: list[LogicalPage] = []
        self.keys: list[bytes] = []
        """Hash chain of the leading full logical pages whose tokens are known (committed or found)."""
        self.version = 0
        """Rises whenever ``logical_pages`` changes, so that a stale ``PagedBatch`` can be told."""
        self._page_ids: tuple[int, torch.Tensor] | None = None

    @property
    def tenant(self) -> str:
        """Name of the tenant it belongs to."""
        return self.plan.spec.tenant

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Page ids: for each logical page one for each group of layers."""
        return tuple(logical.pages for logical in self.logical_pages)

    @property
    def num_pages(self) -> int:
        """Pages held, shared ones included."""
        return len(self.logical_pages) * self.plan.num_groups

    @property
    def capacity_tokens(self) -> int:
        """Tokens that would fit on the logical pages held."""
        return len(self.logical_pages) * self.plan.spec.page_tokens

    @property
    def last_key(self) -> bytes:
        """Where the hash chain goes on."""
        return self.keys[-1] if self.keys else self.root

    def page_ids(self) -> torch.Tensor:
        """The same as ``pages``, as int64 (num_sheets, num_groups) on the CPU; kept until the logical pages change."""
        if self._page_ids is None or self._page_ids[0] != self.version:
            ids = torch.tensor(self.pages, dtype=torch.int64).reshape(len(self.logical_pages), self.plan.num_groups)
            self._page_ids = (self.version, ids)
        return self._page_ids[1]

    def __repr__(self) -> str:
        state = f"{self.num_tokens} tokens on {list(self.pages)}" if self.is_open else "closed"
        return f"PageTable({self.tenant!r}, {state})"
