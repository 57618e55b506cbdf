"""Tiny random language models of the real classes, saved as real directories, and a tokenizer of single bytes.

Weights are ten times as wide as usual, so that logits differ by much and the most likely token depends on the whole
text: a wrong mask, position or page shows in the tokens within a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diffserve.runtime.loading.library_imports import hushed, import_quietly

END, PAD = "<end>", "<pad>"
CONTEXT_TOKENS: Final = 160

KINDS: Final = ("llama", "qwen2", "qwen3", "gpt2", "gemma")
"""The classes that the issue names; SmolLM is a Llama."""

OTHER_KINDS: Final = ("gemma2", "mistral")
"""Sliding windows, and in Gemma 2 scores that are squeezed."""


def vocabulary() -> dict[str, int]:
    """Token -> id: every byte, an end and a pad."""
    return {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), END, PAD])}


VOCAB_SIZE: Final = len(vocabulary())
END_ID, PAD_ID = vocabulary()[END], vocabulary()[PAD]


def make_tokenizer() -> Any:
    """One token for each byte of UTF-8."""
    bpe = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    cls = import_quietly("transformers", "PreTrainedTokenizerFast")
    return cls(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )


def make_config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of ``kind``."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.2,
    }
    if kind == "gpt2":
        settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_TOKENS}
        return import_quietly("transformers", "GPT2Config")(**{**common, **settings, **changes})
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
    }
    kind_fields: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {"max_window_layers": 2},
        "qwen3": {"head_dim": 16, "max_window_layers": 2},
        "gemma": {"head_dim": 16, "num_key_value_heads": 1},
        "gemma2": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        "mistral": {"sliding_window": 7},
    }
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2"}
    cls = import_quietly("transformers", f"{names.get(kind, kind.capitalize())}Config")
    return cls(**{**common, **settings, **kind_fields[kind], **changes})


def make_network(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random model of ``kind`` in float32, ready to run."""
    torch.manual_seed(seed)
    with hushed("transformers"):
        network = import_quietly("transformers", "AutoModelForCausalLM").from_config(
            make_config(kind, **changes),
            attn_implementation="eager",  # transformers 5.17 leaves the softcap of Gemma 2 out elsewhere
        )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)  # they start at zero, and would hide a bias that is left out
    return network.eval().requires_grad_(False)


def save(directory: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """Save a model directory with tokenizer as transformers writes it."""
    network = make_network(kind, seed=seed, **changes)
    with hushed("transformers"):
        network.save_pretrained(directory, safe_serialization=True)
        make_tokenizer().save_pretrained(directory)
    return directory


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of a random text: bytes only."""
    return torch.randint(VOCAB_SIZE - 2, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def generate(network: Any, prompt_ids: Sequence[int], max_tokens: int, **settings: Any) -> list[int]:
    """Return the output of transformers' ``generate`` for ``prompt_ids``, greedy unless ``settings`` override it."""
    ids = torch.tensor([list(prompt_ids)])
    output = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=PAD_ID,
        **settings,
    )
    output_ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return output_ids
