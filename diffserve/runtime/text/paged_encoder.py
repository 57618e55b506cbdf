"""A CLIP text encoder over the page pool; it only computes what follows a cached beginning, as CLIP is causal.

The modules are transformers' own, weights, merged adapters and int8 layers included; the loop over them is written here
(Radford et al. 2021, section 2.4: a pre-norm transformer under a causal mask), because a continued text needs positions
and keys that start in its middle.

If bytes must not depend on what was cached, tokens are computed in *segments* at fixed logical page boundaries. Segment
[16, 32) always has 16 rows in every product and 32 keys in its attention, after a hit as after a miss, so inputs and
kernels are the same. Otherwise all missing tokens are one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.kv import KVSpec, LayerSpec, PagedBatch, PagePool, PageTable
from diffserve.runtime.text.encoding import TextEncoderRunner
from diffserve.runtime.transfer import send
from diffserve.runtime.unet.batch_invariance import SOLO, FactsOnDisk, GroupFacts, Study, Try, sizes_to_check, study
from diffserve.runtime.unet.unet import UNetRunner

Cut = Callable[[int], Iterable[range]]
"""Places of so many texts, in as many ranges as calls are made."""


def segments(first: int, stop: int, page_tokens: int, *, is_exact: bool) -> list[tuple[int, int]]:
    """Split tokens ``first .. stop - 1`` at every logical page boundary if ``is_exact``, else not at all.

    With ``is_exact``, ``first`` must lie on a boundary.
    """
    step = page_tokens if is_exact else max(1, stop - first)
    return [(start, min(start + step, stop)) for start in range(first, stop, step)]


class Encoded(NamedTuple):
    """Hidden states (tokens, dim) from some token on: ``hidden`` as the UNet reads them, ``last`` of the last layer."""

    hidden: Tensor
    last: Tensor


def together(num_texts: int) -> list[range]:
    """Return one range of all texts, for one call."""
    return [range(num_texts)]


class PagedTextEncoder:
    """Text encoder as a tenant of ``pool``.

    Args:
        spec: Result of ``text_spec``.
        stops_early: The UNet reads the next-to-last layer without normalization (SDXL); else the normalized last layer.
        is_exact: Whether tokens are computed in fixed segments.
    """

    def __init__(self, pool: PagePool, network: Any, spec: KVSpec, *, stops_early: bool, is_exact: bool) -> None:
        self.pool = pool
        self.network = network
        self.spec = spec
        self.stops_early = stops_early
        self.is_exact = is_exact
        pool.register(spec)

    @property
    def _body(self) -> Any:
        return getattr(self.network, "text_model", self.network)

    def encode(self, token_ids: tuple[int, ...], *, first: int, salt: bytes = b"") -> Encoded:
        """Hidden states of tokens ``first`` onwards; those before them are computed only where the pool lacks them.

        Raises PoolBusy or PoolTooSmall when the text's pages cannot be had.
        """
        return self.encode_together([token_ids], first=first, salt=salt)[0]

    @torch.inference_mode()
    def encode_together(
        self,
        texts: Sequence[tuple[int, ...]],
        *,
        first: int,
        salt: bytes = b"",
        clip_skip: int = 1,
        cut: Cut = together,
    ) -> list[Encoded]:
        """Encode tokens ``first`` onward of texts of equal length; texts with equally many cached tokens share calls.

        Args:
            texts: Token ids of each text.
            first: Index of the first token to return.
            salt: Key of the adapters that are active in the network.
            clip_skip: Number of layers from the end at which ``hidden`` is read.
            cut: Splits a number of texts into calls.
        """
        page_tokens = self.spec.page_tokens
        with ExitStack() as tables:
            by_cached = defaultdict[int, dict[int, PageTable]](dict)
            for place, text in enumerate(texts):
                table, num_cached = self.pool.open(self.spec.tenant, text, salt, reserve=len(text), most_cached=first)
                tables.callback(self.pool.close, table)
                by_cached[num_cached][place] = table
            encoded: dict[int, Encoded] = {}
            for num_cached, tables_by_place in by_cached.items():
                places = [*tables_by_place]
                for indices in cut(len(places)):
                    group = places[indices.start : indices.stop]
                    ids = torch.tensor([texts[place] for place in group])  # (B, tokens)
                    cuts = segments(num_cached, ids.shape[1], page_tokens, is_exact=self.is_exact)
                    group_tables = [tables_by_place[place] for place in group]
                    parts = [self._encode_segment(group_tables, ids, start, stop, clip_skip) for start, stop in cuts]
                    of_all = Encoded(*(torch.cat(states, dim=1) for states in zip(*parts, strict=True)))
                    for row, place in enumerate(group):
                        encoded[place] = Encoded(*(states[row, first - num_cached :] for states in of_all))
                        self.pool.commit(tables_by_place[place], texts[place])
        return [encoded[place] for place in range(len(texts))]

    @torch.inference_mode()
    def pooled(self, last: Tensor) -> Tensor:
        """Return the pooled vector (P,) of an end mark's last hidden state (dim,), projected if the model does so."""
        state: Tensor = self._body.final_layer_norm(last[None])
        project = getattr(self.network, "text_projection", None)
        projected: Tensor = state if project is None else project(state)
        return projected[0]

    def place_of_end(self, token_ids: tuple[int, ...]) -> int:
        """Return the index of the first end mark, where the pooled vector is read, as in transformers.

        Old configurations name a wrong end mark, 2; for these it is the largest id.
        """
        end = self.network.config.eos_token_id
        if end == 2:
            end = max(token_ids)
        return token_ids.index(end) if end in token_ids else 0

    def _encode_segment(
        self, tables: Sequence[PageTable], token_ids: Tensor, start: int, stop: int, clip_skip: int
    ) -> Encoded:
        """States (B, n, dim) of tokens ``start .. stop - 1`` of ``token_ids`` (B, tokens)."""
        batch = self.pool.batch(tables, [start] * len(tables), [stop] * len(tables))
        device = batch.positions.device
        ids = send(token_ids[:, start:stop].contiguous(), device)
        positions = batch.positions[None, : stop - start]
        state = self._body.embeddings(input_ids=ids, position_ids=positions)  # (B, n, dim)
        mask = None if start == 0 else torch.ones((stop - start, stop), dtype=torch.bool, device=device).tril(start)
        layers = self._body.encoder.layers
        last_read = len(layers) - clip_skip - self.stops_early  # the layer whose output the UNet reads
        hidden = state
        for index, layer in enumerate(layers):
            state = self._layer(layer, state, batch, index, mask)
            hidden = state if index <= last_read else hidden
        return Encoded(hidden if self.stops_early else self._body.final_layer_norm(hidden), state)

    @staticmethod
    def _layer(layer: Any, state: Tensor, batch: PagedBatch, index: int, mask: Tensor | None) -> Tensor:
        attention, shape = layer.self_attn, (*state.shape[:2], layer.self_attn.num_heads, -1)
        normed = layer.layer_norm1(state)
        query, keys, values = (
            project(normed).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # (B, n, heads, head_dim)
        batch.write(index, keys.flatten(0, 1), values.flatten(0, 1))
        if mask is not None:
            keys, values = batch.gather(index)  # (B, tokens so far, heads, head_dim)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=attention.scale,
        )
        state = state + attention.out_proj(attended.transpose(1, 2).flatten(2))
        moved: Tensor = state + layer.mlp(layer.layer_norm2(state))
        return moved


