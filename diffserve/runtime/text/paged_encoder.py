"""A CLIP text encoder over the page pool: causal, so a text that starts like an earlier one computes only the rest.

The modules are transformers' own, weights, merged adapters and int8 layers included; the loop over them is written here
(Radford et al. 2021, section 2.4: a pre-norm transformer under a causal mask), because a continued text needs positions
and keys that start in its middle.

Where bytes must not depend on what happened to be cached, tokens are computed in *segments* cut at logical page
boundaries, by place and never by what is missing: segment [16, 32) always sees 16 rows in every product and 32 keys in
its attention, after a hit as after a miss, so the numbers that go in and the kernels they meet are the same. Otherwise
the rest is one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.kv import KVSpec, LayerSpec, PagedBatch, PagePool, PageTable
from diffserve.runtime.transfer import send
from diffserve.runtime.unet.batch_invariance import SOLO, FactsOnDisk, GroupFacts, Study, Try, sizes_to_check, study

Cut = Callable[[int], Iterable[range]]
"""Places of so many texts, in as many ranges as calls are made."""


def segments(first: int, stop: int, page_tokens: int, *, is_exact: bool) -> list[tuple[int, int]]:
    """Cuts of tokens ``first .. stop - 1``: at every logical page boundary where ``is_exact``, else none.

    With ``is_exact``, ``first`` must lie on a boundary.
    """
    step = page_tokens if is_exact else max(1, stop - first)
    return [(start, min(start + step, stop)) for start in range(first, stop, step)]


class Encoded(NamedTuple):
    """Hidden states (tokens, dim) from some token on: ``hidden`` as the UNet reads them, ``last`` of the last layer."""

    hidden: Tensor
    last: Tensor


def together(num_texts: int) -> list[range]:
    """All in one call."""
    return [range(num_texts)]


class PagedTextEncoder:
    """One text encoder as a tenant of ``pool``.

    spec        see ``text_spec``
    stops_early the UNet reads the next-to-last layer, as it is (SDXL); else the last one, normalised
    is_exact    computed in segments, see above
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
        """The same for texts of equal length; those of which the pool has equally much run in calls as ``cut`` says.
        ``salt``: what the network is changed by meanwhile. ``clip_skip``: how far from the last layer ``hidden`` is
        read.
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
        """(P,) one token's last hidden state (dim,), normalised, and projected where there is a projection; the token
        is that of :meth:`place_of_end`.
        """
        state: Tensor = self._body.final_layer_norm(last[None])
        project = getattr(self.network, "text_projection", None)
        projected: Tensor = state if project is None else project(state)
        return projected[0]

    def place_of_end(self, token_ids: tuple[int, ...]) -> int:
        """Where the pooled vector is read: at the first end mark, as transformers finds it.

        Old configurations give a wrong end mark, 2; there it is the largest id.
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
            keys, values, _ = batch.gather(index)  # (B, tokens so far, heads, head_dim)
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
    """What ``network``, a CLIP text encoder computing in ``dtype``, keeps for each token."""
    config = network.config
    layer = LayerSpec(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    return KVSpec(tenant, (layer,) * config.num_hidden_layers, dtype, model_digest=identity)


MOST_WINDOWS: Final = 16
"""In one call; of 77 tokens they fill every processor there is."""

NAME: Final = "windows of text"


class WindowBatches:
    """Numbers of windows for one call.

    attempt   encodes random windows, and gives all that the UNet is told of each, (len(rows), numbers)
    is_exact  whether bytes are promised; otherwise every number will do
    """

    def __init__(self, attempt: Try, disk: FactsOnDisk, *, is_exact: bool, most: int = MOST_WINDOWS) -> None:
        self.sizes: tuple[int, ...] = (SOLO,) if is_exact else tuple(range(1, most + 1))
        self._disk = disk
        self._study: Study | None = None
        facts = disk.read(NAME) if is_exact else None
        if facts is not None:
            self._take(facts)
        elif is_exact and most > 1:
            self._study = study(attempt, sizes_to_check(most), reference=SOLO)

    def cut(self, num_windows: int) -> list[range]:
        """``num_windows`` places in as few calls as may be."""
        calls, done = [], 0
        while done < num_windows:
            size = max(size for size in self.sizes if size <= num_windows - done)
            calls.append(range(done, done + size))
            done += size
        return calls

    def study(self) -> bool:
        """Make one call for what is still to be found out; False where there is nothing.

        After one that raised, as where pages are short, windows stay alone.
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
