"""A language model that says one thing: a real Llama, with weights written by hand.

Embeddings are one-hot, attention and MLP add nothing, and the head maps each byte to the one that follows it. After the
last byte of the chat template comes the answer, byte by byte, then the end. Every byte of the answer must be another.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from diffserve.runtime.loading.library_imports import hushed
from tests.runtime.language import tiny

TEMPLATE: Final = (
    "{%- for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{%- endfor %}"
    "{%- if add_generation_prompt %}[me]{%- endif %}"
)
CONTEXT_TOKENS: Final = 4096
CERTAIN: Final = 4.0


def save_talker(directory: Path, says: str, *, is_instruct: bool = True) -> Path:
    """Save a model directory whose model answers every conversation with ``says``."""
    if len(set(says)) != len(says) or "]" in says:
        raise ValueError(f"{says!r} says a character twice")
    network = tiny.make_network(
        "llama",
        hidden_size=tiny.VOCAB_SIZE,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=CONTEXT_TOKENS,
    )
    ids = [*(tiny.make_tokenizer()(f"]{says}").input_ids), tiny.END_ID]
    with torch.no_grad():
        _empty(network)
        for before, after in pairwise(ids):
            network.lm_head.weight[after, before] = CERTAIN
    tokenizer = tiny.make_tokenizer()
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.chat_template = TEMPLATE if is_instruct else None
    with hushed("transformers"):
        network.save_pretrained(directory, safe_serialization=True)
        tokenizer.save_pretrained(directory)
    return directory


def _empty(network: Any) -> None:
    """Return the input unchanged."""
    network.model.embed_tokens.weight.copy_(torch.eye(tiny.VOCAB_SIZE))
    for layer in network.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    network.lm_head.weight.zero_()