def text_spec(network: Any, *, tenant: str, dtype: torch.dtype, identity: bytes) -> KVSpec:
    """Return the pool spec of ``network``, a CLIP text encoder that computes in ``dtype``."""
    config = network.config
    layer = LayerSpec(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    return KVSpec(tenant, (layer,) * config.num_hidden_layers, dtype, model_digest=identity)


@dataclass(frozen=True)
class ImageSpecs:
    """Specs of the tenants of one image model: the UNet's cross-attention and each text encoder's self-attention."""

    unet: KVSpec
    encoders: tuple[KVSpec, ...]

    def __iter__(self) -> Iterator[KVSpec]:
        return iter((self.unet, *self.encoders))

    @classmethod
    def of(
        cls, text: TextEncoderRunner, unet: UNetRunner, identity: bytes, encoders: Sequence[bytes] | None = None
    ) -> ImageSpecs:
        """Create the specs of a model. Raises ConfigError for a UNet whose cross-attention cannot be paged.

        ``identity`` is a hash of all that affects the numbers: weights, adapters, quantization, segment boundaries.
        ``encoders`` are such hashes for each text encoder, ``None`` to use ``identity``.
        """
        dtype, layers = unet.dtype, unet.cross_attention.layers
        indexed = enumerate(zip(text.encoders, encoders or [identity] * len(text.encoders), strict=True), start=1)
        return cls(
            KVSpec(f"unet:{_short(identity)}", layers, dtype, model_digest=identity, whole_sequences=True),
            tuple(
                text_spec(
                    encoder.network,
                    tenant=f"text{index}:{_short(encoder_identity)}",
                    dtype=dtype,
                    identity=encoder_identity,
                )
                for index, (encoder, encoder_identity) in indexed
            ),
        )


def _short(identity: bytes) -> str:
    return identity.hex()[:12]


MOST_WINDOWS: Final = 16
"""In one call; of 77 tokens they fill every processor there is."""

NAME: Final = "windows of text"


class WindowBatches:
    """Numbers of windows for one call of the encoders.

    Args:
        attempt: Encodes random windows, and returns the UNet's inputs of each, (len(rows), numbers).
        is_exact: Whether bytes must not depend on the number; otherwise every number is used.
    """

    def __init__(self, attempt: Try, disk: FactsOnDisk, *, is_exact: bool, max_windows: int = MOST_WINDOWS) -> None:
        self.sizes: tuple[int, ...] = (SOLO,) if is_exact else tuple(range(1, max_windows + 1))
        self._disk = disk
        self._study: Study | None = None
        facts = disk.read(NAME) if is_exact else None
        if facts is not None:
            self._take(facts)
        elif is_exact and max_windows > 1:
            self._study = study(attempt, sizes_to_check(max_windows), reference=SOLO)

    def cut(self, num_windows: int) -> list[range]:
        """``num_windows`` places in as few calls as may be."""
        calls, done = [], 0
        while done < num_windows:
            size = max(size for size in self.sizes if size <= num_windows - done)
            calls.append(range(done, done + size))
            done += size
        return calls

    def study(self) -> bool:
        """Make one measuring call; returns False when nothing is left to measure.

        After a call that raised, for example without free pages, windows stay alone.
        """
        if self._study is None:
            return False
        try:
            next(self._study)
        except StopIteration as end:
            self._study = None
            self._take(end.value)
            self._disk.write(NAME, end.value)
        except Exception:
            self._study = None
            raise
        return True

    def _take(self, facts: GroupFacts) -> None:
        self.sizes = tuple(sorted({SOLO, *facts.buckets}))
