"""Tiny random language models of the real classes, sharp enough to have favourites and to end now and then."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from diffserve.runtime.loading.library_imports import import_quietly

VOCAB: Final = 48
END: Final = 3
KINDS: Final = ("llama", "gpt2")
CONFIGS: Final[dict[str, tuple[str, str, dict[str, int]]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
        },
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}),
}


@cache
def tiny_lm(kind: str, seed: int = 0) -> Any:
    """Return a ``transformers`` causal LM with ``VOCAB`` tokens, including ``END``, with weights from the seed."""
    config_name, model_name, sizes = CONFIGS[kind]
    config = import_quietly("transformers", config_name)(
        vocab_size=VOCAB, bos_token_id=1, eos_token_id=END, pad_token_id=0, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = import_quietly("transformers", model_name)(config).eval()
        with torch.no_grad():  # transformers starts at 0.02, where every token is as likely as the next
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(8)
    return model


def next_logits(model: Any, sequences: list[list[int]]) -> Tensor:
    """(B, V) logits after each of ``sequences``, by plain full forward passes."""
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in sequences])


def all_logits(model: Any, token_ids: list[int], count: int) -> Tensor:
    """(count, V) logits after each of the last ``count`` tokens of one sequence."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0, -count:]
    return logits
