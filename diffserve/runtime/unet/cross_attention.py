"""Cross-attention with precomputed keys and values.

A prompt's keys and values are the same at every step: 16 layers in SD 1.5 and 2, 70 in SDXL. They are projected once
per prompt and passed to diffusers' UNet in place of the embeddings, as one ``KeysValues``. The UNet hands it on unread,
and each layer's processor takes its pair. Plain embeddings go through diffusers' own processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.kv import LayerSpec

UNUSUAL = ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "added_kv_proj_dim", "only_cross_attention")
"""Attributes of diffusers' ``Attention`` beyond the Stable Diffusion families that change keys or queries."""


class Pair(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor
    values: Tensor


class ImagePart(NamedTuple):
    """Keys and values of reference images, for some rows of a UNet call (IP-Adapter).

    Attributes:
        rows: Numbers of the rows, each once.
        layers: One pair (len(rows), tokens, heads, head_dim) per layer.
        scales: Weight of the attention to the image of each row.
        places: ``rows`` as int64 on the device, and the scales as (len(rows), 1, 1, 1), for more than one row.
    """

    rows: tuple[int, ...]
    layers: tuple[Pair, ...]
    scales: tuple[float, ...]
    places: tuple[Tensor, Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)

    def add_to(self, attended: Tensor, query: Tensor, layer: int) -> None:
        """Add the attention to the images to ``attended``, with ``query`` (R, heads, N, head_dim) of all rows."""
        device = query.device
        keys, values = (tensor.to(device).transpose(1, 2) for tensor in self.layers[layer])
        if self.places is None:
            rows = slice(self.rows[0], self.rows[0] + 1)
            added = F.scaled_dot_product_attention(query[rows], keys, values)
            attended[rows].add_(added, alpha=self.scales[0])
            return
        places, scales = (tensor.to(device) for tensor in self.places)
        added = F.scaled_dot_product_attention(query.index_select(0, places), keys, values)
        attended.index_add_(0, places, added * scales.to(added.dtype))


@dataclass(frozen=True, eq=False)
class KeysValues:
    """Keys and values for the rows of one UNet call: by layer, (R, tokens, heads, head_dim) each.

    Attributes:
        layers: One pair per layer.
        mask: bool (R, 1, 1, tokens), False beyond the end of a shorter text; ``None`` if all have the same length.
        images: Reference images of some rows, in the order in which they are added. Rows without any are computed as in
            a call without references.
    """

    layers: tuple[Pair, ...]
    mask: Tensor | None = None
    images: tuple[ImagePart, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        own_bytes = sum(tensor.nbytes for pair in self.layers for tensor in pair)
        return own_bytes + sum(part.num_bytes for part in self.images)

    def select(self, rows: Tensor) -> KeysValues:
        """Return copies of ``rows`` (int64, repeats allowed), without reference images."""
        layers = tuple(Pair(*(tensor.index_select(0, rows) for tensor in pair)) for pair in self.layers)
        return KeysValues(layers, None if self.mask is None else self.mask.index_select(0, rows))


Contexts = Tensor | KeysValues
"""Conditioning on the rows' texts: embeddings (R, tokens, dim), or the keys and values made of them."""


class PagedProcessor:
    """Attention processor for precomputed keys and values; plain embeddings go to diffusers' processor ``plain``.

    It computes what ``AttnProcessor2_0`` does for the layers that ``find_layers`` accepts, without the two projections.
    """

    def __init__(self, layer: int, plain: Any) -> None:
        self.layer = layer
        self.plain = plain

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Contexts | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Return (R, N, C) for image positions ``hidden_states`` (R, N, C)."""
        if not isinstance(encoder_hidden_states, KeysValues):
            output: Tensor = self.plain(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return output
        device = hidden_states.device  # a split UNet has blocks on other devices than its pages
        keys, values = (tensor.to(device).transpose(1, 2) for tensor in encoder_hidden_states.layers[self.layer])
        mask = None if encoder_hidden_states.mask is None else encoder_hidden_states.mask.to(device)
        B, N, _ = hidden_states.shape
        query = attn.to_q(hidden_states).view(B, N, attn.heads, -1).transpose(1, 2)  # (R, heads, N, head_dim)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        for part in encoder_hidden_states.images:  # decoupled attention, arXiv 2308.06721, equation 5
            part.add_to(attended, query, self.layer)
        output = attn.to_out[0](attended.transpose(1, 2).reshape(B, N, -1))
        return output


class CrossAttention:
    """The cross-attention layers of ``network``, a ``UNet2DConditionModel``, in the order of its modules.

    It installs a ``PagedProcessor`` in each of them. ``find_difference`` checks whether a UNet supports this.
    """

    def __init__(self, network: Any) -> None:
        self.modules = find_layers(network)
        for layer, module in enumerate(self.modules):
            if not isinstance(module.processor, PagedProcessor):
                module.set_processor(PagedProcessor(layer, module.processor))

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Heads and head sizes, for the page pool."""
        return tuple(LayerSpec(module.heads, module.inner_kv_dim // module.heads) for module in self.modules)

    def project(self, layer: int, contexts: Tensor) -> Pair:
        """Return the current keys and values (..., heads, head_dim) of ``contexts`` (..., dim) in one layer."""
        module, device = self.modules[layer], contexts.device
        place = module.to_k.weight.device  # another one in a split UNet; meta if weights are offloaded
        there = contexts if place.type == "meta" else contexts.to(place)
        return Pair(
            module.to_k(there).to(device).unflatten(-1, (module.heads, -1)),
            module.to_v(there).to(device).unflatten(-1, (module.heads, -1)),
        )

    def keys_values(self, contexts: Tensor) -> KeysValues:
        """Return keys and values of embeddings (R, tokens, dim) in all layers, without the page pool."""
        return KeysValues(tuple(self.project(layer, contexts) for layer in range(len(self.modules))))


def find_layers(network: Any) -> tuple[Any, ...]:
    """Return the modules that look at the text."""
    return tuple(
        module
        for module in network.modules()
        if type(module).__name__ == "Attention" and getattr(module, "is_cross_attention", False)
    )


def find_difference(network: Any) -> str | None:
    """Return why keys and values of ``network`` cannot be stored in pages; ``None`` if they can."""
    layers = find_layers(network)
    if not layers:
        return "it has no cross-attention"
    unusual = sorted({name for module in layers for name in UNUSUAL if getattr(module, name, None)})
    unusual += [] if all(_is_plain(module) for module in layers) else ["its scaling, bias or residual"]
    return f"its cross-attention differs from Stable Diffusion's in {', '.join(unusual)}" if unusual else None


def _is_plain(module: Any) -> bool:
    return bool(
        module.scale_qk
        and not module.residual_connection
        and module.rescale_output_factor == 1.0
        and module.inner_kv_dim == module.inner_dim
        and not (module.training and module.to_out[1].p)
    )
