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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.kv import KVSpec, LayerSpec, PagedBatch, PagePool, PageTable


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

    @torch.inference_mode()
    def encode(self, token_ids: tuple[int, ...], *, first: int) -> Encoded:
        """Hidden states of tokens ``first`` onwards; those before them are computed only where the pool lacks them.

        Raises PoolBusy or PoolTooSmall when the text's pages cannot be had.
        """
        num_tokens, page_tokens = len(token_ids), self.spec.page_tokens
        table, num_cached = self.pool.open(self.spec.tenant, token_ids, reserve=num_tokens, most_cached=first)
        try:
            cuts = segments(num_cached, num_tokens, page_tokens, is_exact=self.is_exact)
            parts = [self._encode_segment(table, token_ids, start, stop) for start, stop in cuts]
            self.pool.commit(table, token_ids)
        finally:
            self.pool.close(table)
        hidden, last = (torch.cat(states)[first - num_cached :] for states in zip(*parts, strict=True))
        return Encoded(hidden, last)

    @torch.inference_mode()
    def pooled(self, last: Tensor) -> Tensor:
        """(P,) the projection of one token's last hidden state (dim,); the token is that of :meth:`place_of_end`."""
        projected: Tensor = self.network.text_projection(self._body.final_layer_norm(last[None]))[0]
        return projected

    def place_of_end(self, token_ids: tuple[int, ...]) -> int:
        """Where the pooled vector is read: at the first end mark, as transformers finds it.

        Old configurations give a wrong end mark, 2; there it is the largest id.
        """
        end = self.network.config.eos_token_id
        if end == 2:
            end = max(token_ids)
        return token_ids.index(end) if end in token_ids else 0

    def _encode_segment(self, table: PageTable, token_ids: tuple[int, ...], start: int, stop: int) -> Encoded:
        batch = self.pool.batch([table], [start], [stop])
        device = batch.positions.device
        ids = torch.tensor([token_ids[start:stop]], device=device)
        state = self._body.embeddings(input_ids=ids, position_ids=batch.positions[None])  # (1, n, dim)
        mask = None if start == 0 else torch.ones((stop - start, stop), dtype=torch.bool, device=device).tril(start)
        before = state
        for index, layer in enumerate(self._body.encoder.layers):
            before, state = state, self._layer(layer, state, batch, index, mask)
        hidden = before if self.stops_early else self._body.final_layer_norm(state)
        return Encoded(hidden[0], state[0])

    @staticmethod
    def _layer(layer: Any, state: Tensor, batch: PagedBatch, index: int, mask: Tensor | None) -> Tensor:
        attention, shape = layer.self_attn, (*state.shape[:2], layer.self_attn.num_heads, -1)
        normed = layer.layer_norm1(state)
        query, keys, values = (
            project(normed).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # (1, n, heads, head_dim)
        batch.write(index, keys[0], values[0])
        if mask is not None:
            keys, values, _ = batch.gather(index)  # (1, tokens so far, heads, head_dim)
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
