"""JsonConstraint: JSON that follows a schema, token by token, by llguidance's parser; and those of an engine, kept.

The parser (Earley's, over a lexer of regex derivatives) says of every token of a vocabulary whether its bytes may
follow. A state is such a parser, and going on makes another one: a few microseconds, and drafts, beams and followers
need no way back. ::

    {"name":"   any bytes of a string, then the quote     ,"age":   forced: a draft that is nearly always right
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.api.errors import InvalidRequest
from diffserve.api.json_limits import length_of
from diffserve.api.json_schemas import followed, has_llguidance, matcher
from diffserve.runtime.decoding.constraint import AnyConstraint, Constraint
from diffserve.runtime.text.clip_vocabulary import byte_letters

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_SCHEMAS: Final = 32
"""Compiled grammars kept by an engine. Each may hold tens of megabytes, and requests choose them."""

PARAM: Final = "response_format"
SAMPLE: Final = '{"name": ["a", -2.5e3, true, null], "b c": "caf\u00e9 \N{FOX FACE}"}'
NEEDED: Final = frozenset(bytes([byte]) for byte in (*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)))
"""What a vocabulary must be able to say byte by byte, so that no text ends up where nothing can follow."""

BEGINNING: Final = "{"
"""Prefix of a text when its tokens are looked up, because many tokenizers put a space before the first word."""

CLOSERS: Final = b'}]",:nt0f[{'
"""Bytes that end a text soonest, the best first: what is open is closed, and what is missing is short."""

SPACE: Final = 0x20
QUOTE: Final = b'"'

SPARE_TOKENS: Final = 8
"""A text is ended so many tokens before it has to be."""

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class JsonConstraint(Constraint["LLMatcher | None"]):
    """Texts that follow a schema. A state is a parser, None after a token that was not allowed or that ended the text.

    A parser that gave up, as on a schema that requires parts without end, allows nothing and has its ``problem``.

    Raises InvalidRequest for a schema that cannot be followed.

    Args:
        tokenizer: The vocabulary as llguidance reads it.
        schema: The schema as JSON.
        of_byte: The token that says a single byte, by the byte.
    """

    def __init__(self, tokenizer: LLTokenizer, schema: str, of_byte: Mapping[int, int]) -> None:
        try:
            start = matcher(tokenizer, schema)
        except ValueError as error:
            raise InvalidRequest(f"{PARAM}: {error}", param=PARAM, code="invalid_json_schema") from None
        if start.is_error():
            raise InvalidRequest(f"{PARAM}: {start.get_error()}", param=PARAM, code="invalid_json_schema")
        self.start = start
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self._ends = np.array(sorted(self.end_ids), dtype=np.int64)
        self._of_byte = of_byte
        self._length = length_of(followed(schema), lambda text: len(tokenizer.tokenize_str(text)))

    def advance(self, state: LLMatcher | None, token_id: int) -> LLMatcher | None:
        """Return the state after ``token_id``."""
        if state is None or token_id in self.end_ids:
            return None
        if state.is_error():
            return state
        after = state.deep_copy()
        if after.consume_token(token_id):
            return after
        return after if state.deep_copy().validate_tokens([token_id]) else None  # allowed, and the parser gave up on it

    def mask(self, state: LLMatcher | None, vocab_size: int) -> Tensor:
        """Return a (vocab_size,) bool mask on the CPU; end tokens are allowed where the JSON text is complete."""
        allowed = np.zeros(vocab_size, dtype=np.uint8)
        if state is not None:
            parser_mask = np.unpackbits(np.frombuffer(state.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed[: len(parser_mask)] = parser_mask[:vocab_size]
            allowed[self._ends[self._ends < vocab_size]] = state.is_accepting()
        return torch.from_numpy(allowed.view(np.bool_))

    def ending(self, state: LLMatcher | None, mask: Tensor, num_left: int, max_tokens: int) -> Tensor:
        """Return the part of ``mask`` that ends the text soonest, if only as many tokens are left as an ending needs.

        A schema whose shortest text does not fit into ``max_tokens`` is not changed.
        """
        needed = self._length.closing + SPARE_TOKENS
        if state is None or num_left > needed or self._length.shortest >= max_tokens:
            return mask
        vocab_size = len(mask)
        choices = [[end for end in self.end_ids if end < vocab_size and mask[end]]]
        is_in_string = bool(mask[self._of_byte[SPACE]])  # white space is only allowed in strings
        choices += [self.forced(state, 1)] + [[self._of_byte[byte]] for byte in (QUOTE if is_in_string else CLOSERS)]
        for choice in choices:
            if choice and choice[0] < vocab_size and mask[choice[0]]:
                only = torch.zeros_like(mask)
                only[choice] = True
                return only
        return mask

    def num_allowed(self, state: LLMatcher | None, token_ids: Sequence[int]) -> int:
        """How many of ``token_ids`` may follow one after another; an end is not guessed."""
        inside = list(takewhile(lambda token_id: token_id not in self.end_ids, token_ids))
        return 0 if state is None else int(state.validate_tokens(inside))

    def forced(self, state: LLMatcher | None, limit: int) -> list[int]:
        """Tokens that spell the only bytes that may follow, as the tokenizer would spell them."""
        return [] if state is None else state.compute_ff_tokens()[:limit]

    def problem(self, state: LLMatcher | None) -> str:
        """Return the parser's error, empty without one."""
        return "" if state is None or not state.is_error() else state.get_error()


