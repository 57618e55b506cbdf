"""Which of several members gets a request: the one that has what it needs, unless that one is too far behind.

What a request needs may be somewhere already: its model is loaded there, its adapters lie in memory, and the pages of
its prompt (the text encoder's and the UNet's keys and values, the language model's) are there since somebody said the
same or began alike. So of all members the one is chosen that minimises

    queued cost - (bounds.model    where the model is loaded
                 + bounds.adapters where the adapters are
                 + bounds.prefix   times the prefix found there, as a part of the longest found anywhere) * own cost

in words: a member that has all of the longest prefix is taken while the work before it there exceeds the least by less
than ``bounds.prefix`` requests like this one; else it is the shortest queue. Among equals that member wins which
remembers the least, as it has most room.

Sources. To send a prompt where its prefix was, by an approximate index of the texts that were sent, and to the shortest
queue once that is out of balance, is SGLang's cache-aware routing (Zheng et al. 2024, arXiv 2312.07104, and its
router); a cost that trades overlap against load in one sum is Preble's (Srivatsa et al. 2024, arXiv 2407.00023). The
power of two choices (Mitzenmacher 2001) is for those who know queues by hearsay; here every queue is known, since all
requests pass through one place, so that all are compared.

Prefixes are kept as the page pool keeps them (``runtime/kv/prefix_index.py``): a chain of hashes, one for each block.
There blocks are of tokens; here no tokenizer is at hand, so they are of words, half a page each, and the end of a text,
however short, is a block as well. What is remembered is bounded and the longest unused goes first, so the index may be
wrong in both ways, and costs no more than a prompt that is read once more. Nothing here waits, or knows of asyncio.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from diffserve.api.embedding_types import EmbeddingRequest
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.stage_types import DecodeRequest, EncodeRequest
from diffserve.api.text_types import TextRequest
from diffserve.api.types import GenerationRequest

BLOCK_WORDS: Final = 8
"""A page has 16 tokens; half of that finds prompts which part early, and is still seldom found by chance."""

MOST_CHARS: Final = 16_384
"""Of a text no more than its beginning tells where it goes."""

MOST_TEXTS: Final = 8
"""Of a request that has many, the first do."""

MOST_KEYS: Final = 8192
"""Remembered of each member, by default."""

KEY_BYTES: Final = 16
T = TypeVar("T")
_WORD = re.compile(r"\w+|[^\w\s]")

Routed = GenerationRequest | TextRequest | RewriteRequest | EmbeddingRequest | EncodeRequest | DecodeRequest


class TextBlock(NamedTuple):
    """A part of a text: what it is filed under, which stands for all that came before it, too, and its weight."""

    key: bytes
    num_words: int


class RouteNeeds(NamedTuple):
    """What a request needs, as far as it matters where it goes.

    cost      of the work, in any unit that queues are counted in, too
    model     the name of the model; "": any member has it
    adapters  keys of what is loaded beside the model
    texts     each as a chain of blocks
    """

    cost: float
    model: str = ""
    adapters: tuple[bytes, ...] = ()
    texts: tuple[tuple[TextBlock, ...], ...] = ()


class Bounds(NamedTuple):
    """By how many requests of its own cost one may be further behind elsewhere, for what is there.

    A prefix saves the reading of a text, adapters are read from a disk in about a second, and a model in many.
    """

    prefix: float = 0.5
    adapters: float = 4.0
    model: float = 16.0


class MemberQueue(NamedTuple):
    """A member as it stands: the cost of all that waits or is being done there, and the names of the models that are
    loaded.
    """

    cost: float
    models: frozenset[str] = frozenset()


class Router:
    """Chooses, and remembers what was sent where: at most ``most_keys`` of each member."""

    def __init__(self, bounds: Bounds | None = None, *, most_keys: int = MOST_KEYS) -> None:
        self.bounds = bounds or Bounds()
        self.most_keys = most_keys
        self._kept: dict[str, OrderedDict[bytes, None]] = {}

    def choose(self, needs: RouteNeeds, queues: Mapping[str, MemberQueue]) -> str:
        """The id among ``queues``, which must have one, of the member that should get it; nothing is remembered."""
        found = {member: self.num_found(member, needs) for member in queues}
        most = max(found.values())

        def behind(member: str) -> tuple[float, int]:
            queue, kept = queues[member], self._kept.get(member, OrderedDict())
            credit = self.bounds.prefix * found[member] / most if most else 0.0
            if needs.adapters and all(key in kept for key in needs.adapters):
                credit += self.bounds.adapters
            if needs.model and (needs.model in queue.models or _name(needs.model) in kept):
                credit += self.bounds.model
            return queue.cost - credit * needs.cost, len(kept)

        return min(queues, key=behind)

    def sent(self, member: str, needs: RouteNeeds) -> None:
        """``member`` has, or will have, what that request needs."""
        kept = self._kept.setdefault(member, OrderedDict())
        blocks = (block.key for text in needs.texts for block in reversed(text))  # so that beginnings outlive ends
        for key in (*blocks, *needs.adapters, *([_name(needs.model)] if needs.model else [])):
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > self.most_keys:
            kept.popitem(last=False)

    def forget(self, member: str) -> None:
        """``member`` has nothing any more."""
        self._kept.pop(member, None)

    def num_found(self, member: str, needs: RouteNeeds) -> int:
        """Words at the beginnings of the texts that ``member`` should have pages of."""
        kept = self._kept.get(member, OrderedDict())
        return sum(_num_found(text, kept) for text in needs.texts)


def needs_of(request: Routed, cost: float, first_model: str = "") -> RouteNeeds:
    """What ``request`` needs. ``first_model``: the name of the model of those that name none."""
    match request:
        case EncodeRequest(generation=generation):
            return needs_of(generation, cost, first_model)
        case DecodeRequest():
            return RouteNeeds(cost, request.model or first_model)
        case GenerationRequest(diffusion=params):
            model = request.model or first_model
            names = [
                *(("lora", one.name) for one in params.loras),
                *(("control", one.name) for one in params.controlnets),
            ]
            adapters = tuple(_key(b"", f"{kind} {model} {name}".encode()) for kind, name in names)
            salt = b"".join(adapters) + f"image {model} {params.clip_skip}".encode()
            texts = [chain(salt, request.prompt), chain(salt, request.negative_prompt)]
            if request.rewriting is not None:
                texts.append(chain(f"rewrite {request.rewriting.style}".encode(), request.prompt))
            return RouteNeeds(cost, model, adapters, tuple(texts))
        case TextRequest():
            salt = b"text" + request.cache_salt
            said = request.prompt or "".join(_told((one.role, one.content) for one in request.messages))
            return RouteNeeds(
                cost, texts=(token_chain(salt, request.token_ids) if request.token_ids else chain(salt, said),)
            )
        case RewriteRequest():
            salt = f"rewrite {request.options.style}".encode() + request.cache_salt
            return RouteNeeds(cost, texts=(chain(salt, request.wish),))
        case EmbeddingRequest():
            model = request.model or first_model
            salt = f"image {model} 1".encode()
            read = [chain(salt, text) for text in request.texts[:MOST_TEXTS]]
            read += [token_chain(salt, ids) for ids in request.token_ids[:MOST_TEXTS]]
            return RouteNeeds(cost, model, texts=tuple(read))


def chain(salt: bytes, text: str) -> tuple[TextBlock, ...]:
    """The blocks of ``text``; equal keys mean equal ``salt`` and words, case aside, all the way back to the first."""
    words = _WORD.findall(text[:MOST_CHARS].casefold())
    return tuple(_chained(salt, [" ".join(part).encode(errors="replace") for part in _parts(words)], len(words)))


def token_chain(salt: bytes, token_ids: Sequence[int]) -> tuple[TextBlock, ...]:
    """The same of numbers."""
    ids = token_ids[: MOST_CHARS // 4]
    return tuple(_chained(salt, [array("q", part).tobytes() for part in _parts(ids)], len(ids)))


def _parts(words: Sequence[T]) -> list[Sequence[T]]:
    """Of ``BLOCK_WORDS`` each, the last of what is left."""
    return [words[at : at + BLOCK_WORDS] for at in range(0, len(words), BLOCK_WORDS)]


def _chained(salt: bytes, parts: Sequence[bytes], num_words: int) -> Iterator[TextBlock]:
    key = _key(b"", salt)
    for number, part in enumerate(parts):
        key = _key(key, part)
        yield TextBlock(key, min(BLOCK_WORDS, num_words - number * BLOCK_WORDS))


def _num_found(text: Iterable[TextBlock], kept: Mapping[bytes, None]) -> int:
    found = 0
    for block in text:
        if block.key not in kept:
            break
        found += block.num_words
    return found


def _told(turns: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A conversation as far as it counts, one turn after the other."""
    num_chars = 0
    for role, content in turns:
        if num_chars >= MOST_CHARS:
            return
        num_chars += len(content)
        yield f"{role}: {content[:MOST_CHARS]}\n"


def _name(model: str) -> bytes:
    return _key(b"", f"model {model}".encode())


def _key(parent: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(parent + data, digest_size=KEY_BYTES).digest()
