"""Small real tokenizers, one of each way to spell: GPT-2's, Llama's with byte fallback, CLIP's."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from diffserve.runtime.loading.library_imports import import_quietly
from tests.tiny_models import tokenizer as clip_tokenizer

KINDS: Final = ("byte_level", "metaspace", "clip")
END: Final = "</s>"
CORPUS: Final = (
    "a red cat on the mat",
    "the dog and the fox sat on a red mat, the cat sat too",
    "a sunny sun over the sunset, and the sun sat",
    "naïve café for the fox's dog",
)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=285, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    bytes_of_all = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", END, *bytes_of_all], show_progress=False, max_token_length=6
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no token across words
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] not in bytes_of_all]
    return Tokenizer.from_str(json.dumps(written))  # bytes are ordinary tokens, which the trainer cannot say


@cache
def tiny_tokenizer(kind: str) -> Any:
    """Return a transformers tokenizer with the end token ``END`` (CLIP has a different one)."""
    if kind == "clip":
        return clip_tokenizer(Path(tempfile.mkdtemp()))
    unk = {"unk_token": "<unk>"} if kind == "metaspace" else {}
    backend = {"byte_level": _byte_level, "metaspace": _metaspace}[kind]()
    return import_quietly("transformers", "PreTrainedTokenizerFast")(tokenizer_object=backend, eos_token=END, **unk)


def spell(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of ``text``, without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def say(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of ``token_ids``, decoded at once."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
