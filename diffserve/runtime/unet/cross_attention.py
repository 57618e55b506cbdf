"""Cross-attention with keys and values that are there already.

The text does not change while an image is painted, so neither do the keys and values that the UNet makes of it in each
of its cross-attention layers: 16 layers in SD 1.5 and 2, 70 in SDXL. They are projected once for each prompt and handed
to diffusers' UNet where the text's embeddings would be, as one ``KeysValues``: the UNet passes it on unread, and the
processor of each layer takes its own pair from it. Embeddings given as a plain tensor go diffusers' own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from diffserve.runtime.kv import LayerSpec

UNUSUAL = ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "added_kv_proj_dim", "only_cross_attention")
"""What ``Attention`` of diffusers may have beyond the Stable Diffusion families; any of it changes keys or queries."""


class Pair(NamedTuple):
    """One layer's keys and values."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class KeysValues:
    """What the rows of one UNet call look at: by layer, keys and values (R, tokens, heads, head_dim) each.

    mask: bool (R, 1, 1, tokens), False where a row's text is over and another's is not; ``None``: all are equally long.
    """

    layers: tuple[Pair, ...]
    mask: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that all layers take."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)

    def select(self, rows: Tensor) -> KeysValues:
        """Copies of ``rows`` (int64, repeats allowed)."""
        layers = tuple(Pair(*(tensor.index_select(0, rows) for tensor in pair)) for pair in self.layers)
        return KeysValues(layers, None if self.mask is None else self.mask.index_select(0, rows))


Contexts = Tensor | KeysValues
"""What a UNet is told of its rows' texts: embeddings (R, tokens, dim), or the keys and values made of them."""


class PagedProcessor:
    """In place of ``plain``, diffusers' own processor of cross-attention ``layer``, which still does embeddings.

    Computes what ``AttnProcessor2_0`` does for the layers that ``find_layers`` accepts, less the two projections.
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
        """(R, N, C) from ``hidden_states`` (R, N, C), the picture's positions, looking at the text."""
        if not isinstance(encoder_hidden_states, KeysValues):
            output: Tensor = self.plain(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return output
        device = hidden_states.device  # of a split UNet another than that of its pages
        keys, values = (tensor.to(device).transpose(1, 2) for tensor in encoder_hidden_states.layers[self.layer])
        mask = None if encoder_hidden_states.mask is None else encoder_hidden_states.mask.to(device)
        B, N, _ = hidden_states.shape
        query = attn.to_q(hidden_states).view(B, N, attn.heads, -1).transpose(1, 2)  # (R, heads, N, head_dim)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        output = attn.to_out[0](attended.transpose(1, 2).reshape(B, N, -1))
        return output


class CrossAttention:
    """The cross-attention layers of ``network``, a ``UNet2DConditionModel``, in the order in which they are built.

    Puts a ``PagedProcessor`` into each of them. ``find_difference`` says for which UNets this is possible.
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
        """Keys and values (..., heads, head_dim) of ``contexts`` (..., dim) in one layer, as the weights are now."""
        module, device = self.modules[layer], contexts.device
        place = module.to_k.weight.device  # of a split UNet another than that of its pages; meta where weights rest
        there = contexts if place.type == "meta" else contexts.to(place)
        return Pair(
            module.to_k(there).to(device).unflatten(-1, (module.heads, -1)),
            module.to_v(there).to(device).unflatten(-1, (module.heads, -1)),
        )

    def keys_values(self, contexts: Tensor) -> KeysValues:
        """Of embeddings (R, tokens, dim), past the pool."""
        return KeysValues(tuple(self.project(layer, contexts) for layer in range(len(self.modules))))


def find_layers(network: Any) -> tuple[Any, ...]:
    """Return the modules that look at the text."""
    return tuple(
        module
        for module in network.modules()
        if type(module).__name__ == "Attention" and getattr(module, "is_cross_attention", False)
    )


def find_difference(network: Any) -> str | None:
    """Return why keys and values of ``network`` cannot be kept in pages; ``None`` where they can."""
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
