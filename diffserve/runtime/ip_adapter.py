"""IP-Adapters: image tokens from a CLIP image encoder, and their keys and values in a UNet's cross-attention.

(Ye et al. 2023, arXiv 2308.06721.) The base kind projects the image embedding to a few tokens. The plus kind resamples
the penultimate hidden states with a perceiver (Jaegle et al. 2021, arXiv 2103.03206; Alayrac et al. 2022, arXiv
2204.14198). Results equal those of diffusers' ``load_ip_adapter``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.models.ip_adapter_layout import HEAD_DIM, AdapterLayout, NotAnAdapterError, num_blocks, read_layout
from diffserve.models.model_files import TRANSFORMERS_STEM, find_weights
from diffserve.models.references import ImageEncoder
from diffserve.runtime.clip_scorer import CLIP_MEAN, CLIP_STD, PREPARED, Preparation
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build_clip_vision, load_component
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.transfer import SideQueue, send
from diffserve.runtime.unet.cross_attention import Pair, find_layers

BICUBIC: Final = 3


class IPAdapter:
    """Weights of an IP-Adapter for one UNet.

    Attributes:
        name: Name of its file in requests.
        digest: Digest of its file and of its image encoder's files.
        kind: "base" or "plus".
        num_tokens: Tokens that it makes of an image.
    """

    def __init__(
        self,
        name: str,
        digest: str,
        layout: AdapterLayout,
        projection: dict[str, Tensor],
        layers: tuple[tuple[Tensor, Tensor], ...],
        heads: tuple[int, ...],
    ) -> None:
        """Initialize it with the tensors of the projection by name, and for each layer (to_k, to_v) and its heads."""
        self.name = name
        self.digest = digest
        self.kind = layout.kind
        self.num_tokens = layout.num_tokens
        self._projection = projection
        self._layers = layers
        self._heads = heads

    @classmethod
    def load(cls, name: str, digest: str, file: Path, network: Any, choice: DeviceChoice) -> IPAdapter:
        """Load ``file`` for the UNet ``network``. Raises ModelLoadError if it does not fit."""
        checkpoint = Checkpoint.open([file])
        layout, pairs = match_layers(checkpoint, network)

        def read(key: str) -> Tensor:
            return checkpoint.read(key).to(choice.device, choice.compute_dtype, copy=True)

        projection = {key: read(stored) for key, stored in layout.projection.items()}
        for key in [key for key in projection if key.endswith(".to_kv.weight")]:
            stem = key.removesuffix("to_kv.weight")
            projection[f"{stem}to_k.weight"], projection[f"{stem}to_v.weight"] = projection.pop(key).chunk(2)
        layers = tuple((read(keys), read(values)) for keys, values in pairs)
        return cls(name, digest, layout, projection, layers, tuple(module.heads for module in find_layers(network)))

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        pairs = (tensor for pair in self._layers for tensor in pair)
        return sum(tensor.nbytes for tensor in (*self._projection.values(), *pairs))

    @torch.inference_mode()
    def tokens(self, features: Tensor) -> Tensor:
        """Return the image tokens (tokens, dim) of ``features``, which ``LoadedEncoder.features`` makes.

        These are the image embedding (image_dim,) for the base kind, hidden states (n, image_dim) for the plus kind.
        """
        tensors = self._projection
        if self.kind == "base":
            return self._norm("norm", self._linear("proj", features).view(self.num_tokens, -1))
        image, latents = self._linear("proj_in", features), tensors["latents"][0]  # (n, inner), (tokens, inner)
        for block in range(num_blocks(tensors)):
            attention, feed_forward = f"layers.{block}.0", f"layers.{block}.1"
            latents = latents + self._attend(attention, image, latents)
            wide = F.gelu(self._linear(f"{feed_forward}.1", self._norm(f"{feed_forward}.0", latents)))
            latents = latents + self._linear(f"{feed_forward}.3", wide)
        return self._norm("norm_out", self._linear("proj_out", latents))

    def _attend(self, name: str, image: Tensor, latents: Tensor) -> Tensor:
        """Return the attention (tokens, inner) of ``latents`` to ``image`` (n, inner) and to themselves."""
        latents = self._norm(f"{name}.norm2", latents)
        read = torch.cat([self._norm(f"{name}.norm1", image), latents])
        states = {"to_q": latents, "to_k": read, "to_v": read}
        query, keys, values = (
            self._linear(f"{name}.{part}", of).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)[None]
            for part, of in states.items()
        )  # (1, heads, n, HEAD_DIM)
        attended = F.scaled_dot_product_attention(query, keys, values)[0]
        return self._linear(f"{name}.to_out", attended.transpose(0, 1).flatten(1))

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return F.linear(states, self._projection[f"{name}.weight"], self._projection.get(f"{name}.bias"))

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight = self._projection[f"{name}.weight"]
        return F.layer_norm(states, weight.shape, weight, self._projection[f"{name}.bias"])

    @torch.inference_mode()
    def project(self, layer: int, tokens: Tensor) -> Pair:
        """Return the keys and values (tokens, heads, head_dim) of image ``tokens`` (tokens, dim) in one layer."""
        heads = (self._heads[layer], -1)
        return Pair(*(F.linear(tokens, weight).unflatten(-1, heads) for weight in self._layers[layer]))


def match_layers(checkpoint: Checkpoint, network: Any) -> tuple[AdapterLayout, list[tuple[str, str]]]:
    """Return the layout of an adapter, and its tensor names for each cross-attention layer of the UNet ``network``.

    Layers with numbers are in the order of the UNet's modules, which is that of diffusers' attention processors.

    Raises:
        ModelLoadError: The adapter was made for another UNet. The message is a clause for the caller to complete.
    """
    try:
        layout = read_layout({name: entry.shape for name, entry in checkpoint.entries.items()})
    except NotAnAdapterError as error:
        raise ModelLoadError(f"it {error}") from None
    width, modules = network.config.cross_attention_dim, find_layers(network)
    if layout.width != width:
        raise ModelLoadError(f"it makes tokens of {layout.width} numbers, the UNet reads {width}")
    names = {module: name for name, module in network.named_modules()}
    places: dict[int | str, int] = {names[module]: place for place, module in enumerate(modules)}
    by_place = {places.get(layer, layer): pair for layer, pair in layout.layers.items()}
    if set(by_place) != set(range(len(modules))):
        raise ModelLoadError(f"it has {len(by_place)} layers, and they are not the {len(modules)} of this UNet")
    pairs = [by_place[place] for place in range(len(modules))]
    for module, pair in zip(modules, pairs, strict=True):
        for name in pair:
            shape, expected = checkpoint.entries[name].shape, (module.inner_kv_dim, width)
            if shape != expected:
                raise ModelLoadError(f"its {name} has shape {list(shape)}, this UNet needs {list(expected)}")
    return layout, pairs


class LoadedEncoder:
    """transformers' ``CLIPVisionModelWithProjection`` with its preparation of images. For one thread at a time.

    Attributes:
        digest: Digest of its files.
    """

    def __init__(self, digest: str, network: Any, prepare: Preparation, device: torch.device) -> None:
        self.digest = digest
        self._network = network
        self._prepare = prepare
        self._device = device
        self._queue = SideQueue(device)

    @classmethod
    def load(cls, digest: str, encoder: ImageEncoder, choice: DeviceChoice) -> LoadedEncoder:
        """Load ``encoder``. Without a configuration images are prepared as CLIP's were. Raises ModelLoadError."""
        directory = encoder.directory
        network = build_clip_vision(encoder.config, str(directory / "config.json"))
        load_component(network, encoder_checkpoint(encoder, choice.dtype), choice)
        side_px = int(network.config.image_size)
        prepare = Preparation(side_px, (side_px, side_px), BICUBIC, CLIP_MEAN, CLIP_STD)
        if (directory / PREPARED).is_file():
            prepare = Preparation.read(directory / PREPARED, side_px)
        return cls(digest, network, prepare, choice.device)

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(parameter.nbytes for parameter in self._network.parameters())

    @torch.inference_mode()
    def tokens(self, adapter: IPAdapter, pixels: NDArray[np.uint8]) -> Tensor:
        """Return the tokens (tokens, dim) that ``adapter`` makes of an image (height, width, 3)."""
        prepared = self._prepare(pixels)
        with self._queue:
            tokens = adapter.tokens(self._features(adapter, prepared))
            return self._done(tokens)

    @torch.inference_mode()
    def unconditional(self, adapter: IPAdapter) -> Tensor:
        """Return the tokens (tokens, dim) for unconditional rows, as diffusers.

        They are made of a zero image embedding (base), or of the hidden states of a zero input (plus).
        """
        zeros = torch.zeros((1, 3, *self._prepare.crop_px))
        with self._queue:
            features = self._features(adapter, zeros)
            return self._done(adapter.tokens(torch.zeros_like(features) if adapter.kind == "base" else features))

    def _features(self, adapter: IPAdapter, prepared: Tensor) -> Tensor:
        """Return the embedding (image_dim,) or the penultimate hidden states (n, image_dim) of (1, 3, side, side)."""
        pixels = send(prepared, self._device).to(next(self._network.parameters()).dtype)
        if adapter.kind == "base":
            embedding: Tensor = self._network(pixel_values=pixels).image_embeds[0]
            return embedding
        states: Tensor = self._network(pixel_values=pixels, output_hidden_states=True).hidden_states[-2][0]
        return states

    def _done(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` after the device has computed them, because another stream reads them."""
        if not bool(torch.isfinite(tokens).all()):  # waits for the device
            raise ModelLoadError("its tokens of this image are not finite; choose a wider dtype")
        return tokens


def encoder_checkpoint(encoder: ImageEncoder, dtype: str) -> Checkpoint:
    """Open the variant of the weights of ``encoder`` that suits ``dtype``. Raises ModelLoadError."""
    return Checkpoint.open(find_weights(encoder.directory, TRANSFORMERS_STEM, dtype=dtype))
