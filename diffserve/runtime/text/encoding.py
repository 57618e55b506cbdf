"""Prompts to embeddings: one or two CLIP text encoders, prompt weighting, long prompts in chunks, a cache by text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import torch
from cachetools import LRUCache

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import NUM_REFINER_IDS, PLAIN
from diffserve.api.prompt_syntax import parse_prompt
from diffserve.runtime.low_rank import LoRASet, RowLoRAs, adapting
from diffserve.runtime.text.learnt_words import NO_WORDS, LearntWords
from diffserve.runtime.text.prompt import (
    Chunk,
    SpecialTokens,
    Window,
    check_total_chunks,
    chunk_prompt,
    chunk_tokens,
    negative_prompt_errors,
)
from diffserve.runtime.text.transferred_encodings import EncodingTable, find_encoding, text_name
from diffserve.runtime.transfer import send

CACHED_CHUNKS = 256  # a chunk of SDXL is 0.3 MB in 16 bits
CUT_TEXTS = 64
MEAN_FLOOR = 0.01


class TextReading(NamedTuple):
    """How texts are read: by networks that ``loras`` change, ``clip_skip`` layers from the encoders' end."""

    loras: LoRASet | None = None
    clip_skip: int = 1

    @property
    def adapters(self) -> bytes:
        """Digest of the changes of encoders, keys and values; empty without changes."""
        return self.loras.text_digest if self.loras else b""


AS_TRAINED: Final = TextReading()


