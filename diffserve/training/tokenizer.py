"""Training of the embedded model's CLIP-style byte-pair tokenizer on captions of its world."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from diffserve.world.captions import caption
from diffserve.world.scenes import scenes

MAX_TOKENS = 32
VOCABULARY_SIZE = 1200
START, END = "<|startoftext|>", "<|endoftext|>"
WORD = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def train_tokenizer(directory: Path, *, seed: int = 0, num_captions: int = 20_000) -> Path:
    """Write ``vocab.json``, ``merges.txt`` and the tokenizer's configs, readable by transformers' CLIPTokenizer."""
    rng = random.Random(seed)
    source = scenes(seed, held_out=False)
    corpus = [caption(next(source), rng) for _ in range(num_captions)]
    bpe = Tokenizer(models.BPE(unk_token=END, end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(False, False, False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*tokens, START, END]))}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = "\n".join(" ".join(pair) for pair in merges)
    (directory / "merges.txt").write_text(f"#version: 0.2\n{lines}\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory
