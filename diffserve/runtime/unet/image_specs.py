"""What an image model asks of a page pool, known before there is one, for the pool may have other tenants as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diffserve.runtime.kv import KVSpec, PagePlan
from diffserve.runtime.text.encoding import TextEncoderRunner
from diffserve.runtime.text.pages import text_spec
from diffserve.runtime.unet.unet import UNetRunner


@dataclass(frozen=True)
class ImageSpecs:
    """The tenants of one image model: its UNet's cross-attention, and each text encoder's self-attention."""

    unet: KVSpec
    encoders: tuple[KVSpec, ...]

    def __iter__(self) -> Iterator[KVSpec]:
        return iter((self.unet, *self.encoders))

    @classmethod
    def of(cls, text: TextEncoderRunner, unet: UNetRunner, identity: bytes) -> ImageSpecs:
        """``identity``: a hash of all that decides the numbers: weights, adapters, quantisation, the cut of segments.

        Raises ConfigError for a UNet whose cross-attention cannot be paged.
        """
        name, dtype = identity.hex()[:12], unet.dtype
        layers = unet.cross_attention.layers
        return cls(
            KVSpec(f"unet:{name}", layers, dtype, model_digest=identity, whole_sequences=True),
            tuple(
                text_spec(encoder.network, tenant=f"text{index}:{name}", dtype=dtype, identity=identity)
                for index, encoder in enumerate(text.encoders, start=1)
            ),
        )

    def pool_bytes(self, num_windows: int, window_tokens: int) -> int:
        """Room for ``num_windows`` different windows of ``window_tokens`` while one of them is being encoded."""
        page_bytes = PagePlan.smallest_page_bytes(self)
        unet, *encoders = (PagePlan(spec, page_bytes).num_pages(window_tokens) for spec in self)
        return page_bytes * (num_windows * unet + max(encoders))