@dataclass(frozen=True)
class Conditioning:
    """Text conditioning of one request, in the model's dtype on its device.

    Attributes:
        key: Hash of the model, both texts and the size; equal keys mean equal conditioning.
        cond: (tokens, dim) embeddings of the prompt.
        uncond: (tokens, dim) embeddings of the negative prompt.
        pooled_cond: (P,) pooled projection of the second encoder (SDXL), else ``None``.
        pooled_uncond: (P,) pooled projection of the negative prompt (SDXL), else ``None``.
        time_ids: (6,) original size, crop and target size (SDXL), or (5,), see ``time_ids``; else ``None``.
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
        """Do nothing; counterpart of ``PagedConditioning.close``, which frees pages."""


class EncodedText(NamedTuple):
    """Encoded text: embeddings (chunks, window, dim), and the pooled vector (P,) of its first chunk or ``None``."""

    chunks: torch.Tensor
    pooled: torch.Tensor | None


class TextEncoder(NamedTuple):
    """Tokenizer and its encoder."""

    tokenizer: Any
    network: Any
    window_tokens: int
    special: SpecialTokens
    learnt: LearntWords = NO_WORDS

    @classmethod
    def pair(cls, tokenizer: Any, network: Any) -> TextEncoder:
        """Read window and special tokens off ``tokenizer`` and the encoder's configuration."""
        window = min(int(tokenizer.model_max_length), int(network.config.max_position_embeddings))
        comma = tokenizer.get_vocab().get(",</w>", -1)
        special = SpecialTokens(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, comma)
        return cls(tokenizer, network, window, special)

    def chunks(self, text: str) -> list[Chunk]:
        """Split ``text`` into windows."""
        num_vectors = self.learnt.num_vectors
        return chunk_prompt(parse_prompt(text), self._tokenize, self.special, self.window_tokens, num_vectors)

    def windows_of(self, source: str | Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        """Split a text without prompt syntax, or token ids, into windows.

        Returns:
            The ids of each window, special tokens and padding included, and how many of them belong to the text.

        Raises:
            InvalidRequest: The text is too long, or a token id is unknown.
        """
        tokens = self._tokenize(source) if isinstance(source, str) else source
        max_token_id = int(self.network.config.vocab_size) - 1
        unknown = next((token for token in tokens if not 0 <= token <= max_token_id), None)
        if unknown is not None and not isinstance(source, str):
            message = (
                f"token id {str(unknown)[:40]} is not in this model's vocabulary; its ids are 0 to {max_token_id}."
            )
            raise InvalidRequest(message, param="input")
        return chunk_tokens(tokens, self.special, self.window_tokens, self.learnt.num_vectors)

    def _tokenize(self, text: str) -> Sequence[int]:
        pieces = self.learnt.split(text)
        return [
            token for piece in pieces for token in (self._tokenize_plain(piece) if isinstance(piece, str) else piece)
        ]

    def _tokenize_plain(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
        return ids


class TextEncoderRunner:
    """Runs the text encoders of one model: one (SD 1.x, 2.x, SDXL's refiner) or two (SDXL).

    ``num_time_ids`` is the number of size values that the UNet takes: 6 (SDXL), 5 (its refiner) or 0. With 0 the
    encoder returns its normalized last hidden state. Otherwise the next-to-last hidden states of all encoders are
    concatenated, and the last encoder returns its pooled projection. Texts are encoded one chunk at a time, so a result
    does not depend on other prompts; the last texts, of ``CACHED_CHUNKS`` chunks in all, are cached.

    Attributes:
        encodings: Encodings of the current texts from another process, if the encoders run there.
    """

    def __init__(
        self,
        encoders: Sequence[TextEncoder],
        *,
        device: torch.device,
        digest: str,
        num_time_ids: int = 0,
        zero_empty_negative: bool = True,
    ) -> None:
        self.encoders = tuple(encoders)
        self.num_time_ids = num_time_ids
        self.device = device
        self.digest = digest
        self.zero_empty_negative = zero_empty_negative and self.is_sdxl
        self.encodings: EncodingTable | None = None
        self._cache: LRUCache[tuple[str, bytes], EncodedText] = LRUCache(CACHED_CHUNKS, lambda text: len(text.chunks))
        self.windows = lru_cache(maxsize=CUT_TEXTS)(self._cut)

    @property
    def is_sdxl(self) -> bool:
        """Whether these are the encoders of SDXL, or of its refiner."""
        return self.num_time_ids > 0

    @property
    def has_score(self) -> bool:
        """Whether the UNet takes an aesthetic score (SDXL's refiner)."""
        return self.num_time_ids == NUM_REFINER_IDS

    @property
    def learnt_words(self) -> tuple[str, ...]:
        """Words for learnt embeddings in prompts, in lower case (textual inversion)."""
        return tuple(self.encoders[0].learnt.ids)

    @property
    def refused_words(self) -> dict[str, str]:
        """Reasons why files of the embeddings folder cannot be used, by the names of their words."""
        return self.encoders[0].learnt.refused

    def word_digests(self, text: str) -> dict[str, str]:
        """Return the SHA-256 of the files of the learnt words in ``text``, by file name."""
        return self.encoders[0].learnt.digests(text)

    @cached_property
    def most_clip_skip(self) -> int:
        """The largest ``clip_skip`` that leaves a layer of every encoder."""
        return min(int(encoder.network.config.num_hidden_layers) for encoder in self.encoders) - self.is_sdxl

    @cached_property
    def window_tokens(self) -> int:
        """Tokens in a chunk, marks included: 77 for CLIP."""
        return min(encoder.window_tokens for encoder in self.encoders)

    @torch.inference_mode()
    def encode(
        self,
        prompt: str,
        negative: str = "",
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
        min_chunks: int = 1,
    ) -> Conditioning:
        """Embeddings of ``prompt`` and ``negative``, padded to the same number of chunks, at least ``min_chunks``.

        Raises InvalidRequest for a prompt that is too long or weighted beyond measure.
        """
        num_chunks = max(min_chunks, self.count_chunks(prompt))
        with negative_prompt_errors():
            num_chunks = max(num_chunks, self.count_chunks(negative))
        cond, pooled_cond = self._encode_padded(prompt, num_chunks, reading)
        if self.zero_empty_negative and not negative:
            uncond = torch.zeros_like(cond)
            pooled_uncond = None if pooled_cond is None else torch.zeros_like(pooled_cond)
        else:
            uncond, pooled_uncond = self._encode_padded(negative, num_chunks, reading)
        way = f"{reading.adapters.hex()} {reading.clip_skip}"
        key = _hash(self.digest, prompt, negative, f"{width_px}x{height_px}" if self.is_sdxl else "", way)
        time_ids = self.time_ids(width_px, height_px)
        return Conditioning(key, cond, uncond, pooled_cond, pooled_uncond, time_ids)

    def encode_all(
        self,
        pairs: Sequence[tuple[str, str | None]],
        *,
        width_px: int,
        height_px: int,
        reading: TextReading = AS_TRAINED,
    ) -> tuple[Conditioning, ...]:
        """Encode pairs of prompt and negative prompt of one image, all padded to the same number of chunks.

        Raises InvalidRequest as ``encode`` does, and for too many chunks in all.
        """
        num_chunks = 1
        if len(pairs) > 1:
            counts = [self.count_chunks(text) for text in {text for pair in pairs for text in pair if text}]
            check_total_chunks(sum(counts), self.window_tokens)
            num_chunks = max([1, *counts])
        size = {"width_px": width_px, "height_px": height_px}
        return tuple(
            self.encode(prompt, negative or "", **size, reading=reading, min_chunks=num_chunks)
            for prompt, negative in pairs
        )

    @torch.inference_mode()
    def embedding(self, text: str) -> torch.Tensor:
        """Return a unit vector (D,) float32 of ``text``; the cosine of two measures how similar texts are to the UNet.

        It is the mean of the states that cross-attention reads, without start marks, which are equal in all texts.
        Padding counts: behind a causal encoder it sums up the words before it, and the UNet reads it as well.
        """
        tokens = self._encode_cached(text).chunks[:, 1:].flatten(0, 1)  # (tokens, D)
        return torch.nn.functional.normalize(tokens.float().mean(0), dim=0)

    @torch.inference_mode()
    def pooled(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return the last encoder's pooled output (P,) of a window, projected if the encoder has a projection."""
        output = self.encoders[-1].network(torch.tensor([ids], device=self.device))
        pooled: torch.Tensor = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
        return pooled[0]

    def count_chunks(self, text: str) -> int:
        """How many encoder windows ``text`` fills; raises InvalidRequest as :meth:`encode` does, at little cost."""
        cached = self._cache.get((text, b""))
        return cached.chunks.shape[0] if cached else len(self.windows(text))

    def time_ids(self, width_px: int, height_px: int) -> torch.Tensor | None:
        """Return the UNet's size conditioning in float32, ``None`` for models without.

        It is (6,) original size, crop and target size, height first (SDXL); (5,) original size, crop and score of a
        prompt's row (its refiner).
        """
        if not self.is_sdxl:
            return None
        values = PLAIN.numbers(width_px, height_px, has_score=self.has_score)
        return send(torch.tensor(values, dtype=torch.float32), self.device)

    def _cut(self, text: str) -> tuple[Window, ...]:
        """Split ``text`` into at least one window of all encoders; raises InvalidRequest as :meth:`encode` does."""
        per_encoder = [encoder.chunks(text) for encoder in self.encoders]
        num_windows = max(map(len, per_encoder))
        for encoder, chunks in zip(self.encoders, per_encoder, strict=True):
            chunks.extend(encoder.chunks("") * (num_windows - len(chunks)))
        return tuple(Window(chunks) for chunks in zip(*per_encoder, strict=True))

    def _encode_padded(
        self, text: str, num_chunks: int, reading: TextReading
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        encoded = self._encode_cached(text, reading)
        chunks = encoded.chunks  # (chunks, window, dim)
        missing = num_chunks - chunks.shape[0]
        if missing:
            filler = self._encode_cached("", reading).chunks
            chunks = torch.cat([chunks, *[filler] * missing])
        return chunks.flatten(0, 1), encoded.pooled

    def _encode_cached(self, text: str, reading: TextReading = AS_TRAINED) -> EncodedText:
        key = (text, self._way(reading))
        if key in self._cache:
            return self._cache[key]
        if self.encodings is not None:
            pooled = find_encoding(self.encodings, text_name(b"text pooled", *key)) if self.is_sdxl else None
            encoded = EncodedText(find_encoding(self.encodings, text_name(b"text", *key)), pooled)
        else:
            with adapting(RowLoRAs([reading.loras]) if reading.loras else None):
                encoded = self._encode_text(text, reading.clip_skip)
        self._cache[key] = encoded
        return encoded

    @torch.inference_mode()
    def export_encodings(self, texts: Iterable[str], reading: TextReading = AS_TRAINED) -> EncodingTable:
        """Return the encodings of ``texts`` that :meth:`encode` and :meth:`embedding` read from ``encodings``."""
        table: EncodingTable = {}
        for text in {"", *texts}:
            encoded, way = self._encode_cached(text, reading), self._way(reading)
            table[text_name(b"text", text, way)] = encoded.chunks
            if encoded.pooled is not None:
                table[text_name(b"text pooled", text, way)] = encoded.pooled
        return table

    @staticmethod
    def _way(reading: TextReading) -> bytes:
        return reading.adapters + (b" %d" % reading.clip_skip if reading.clip_skip != 1 else b"")

    def _encode_text(self, text: str, clip_skip: int) -> EncodedText:
        windows = self.windows(text)
        parts: list[torch.Tensor] = []
        pooled: torch.Tensor | None = None
        for index, encoder in enumerate(self.encoders):
            outputs = [self._encode_chunk(encoder, window.chunks[index], clip_skip) for window in windows]
            parts.append(torch.stack([hidden for hidden, _ in outputs]))
            pooled = outputs[0][1] if self.is_sdxl else None
        return EncodedText(torch.cat(parts, dim=-1), pooled)

    def _encode_chunk(self, encoder: TextEncoder, chunk: Chunk, clip_skip: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (window, dim) with the chunk's weights applied, and the pooled vector."""
        ids = torch.tensor([chunk.ids], device=self.device)
        output = encoder.network(ids, output_hidden_states=self.is_sdxl or clip_skip > 1)
        if self.is_sdxl:
            hidden = output.hidden_states[-1 - clip_skip]
        elif clip_skip > 1:
            body = getattr(encoder.network, "text_model", encoder.network)
            hidden = body.final_layer_norm(output.hidden_states[-clip_skip])
        else:
            hidden = output.last_hidden_state
        return weigh(hidden[0], chunk.weights), output[0][0]


def weigh(hidden: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Multiply token rows of ``hidden`` (window, dim) by ``weights`` and restore the mean, as A1111 does.

    Where the mean is all but zero (some encoders end in a centred normalisation) the quotient of two means is chance,
    so it is taken only when both are at least MEAN_FLOOR of the root mean square, and of one sign.
    """
    if all(weight == 1.0 for weight in weights):
        return hidden
    precise = hidden.float()
    weighted = precise * send(torch.tensor(weights), hidden.device)[:, None]
    mean, new_mean = precise.mean(), weighted.mean()
    floor = MEAN_FLOOR * precise.square().mean().sqrt()
    is_sure = (torch.minimum(mean.abs(), new_mean.abs()) > floor) & (mean.sign() == new_mean.sign())
    scale = torch.where(is_sure, mean / new_mean, 1.0)
    return (weighted * scale).to(hidden.dtype)


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
