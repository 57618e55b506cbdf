"""LanguageRunner: a language model over the pages of a pool. One call for a mixed batch of prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.api.errors import InvalidRequest
from diffserve.runtime.kv import PagePool, PageTable
from diffserve.runtime.language.attention import PagedCall
from diffserve.runtime.language.model import LanguageModel, run_network
from diffserve.runtime.language.row_groups import Span, Workspace
from diffserve.runtime.transfer import send_together


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Next tokens of one sequence: a part of its prompt, its last token, or a draft to be checked.

    Attributes:
        table: Pages of the sequence so far; pages for the new tokens are reserved.
        start: Position of the first new token.
        token_ids: New tokens, at least one.
        num_logits: Number of last tokens whose logits are needed; 0 for keys and values only.
        last: (1,) int64 on the device, a token unknown to the host that replaces the last of ``token_ids``.
    """

    table: PageTable
    start: int
    token_ids: Sequence[int]
    num_logits: int = 1
    last: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.num_logits <= len(self.token_ids) or not self.token_ids:
            raise ValueError(f"{self.num_logits} lines of logits are asked of {len(self.token_ids)} tokens.")

    @property
    def end(self) -> int:
        """How many tokens the sequence has after it."""
        return self.start + len(self.token_ids)


class LanguageRunner:
    """``model`` on ``pool``, where its keys and values belong to ``tenant``. For one thread.

    Raises ValueError when ``tenant`` is taken by another model, or a page too small for a layer of this one.
    """

    def __init__(
        self, model: LanguageModel, pool: PagePool, *, tenant: str = "llm", page_tokens: int | None = None
    ) -> None:
        self.model = model
        self.pool = pool
        self.tenant = tenant
        self.plan = pool.register(model.spec(tenant, page_tokens=page_tokens))
        self._workspace = Workspace()

    @torch.inference_mode()
    def forward(self, chunks: Sequence[TokenChunk]) -> Tensor:
        """Write the chunks' keys and values; return logits (sum of ``num_logits``, vocabulary), chunk after chunk.

        All new tokens go through the network as one row (1, N), each at its own position, idle ones behind them. Raises
        PageTableError when room was not reserved, InvalidRequest for a token that the model does not know.
        """
        self._check(chunks)
        spans = [Span(len(chunk.token_ids), chunk.end) for chunk in chunks]
        call = PagedCall(self.pool, [chunk.table for chunk in chunks], spans, self._workspace)
        token_ids = [token_id for index in call.order for token_id in chunks[index].token_ids]
        # padding: on a CPU oneDNN makes a kernel for every length and caches a thousand
        num_idle = few_lengths(len(token_ids)) - len(token_ids) if self.model.device.type == "cpu" else 0
        ends = dict(zip(call.order, accumulate(len(chunks[index].token_ids) for index in call.order), strict=True))
        unknown = [index for index, chunk in enumerate(chunks) if chunk.last is not None]
        host_lists = [
            token_ids + token_ids[-1:] * num_idle,
            _logit_rows(chunks, ends),
            [ends[index] - 1 for index in unknown],
        ]
        ids, logit_rows, places = send_together(
            [torch.tensor(part, dtype=torch.int64) for part in host_lists], self.model.device
        )
        if unknown:
            ids.index_copy_(0, places, torch.cat([last for chunk in chunks if (last := chunk.last) is not None]))
        positions = F.pad(call.batch.positions, (0, num_idle)) if num_idle else call.batch.positions
        return run_network(self.model.network, ids, positions, logit_rows, paged=call)

    def _check(self, chunks: Sequence[TokenChunk]) -> None:
        context_tokens, vocab_size = self.model.info.context_tokens, self.model.info.vocab_size
        for chunk in chunks:
            if chunk.end > context_tokens:
                raise InvalidRequest(
                    f"token {chunk.end} does not fit a context of {context_tokens} tokens.", param="prompt"
                )
            if not 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < vocab_size:
                raise InvalidRequest(
                    f"a token id of {list(chunk.token_ids)[:8]} is not in the vocabulary of {vocab_size}.",
                    param="prompt",
                )


def few_lengths(num_tokens: int) -> int:
    """Round ``num_tokens`` up by at most an eighth, so that there are eight lengths between a number and its double."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens // step) * step


def _logit_rows(chunks: Sequence[TokenChunk], ends: Mapping[int, int]) -> list[int]:
    """Return the positions of the needed logits, chunk by chunk, when the chunks' new tokens end at ``ends``."""
    return [place for index, chunk in enumerate(chunks) for place in range(ends[index] - chunk.num_logits, ends[index])]
