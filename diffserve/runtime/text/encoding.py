"""Prompts to embeddings: one or two CLIP text encoders, prompt weighting, long prompts in chunks, a cache by text."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from diffserve.runtime.kv import salt_of
from diffserve.runtime.text.prompt import Chunk, SpecialTokens, chunk_prompt, parse_prompt
from diffserve.runtime.transfer import send

CACHED_TEXTS = 128
CACHED_CHUNKS = 256  # of long prompts fewer are kept: a chunk of SDXL is 0.3 MB in 16 bits
CUT_TEXTS = 64
MEAN_FLOOR = 0.01
TOKEN_BITS = 31
"""A token id of one encoder; two fit into the 64 bits that the pool takes."""

WindowName = tuple[bytes, tuple[int, ...]]
"""A salt and token ids: what the pages of a window, or of its beginning, are filed under."""


@dataclass(frozen=True)
class Window:
    """What every encoder of the model reads in one window: one chunk each, of equally many tokens.

    A text encoder reads each window of a prompt from its first token, so a window is a sequence of its own: a long
    prompt is several, and the empty window that fills up a shorter negative prompt is the empty prompt's. CLIP is
    causal: what a token becomes depends on the tokens before it, so windows that begin alike share their leading pages
    of the pool. Three things decide what a window's pages are filed under:

    plain     the tokens, of both encoders for SDXL. A common beginning is shared, logical page by logical page.
    weighted  ``(fox:1.3)`` multiplies token rows and then rescales all of them to the mean of the whole window, so a
              token's values depend on every other token: tokens and weights together are one name, shared whole or
              not at all.
    silent    SDXL's empty negative prompt, which is zeros and no text (no encoder runs): one name for everybody.
    """

    chunks: tuple[Chunk, ...]
    is_silent: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens, marks and padding included."""
        return len(self.chunks[0].ids)

    @cached_property
    def is_weighted(self) -> bool:
        """Whether any token counts more or less than 1."""
        return any(weight != 1.0 for chunk in self.chunks for weight in chunk.weights)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """One number for each place: the ids that the encoders read there."""
        places = zip(*(chunk.ids for chunk in self.chunks), strict=True)
        return tuple(sum(token << TOKEN_BITS * index for index, token in enumerate(place)) for place in places)

    @cached_property
    def salt(self) -> bytes:
        """What must be equal besides the leading tokens; empty for plain windows."""
        if self.is_silent:
            return salt_of(b"silent")
        if not self.is_weighted:
            return b""
        weights = array("d", itertools.chain.from_iterable(chunk.weights for chunk in self.chunks))
        return salt_of(b"weighted", weights.tobytes(), array("q", self.token_ids).tobytes())

    @property
    def name(self) -> WindowName:
        """Windows of one name are told to the UNet alike."""
        return self.salt, self.token_ids

    def logical_page_names(self, page_tokens: int) -> set[WindowName]:
        """One name for each logical page that the window takes; windows share the logical pages whose names they
        share."""
        ends = [*range(page_tokens, self.num_tokens, page_tokens), self.num_tokens]
        return {(self.salt, self.token_ids[:end]) for end in ends}


