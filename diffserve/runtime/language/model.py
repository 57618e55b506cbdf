"""LanguageModel: a transformers causal language model with its tokenizer and its info."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from diffserve.api.errors import InvalidRequest
from diffserve.api.text_types import ChatMessage, LanguageModelInfo
from diffserve.runtime.decoding import JsonSpelling
from diffserve.runtime.kv import KVSpec, LayerSpec
from diffserve.runtime.language.attention import PAGED, LayerCall

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
            f"the model {model_id!r} has no chat template; send a prompt in place of messages, or load one that chats.",
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
        f"the model's chat template does not take these messages: {reason.rstrip('.')}.", param="messages"
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