@dataclass(frozen=True)
class JsonSpelling:
    """A vocabulary as llguidance reads it: the bytes of every token, and how a text is cut into tokens.

    Made once for a model: it takes a second for a hundred thousand tokens.
    """

    tokenizer: LLTokenizer
    of_byte: Mapping[int, int]

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> JsonSpelling | None:
        """Create the spelling of a transformers tokenizer.

        Args:
            tokenizer: The tokenizer.
            vocab_size: Number of the network's tokens, which may exceed that of the tokenizer.
            end_ids: The end tokens.

        Returns:
            None if the tokens' bytes are unknown or cannot spell all of JSON, or if llguidance is not installed.
        """
        if not has_llguidance():
            return None
        from llguidance import LLTokenizer, TokenizerWrapper

        spelled = token_bytes(tokenizer, vocab_size)
        if spelled is None or not end_ids or not set(spelled) >= NEEDED or not _is_right(tokenizer, spelled):
            return None
        vocabulary = _Vocabulary(tokenizer, spelled, end_ids[0])
        reader = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=list(end_ids))
        return cls(reader, vocabulary.of_byte)


class JsonConstraints:
    """Constraints by schema, compiled in a background thread; the last ``KEPT_SCHEMAS`` used are cached.

    Thread-safe.
    """

    def __init__(self, spelling: JsonSpelling) -> None:
        self._spelling = spelling
        self._lock = threading.Lock()
        self._kept: LRUCache[str, Future[AnyConstraint]] = LRUCache(KEPT_SCHEMAS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="json-schemas")

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, schema: str) -> Future[AnyConstraint]:
        """Return a future of the constraint of ``schema``; its ``result`` may raise InvalidRequest."""
        with self._lock:
            future = self._kept.get(schema)
            if future is None:
                future = self._thread.submit(JsonConstraint, self._spelling.tokenizer, schema, self._spelling.of_byte)
                self._kept[schema] = future
            return future


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes] | None:
    """Return the bytes of each token, empty for special tokens and unused ids.

    Supported are tokenizers of bytes (GPT-2), of words with a mark for spaces (Llama), and of words with a mark for
    their ends (CLIP); returns None for others.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    kind = backend.decoder.__getstate__().decode()
    letters = byte_letters() if '"ByteLevel"' in kind else None
    suffix = getattr(backend.model, "end_of_word_suffix", None) or ""
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids)
    spelled = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= vocab_size or token_id in special:
            continue
        if token_id in added:
            spelled[token_id] = b"" if added[token_id].special else token.encode()
            continue
        word, space = (token.removesuffix(suffix), " ") if suffix and token.endswith(suffix) else (token, "")
        if letters is not None:
            if not all(letter in letters for letter in word):
                return None
            spelled[token_id] = bytes(letters[letter] for letter in word) + space.encode()
        elif byte := BYTE_TOKEN.fullmatch(word):
            spelled[token_id] = bytes([int(byte[1], 16)])
        else:
            spelled[token_id] = (word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ") + space).encode()
    return spelled


def _is_right(tokenizer: Any, spelled: Sequence[bytes]) -> bool:
    """Whether the bytes of a sample text's tokens equal what the tokenizer decodes."""
    ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return max(ids) < len(spelled) and b"".join(spelled[token_id] for token_id in ids).strip() == text.strip().encode()


class _Vocabulary:
    """Interface of a tokenizer that llguidance calls for unknown kinds of tokenizers."""

    def __init__(self, tokenizer: Any, spelled: Sequence[bytes], end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.tokens = spelled
        self.special_token_ids = [token_id for token_id, token_bytes in enumerate(spelled) if not token_bytes]
        self._tokenizer = tokenizer
        self._begun = self._ids(BEGINNING)
        self.of_byte = {
            token_bytes[0]: token_id for token_id, token_bytes in enumerate(spelled) if len(token_bytes) == 1
        }

    def __call__(self, text: str) -> list[int]:
        """Tokenize ``text`` as a part of a longer text, byte by byte if that is ambiguous."""
        if not isinstance(text, str):
            raise TypeError("texts only")
        ids = self._ids(BEGINNING + text)
        prefix, suffix = ids[: len(self._begun)], ids[len(self._begun) :]
        is_right = prefix == self._begun and b"".join(self.tokens[token_id] for token_id in suffix) == text.encode()
        return suffix if is_right else [self.of_byte[byte] for byte in text.encode()]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
