"""CLIP's own vocabulary, for single-file checkpoints: those carry every weight but not the tokenizer.

The merges ship as package data (``clip_merges.txt.gz``, MIT, see ``clip_merges.LICENSE``); the vocabulary follows
from them: 256 bytes, 256 bytes at a word's end, one token for each merge, two marks.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from diffserve.runtime.loading.components import load_tokenizer

MERGES_FILE: Final = Path(__file__).with_name("clip_merges.txt.gz")
START, END = "<|startoftext|>", "<|endoftext|>"
WINDOW_TOKENS: Final = 77
VOCABULARY_SIZE: Final = 49408


def byte_letters() -> dict[str, int]:
    """Return the letters that stand for bytes, in the order of their ids: printable bytes first, then the others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def clip_vocabulary() -> tuple[dict[str, int], list[str]]:
    """(token -> id, merges as "left right" lines)."""
    merges = gzip.decompress(MERGES_FILE.read_bytes()).decode("utf-8").splitlines()
    letters = byte_letters()
    word_ends = [f"{letter}</w>" for letter in letters]
    tokens = [*letters, *word_ends, *(merge.replace(" ", "") for merge in merges), START, END]
    return {token: index for index, token in enumerate(tokens)}, merges


def clip_tokenizer(*, pad: str) -> Any:
    """Create a ``CLIPTokenizer`` with CLIP's vocabulary; ``pad`` is the end mark for CLIP, ``!`` for OpenCLIP."""
    vocabulary, merges = clip_vocabulary()
    marks = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": WINDOW_TOKENS, **marks}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return load_tokenizer(directory)