@dataclass(frozen=True)
class Conditioning:
    """What the UNet is told about one request, in the model's dtype on its device.

    key                        hash over the model, both texts and the size: equal keys, equal conditioning
    cond, uncond               (tokens, dim) embeddings of the prompt and of the negative prompt
    pooled_cond, pooled_uncond (P,) pooled projections of the second encoder (SDXL), else ``None``
    time_ids                   (6,) original size, crop and target size (SDXL), else ``None``
    """

    key: str
    cond: torch.Tensor
    uncond: torch.Tensor
    pooled_cond: torch.Tensor | None = None
    pooled_uncond: torch.Tensor | None = None
    time_ids: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of ``cond`` and of ``uncond``; rows share a UNet call only when they have the same."""
        return self.cond.shape[0]

    def close(self) -> None:
        """Nothing to give back; see ``PagedConditioning``."""


class EncodedText(NamedTuple):
    """One text: embeddings (chunks, window, dim) and the pooled vector (P,) of its first chunk, if there is one."""

    chunks: torch.Tensor
    pooled: torch.Tensor | None


class TextEncoder(NamedTuple):
    """A tokenizer with the encoder it was made for."""

    tokenizer: Any
    network: Any
    window_tokens: int
    special: SpecialTokens

    @classmethod
    def pair(cls, tokenizer: Any, network: Any) -> TextEncoder:
        """Read window and special tokens off ``tokenizer`` and the encoder's configuration."""
        window = min(int(tokenizer.model_max_length), int(network.config.max_position_embeddings))
        comma = tokenizer.get_vocab().get(",</w>", -1)
        special = SpecialTokens(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, comma)
        return cls(tokenizer, network, window, special)

    def chunks(self, text: str) -> list[Chunk]:
        """The windows ``text`` fills."""
        return chunk_prompt(parse_prompt(text), self._tokenize, self.special, self.window_tokens)

    def _tokenize(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
        return ids


class TextEncoderRunner:
    """Runs the text encoders of one model. ``encoders``: one (SD 1.x, 2.x) or two (SDXL).

    A single encoder gives its last hidden state, normalised; a pair gives both next-to-last hidden states side by
    side and the second one's pooled projection. Texts are encoded one chunk at a time, so what a prompt becomes does
    not depend on its neighbours; the last ``CACHED_TEXTS`` texts, of ``CACHED_CHUNKS`` chunks in all, are kept.
    """

    def __init__(
        self, encoders: Sequence[TextEncoder], *, device: torch.device, digest: str, zero_empty_negative: bool = True
    ) -> None:
        self.encoders = tuple(encoders)
        self.device = device
        self.digest = digest
        self.zero_empty_negative = zero_empty_negative and self.is_pair
        self._cache: OrderedDict[str, EncodedText] = OrderedDict()
        self.windows = lru_cache(maxsize=CUT_TEXTS)(self._cut)

    @property
    def is_pair(self) -> bool:
        """Whether this is SDXL's pair of encoders."""
        return len(self.encoders) == 2

    @cached_property
    def window_tokens(self) -> int:
        """Tokens in a chunk, marks included: 77 for CLIP."""
        return min(encoder.window_tokens for encoder in self.encoders)

    @torch.inference_mode()
    def encode(self, prompt: str, negative: str = "", *, width_px: int, height_px: int) -> Conditioning:
        """Embeddings of ``prompt`` and ``negative``, padded to the same number of chunks.

        Raises InvalidRequest for a prompt that is too long or weighted beyond measure.
        """
        num_chunks = max(self.count_chunks(prompt), self.count_chunks(negative))
        cond, pooled_cond = self._encode_padded(prompt, num_chunks)
        if self.zero_empty_negative and not negative:
            uncond = torch.zeros_like(cond)
            pooled_uncond = None if pooled_cond is None else torch.zeros_like(pooled_cond)
        else:
            uncond, pooled_uncond = self._encode_padded(negative, num_chunks)
        key = _hash(self.digest, prompt, negative, f"{width_px}x{height_px}" if self.is_pair else "")
        time_ids = self.time_ids(width_px, height_px)
        return Conditioning(key, cond, uncond, pooled_cond, pooled_uncond, time_ids)

    @torch.inference_mode()
    def embedding(self, text: str) -> torch.Tensor:
        """(D,) float32 of length 1: the mean of what cross-attention reads of ``text``, but for the start marks, which
        are the same in every text. The cosine of two is how similar their texts are to the UNet.

        Padding counts: behind a causal encoder it holds the sum of the words before it, and the UNet reads it as well.
        """
        tokens = self._encode_cached(text).chunks[:, 1:].flatten(0, 1)  # (tokens, D)
        return torch.nn.functional.normalize(tokens.float().mean(0), dim=0)

    def count_chunks(self, text: str) -> int:
        """How many encoder windows ``text`` fills; raises InvalidRequest as :meth:`encode` does, at little cost."""
        cached = self._cache.get(text)
        return cached.chunks.shape[0] if cached else len(self.windows(text))

    def time_ids(self, width_px: int, height_px: int) -> torch.Tensor | None:
        """(6,) float32 original size, crop and target size, height first (SDXL), else ``None``."""
        if not self.is_pair:
            return None
        values = [height_px, width_px, 0, 0, height_px, width_px]
        return send(torch.tensor(values, dtype=torch.float32), self.device)

    def _cut(self, text: str) -> tuple[Window, ...]:
        """The encoder windows that ``text`` fills, at least one; raises InvalidRequest as :meth:`encode` does."""
        per_encoder = [encoder.chunks(text) for encoder in self.encoders]
        num_windows = max(map(len, per_encoder))
        for encoder, chunks in zip(self.encoders, per_encoder, strict=True):
            chunks.extend(encoder.chunks("") * (num_windows - len(chunks)))
        return tuple(Window(chunks) for chunks in zip(*per_encoder, strict=True))

    def _encode_padded(self, text: str, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        encoded = self._encode_cached(text)
        chunks = encoded.chunks  # (chunks, window, dim)
        missing = num_chunks - chunks.shape[0]
        if missing:
            filler = self._encode_cached("").chunks
            chunks = torch.cat([chunks, *[filler] * missing])
        return chunks.flatten(0, 1), encoded.pooled

    def _encode_cached(self, text: str) -> EncodedText:
        if text not in self._cache:
            self._cache[text] = self._encode_text(text)
            while len(self._cache) > CACHED_TEXTS or self._num_cached_chunks() > CACHED_CHUNKS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(text)
        return self._cache[text]

    def _num_cached_chunks(self) -> int:
        return sum(encoded.chunks.shape[0] for encoded in self._cache.values())

    def _encode_text(self, text: str) -> EncodedText:
        windows = self.windows(text)
        parts: list[torch.Tensor] = []
        pooled: torch.Tensor | None = None
        for index, encoder in enumerate(self.encoders):
            outputs = [self._encode_chunk(encoder, window.chunks[index]) for window in windows]
            parts.append(torch.stack([hidden for hidden, _ in outputs]))
            pooled = outputs[0][1] if self.is_pair else None
        return EncodedText(torch.cat(parts, dim=-1), pooled)

    def _encode_chunk(self, encoder: TextEncoder, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (window, dim) with the chunk's weights applied, and the pooled vector."""
        ids = torch.tensor([chunk.ids], device=self.device)
        output = encoder.network(ids, output_hidden_states=self.is_pair)
        hidden = output.hidden_states[-2] if self.is_pair else output.last_hidden_state
        return weigh(hidden[0], chunk.weights), output[0][0]


def weigh(hidden: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Multiply token rows of ``hidden`` (window, dim) by ``weights`` and bring the mean back to what it was, as A1111.

    Where the mean is all but zero (some encoders end in a centred normalisation) the quotient of two means is chance,
    so it is taken only when both are at least MEAN_FLOOR of the root mean square, and of one sign.
    """
    if all(weight == 1.0 for weight in weights):
        return hidden
    precise = hidden.float()
    weighted = precise * send(torch.tensor(weights), hidden.device)[:, None]
    mean, new_mean = precise.mean().double(), weighted.mean().double()
    floor = MEAN_FLOOR * precise.square().mean().sqrt().double()
    is_sure = (torch.minimum(mean.abs(), new_mean.abs()) > floor) & (mean * new_mean > 0)
    scale = torch.where(is_sure, mean / new_mean, 1.0).float()
    return (weighted * scale).to(hidden.dtype)


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
