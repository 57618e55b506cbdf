"""Request routing by cache affinity and load: chooses the replica for each request.

A prompt is routed where its prefix is probably cached (approximate prefix index, as in SGLang's cache-aware router,
arXiv 2312.07104), unless that replica's queue is too long; overlap and load are one sum, as in Preble (arXiv
2407.00023). Pure data structures: nothing here waits, or depends on asyncio.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from cachetools import LRUCache

from diffserve.api.embedding_types import EmbeddingRequest
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.stage_types import DecodeRequest, EncodeRequest
from diffserve.api.text_types import TextRequest
from diffserve.api.types import GenerationRequest
from diffserve.api.upscale_types import UpscaleRequest

BLOCK_WORDS: Final = 8
"""Words per block: half a KV page of 16 tokens, so that early differences count and chance matches are rare."""

MAX_CHARS: Final = 16_384
"""Characters at the beginning of a text that are indexed."""

MAX_TEXTS: Final = 8
"""Texts of a request that are indexed."""

MAX_KEYS: Final = 8192
"""Default number of keys that are stored for each replica."""

KEY_BYTES: Final = 16
T = TypeVar("T")
_WORD = re.compile(r"\w+|[^\w\s]")

RoutedRequest = (
    GenerationRequest | TextRequest | RewriteRequest | EmbeddingRequest | UpscaleRequest | EncodeRequest | DecodeRequest
)


class TextBlock(NamedTuple):
    """A block of words of a text.

    Attributes:
        key: Hash of this block and of all blocks before it.
        num_words: Number of words in the block.
    """

    key: bytes
    num_words: int


class RouteNeeds(NamedTuple):
    """The properties of a request that matter for routing.

    Attributes:
        cost: Work, in the unit of the queues.
        model: Name of the model; "" if every replica has it.
        adapters: Keys of the LoRAs, ControlNets and IP-Adapters.
        texts: The texts as chains of blocks.
    """

    cost: float
    model: str = ""
    adapters: tuple[bytes, ...] = ()
    texts: tuple[tuple[TextBlock, ...], ...] = ()


class AffinityWeights(NamedTuple):
    """How much longer the queue of a replica with cached state may be, in requests of the same cost.

    A cached prefix saves the encoding of a text, adapters are read from disk in about a second, and a model in many.
    """

    prefix: float = 0.5
    adapters: float = 4.0
    model: float = 16.0


class ReplicaQueue(NamedTuple):
    """The load of a replica: cost of its unfinished requests, and names of its loaded models."""

    cost: float
    models: frozenset[str] = frozenset()


class Router:
    """Approximate index of the state that each replica has cached, filled from the requests that were sent to it.

    Prefixes are stored as in the page pool (``runtime/kv/prefix_index.py``), as a chain of hashes, but of words in
    place of tokens: there is no tokenizer here. The end of a text, however short, is a block as well. The index forgets
    the least recently used keys, so it may be wrong in both directions; an error costs one repeated prefill.
    """

    def __init__(self, weights: AffinityWeights | None = None, *, max_keys: int = MAX_KEYS) -> None:
        """Create an empty index with at most ``max_keys`` keys for each replica."""
        self.weights = weights or AffinityWeights()
        self.max_keys = max_keys
        self._keys: dict[str, LRUCache[bytes, None]] = {}

    def choose(self, needs: RouteNeeds, queues: Mapping[str, ReplicaQueue]) -> str:
        """Choose the replica for a request; ``record`` must be called when it is sent.

        The chosen replica minimizes ``queue cost - credit * request cost``, where the credit is the sum of the weights
        of what it has: the model, the adapters, and the prefix as a fraction of the longest one that any replica has.
        Of equal replicas the one with the fewest keys is chosen, since it has the most room.

        Args:
            needs: Properties of the request.
            queues: At least one replica, by name.
        """
        num_words = {name: self.num_known_words(name, needs) for name in queues}
        longest = max(num_words.values())

        def penalty(name: str) -> tuple[float, int]:
            queue, keys = queues[name], self._known_keys(name)
            credit = self.weights.prefix * num_words[name] / longest if longest else 0.0
            if needs.adapters and all(key in keys for key in needs.adapters):
                credit += self.weights.adapters
            if needs.model and (needs.model in queue.models or _model_key(needs.model) in keys):
                credit += self.weights.model
            return queue.cost - credit * needs.cost, len(keys)

        return min(queues, key=penalty)

    def record(self, replica: str, needs: RouteNeeds) -> None:
        """Note that ``replica`` has, or will soon have, what the request needs."""
        keys = self._keys.setdefault(replica, LRUCache(self.max_keys))
        blocks = (block.key for text in needs.texts for block in reversed(text))  # so that prefixes are evicted last
        for key in (*blocks, *needs.adapters, *([_model_key(needs.model)] if needs.model else [])):
            keys[key] = None

    def forget(self, replica: str) -> None:
        """Drop all keys of ``replica``, whose engine was restarted."""
        self._keys.pop(replica, None)

    def num_known_words(self, replica: str, needs: RouteNeeds) -> int:
        """Return the number of words at the beginnings of the texts that ``replica`` should have cached."""
        keys = self._known_keys(replica)
        return sum(_num_known_words(text, keys) for text in needs.texts)

    def _known_keys(self, replica: str) -> Mapping[bytes, None]:
        return self._keys.get(replica, {})


def route_needs(request: RoutedRequest, cost: float, first_model: str = "") -> RouteNeeds:
    """Return the properties of ``request`` that matter for routing.

    Args:
        request: The request.
        cost: Its work, in the unit of the queues.
        first_model: Name of the model of requests that name none.
    """
    match request:
        case EncodeRequest(generation=generation):
            return route_needs(generation, cost, first_model)
        case DecodeRequest():
            return RouteNeeds(cost, request.model or first_model)
        case GenerationRequest(diffusion=params):
            model = request.model or first_model
            names = [
                *(("lora", lora.name) for lora in params.loras),
                *(("control", control.name) for control in params.controlnets),
                *(("reference", reference.name) for reference in params.references),
            ]
            adapters = tuple(_key(b"", f"{kind} {model} {name}".encode()) for kind, name in names)
            salt = b"".join(adapters) + f"image {model} {params.clip_skip}".encode()
            texts = [chain(salt, request.prompt), chain(salt, request.negative_prompt)]
            if request.rewriting is not None:
                texts.append(chain(f"rewrite {request.rewriting.style}".encode(), request.prompt))
            return RouteNeeds(cost, model, adapters, tuple(texts))
        case TextRequest():
            salt = b"text" + request.cache_salt
            if request.token_ids:
                return RouteNeeds(cost, texts=(token_chain(salt, request.token_ids),))
            turns = ((message.role, message.content) for message in request.messages)
            return RouteNeeds(cost, texts=(chain(salt, request.prompt or "".join(_conversation(turns))),))
        case RewriteRequest():
            salt = f"rewrite {request.options.style}".encode() + request.cache_salt
            return RouteNeeds(cost, texts=(chain(salt, request.wish),))
        case UpscaleRequest(upscaler=upscaler):
            return RouteNeeds(cost, adapters=(_key(b"", f"upscaler {upscaler}".encode()),))
        case EmbeddingRequest():
            model = request.model or first_model
            salt = f"image {model} 1".encode()
            texts = [chain(salt, text) for text in request.texts[:MAX_TEXTS]]
            texts += [token_chain(salt, ids) for ids in request.token_ids[:MAX_TEXTS]]
            return RouteNeeds(cost, model, texts=tuple(texts))


def chain(salt: bytes, text: str) -> tuple[TextBlock, ...]:
    """Split ``text`` into blocks; equal keys mean equal salt and equal words, ignoring case, from the beginning on."""
    words = _WORD.findall(text[:MAX_CHARS].casefold())
    return tuple(_hash_chain(salt, [" ".join(part).encode(errors="replace") for part in _parts(words)], len(words)))


def token_chain(salt: bytes, token_ids: Sequence[int]) -> tuple[TextBlock, ...]:
    """Split a text of token ids into blocks, as ``chain`` splits words."""
    ids = token_ids[: MAX_CHARS // 4]
    return tuple(_hash_chain(salt, [array("q", part).tobytes() for part in _parts(ids)], len(ids)))


def _parts(words: Sequence[T]) -> list[Sequence[T]]:
    return [words[start : start + BLOCK_WORDS] for start in range(0, len(words), BLOCK_WORDS)]


def _hash_chain(salt: bytes, parts: Sequence[bytes], num_words: int) -> Iterator[TextBlock]:
    key = _key(b"", salt)
    for number, part in enumerate(parts):
        key = _key(key, part)
        yield TextBlock(key, min(BLOCK_WORDS, num_words - number * BLOCK_WORDS))


def _num_known_words(text: Iterable[TextBlock], keys: Mapping[bytes, None]) -> int:
    num_words = 0
    for block in text:
        if block.key not in keys:
            break
        num_words += block.num_words
    return num_words


def _conversation(turns: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the turns of a conversation until ``MAX_CHARS`` characters are reached."""
    num_chars = 0
    for role, content in turns:
        if num_chars >= MAX_CHARS:
            return
        num_chars += len(content)
        yield f"{role}: {content[:MAX_CHARS]}\n"


def _model_key(model: str) -> bytes:
    return _key(b"", f"model {model}".encode())


def _key(parent: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(parent + data, digest_size=KEY_BYTES).digest()
