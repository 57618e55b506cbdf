"""Causal language models of transformers, with tokenizer and info, and the runner that calls them over a page pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import ChatMessage, LanguageModelInfo
from diffserve.runtime.decoding import JsonSpelling
from diffserve.runtime.kv import KVSpec, LayerSpec, PagePool, PageTable
from diffserve.runtime.language.attention import PAGED, LayerCall, PagedCall
from diffserve.runtime.language.row_groups import Span, Workspace
from diffserve.runtime.transfer import send_together

PAGE_TOKENS: Final = 16


@dataclass(frozen=True)
class LayerShape:
    """One attention layer, as it called: key/value heads, numbers in each, window and softcap if it has them."""

    num_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class LanguageModel:
    """Loaded language model, created by ``load_language_model``.

    Attributes:
        network: transformers' ``...ForCausalLM``, on its device, with ``paged_attention``.
        tokenizer: transformers' tokenizer of the same directory.
        layers: Shapes of its attention layers, first to last.
        spelling: Bytes of its tokens, for JSON output; None if unknown.
    """

    network: Any
    tokenizer: Any
    info: LanguageModelInfo
    layers: tuple[LayerShape, ...]
    device: torch.device
    dtype: torch.dtype
    spelling: JsonSpelling | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends a text."""
        return self.info.end_ids

    def spec(self, tenant: str = "llm", *, page_tokens: int | None = None) -> KVSpec:
        """Return the spec of the model's keys and values for a ``PagePool``."""
        return KVSpec(
            tenant,
            tuple(LayerSpec(layer.num_heads, layer.head_dim) for layer in self.layers),
            self.dtype,
            page_tokens=page_tokens or PAGE_TOKENS,
            model_digest=f"{self.info.digest} {self.info.dtype}".encode(),
        )

    @torch.inference_mode()
    def plain_logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits (T, V) of one sequence by transformers' own attention without a pool, for comparison."""
        ids = torch.tensor(token_ids, device=self.device)
        everywhere = torch.arange(len(token_ids), device=self.device)
        has_softcap = any(layer.softcap is not None for layer in self.layers)
        self.network.set_attn_implementation("eager" if has_softcap else "sdpa")
        try:
            return run_network(self.network, ids, everywhere, everywhere)
        finally:
            self.network.set_attn_implementation(PAGED)


def run_network(network: Any, token_ids: Tensor, positions: Tensor, keep: Tensor, **paged: LayerCall) -> Tensor:
    """Run a transformers causal LM without a cache on ``token_ids`` (N,) at ``positions`` (N,).

    Returns logits (len(keep), V) in the model's dtype.
    """
    output = network(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep, **paged
    )
    logits: Tensor = output.logits[0]
    return logits


MOST_REASON_CHARS: Final = 200

Turns = list[dict[str, str]]


def render(tokenizer: Any, messages: Sequence[ChatMessage], model_id: str) -> str:
    """Render ``messages`` as a prompt that ends where the model's answer begins, special tokens included.

    Raises InvalidRequest if the model has no chat template, or if the template rejects the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(
            f"the model {model_id!r} has no chat template; send a prompt in place of messages, or load a chat model.",
            param="messages",
        )
    turns = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]
    refused: Exception | None = None
    for conversation in filter(None, (turns, fold_system(turns))):
        try:
            text: str = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            return text
        except Exception as error:  # templates may raise anything
            refused = error
    reason = (str(refused).splitlines() or [type(refused).__name__])[0][:MOST_REASON_CHARS]
    raise InvalidRequest(
        f"the model's chat template does not accept these messages: {reason.rstrip('.')}.", param="messages"
    ) from refused


def fold_system(turns: Turns) -> Turns | None:
    r"""Move the system texts to the head of the first user turn; return None if one of the two is missing.

    >>> fold_system([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    [{'role': 'user', 'content': 'be brief\n\nhello'}]
    """
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    later_turns = [turn for turn in turns if turn["role"] != "system"]
    first = next((index for index, turn in enumerate(later_turns) if turn["role"] == "user"), None)
    if not system or first is None:
        return None
    head = {"role": "user", "content": "\n\n".join([*system, later_turns[first]["content"]])}
    return [*later_turns[:first], head, *later_turns[first + 1 :]]


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
            raise ValueError(f"{self.num_logits} rows of logits are requested of {len(self.token_ids)} tokens.")

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
