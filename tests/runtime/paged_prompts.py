"""Prompts of the tiny models on separate pools, and the text inputs of a UNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffserve.runtime import DiffusionModel, UNetRunner
from diffserve.runtime.kv import PagePool
from diffserve.runtime.text.conditioning import wanted_bytes
from diffserve.runtime.text.encoding import Conditioning
from diffserve.runtime.text.paged_encoder import ImageSpecs
from diffserve.runtime.text.prompt_pages import PagedConditioning, PromptPages

SIXTEEN = "cat " * 15
"""With the start mark sixteen tokens: one logical page."""


def pages_of(
    model: DiffusionModel, *, is_exact: bool = False, num_windows: int = 24, unet: UNetRunner | None = None
) -> PromptPages:
    """Prompts of ``model`` on a pool of their own that holds ``num_windows`` windows."""
    unet = unet or model.unet
    specs = ImageSpecs.of(model.text, unet, b"a test")
    num_bytes = wanted_bytes([specs], (), model.text.window_tokens, num_windows=num_windows)
    pool = PagePool.for_specs(num_bytes, list(specs), device=model.device)
    return PromptPages(pool, model.text, unet, specs, is_exact=is_exact)


def condition(pages: PromptPages, prompt: str, negative: str | None = "red") -> PagedConditioning:
    return pages.condition(prompt, negative, width_px=64, height_px=64)


def embed(model: DiffusionModel, prompt: str, negative: str = "red") -> Conditioning:
    return model.text.encode(prompt, negative, width_px=64, height_px=64)


def found_in(pages: PromptPages, conditioning: PagedConditioning) -> list[torch.Tensor]:
    """Return all text inputs of the UNet: keys and values of all layers, prompt first, then the pooled vectors."""
    halves = [half for half in (conditioning.cond, conditioning.uncond) if half]
    tensors = [tensor for pair in pages.gather(halves).layers for tensor in pair]
    return tensors + [pooled for pooled in (conditioning.pooled_cond, conditioning.pooled_uncond) if pooled is not None]


def same_bytes(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
