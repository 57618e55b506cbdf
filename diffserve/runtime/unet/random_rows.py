"""The real UNet on random rows: what calls cost and which agree is found out with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.text.conditioning import Conditioner, PlainConditioner
from diffserve.runtime.unet.call import Compiled, UNetArguments
from diffserve.runtime.unet.cross_attention import KeysValues

Shape = tuple[int, int, int]
"""Height and width of the picture in pixels, tokens of the text."""


def random_inputs(model: DiffusionModel, shape: Shape, num_rows: int, chosen: range | None = None) -> dict[str, Any]:
    """Arguments of ``UNetRunner.predict`` for random rows of ``shape``; the same numbers every time.

    ``contexts`` are embeddings (R, tokens, dim). ``chosen``: which of the rows are wanted on the device; all else.
    """
    height_px, width_px, num_tokens = shape
    factor = model.info.vae_factor
    config = model.unet.network.config
    rng = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn((num_rows, *shape), generator=rng)

    cells = (height_px // factor, width_px // factor)
    inputs = {"model_input": randn(model.info.latent_channels, *cells)}
    inputs["timesteps"] = torch.linspace(0, model.info.train_timesteps - 1, num_rows).round()
    inputs["contexts"] = randn(num_tokens, config.cross_attention_dim)
    if model.unet.has_size_conditioning:
        inputs["pooled"] = randn(config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
        sizes = [height_px, width_px, 0, 0, height_px, width_px]
        inputs["time_ids"] = torch.tensor([sizes] * num_rows, dtype=torch.float32)
    if model.unet.extra_channels:
        inputs["extra"] = randn(model.unet.extra_channels, *cells)
    order = torch.tensor(chosen or range(num_rows))
    return {name: value.index_select(0, order).to(model.device) for name, value in inputs.items()}


def random_rows(
    model: DiffusionModel,
    shape: Shape,
    num_rows: int,
    conditioner: Conditioner | None = None,
    chosen_rows: range | None = None,
    compiled: Compiled | None = None,
    *,
    is_shallow: bool = False,
    merged_share: float = 0.0,
) -> Callable[[range], Tensor]:
    """The real UNet of ``model`` on ``num_rows`` random rows of ``shape``.

    ``conditioner`` makes of their embeddings what the UNet is told; without one it is told the embeddings. With
    ``chosen_rows`` only those are brought to the device, and may be asked for. ``compiled`` makes the calls it can.
    ``is_shallow``: only the shallow part, on features that one full call of all these rows leaves, made at once.
    ``merged_share``: as ``UNetRunner.predict`` has it.
    """
    kept = chosen_rows or range(num_rows)
    place = {row: index for index, row in enumerate(kept)}
    inputs = random_inputs(model, shape, num_rows, kept)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    if is_shallow:
        assert model.unet.shallow is not None
        with model.unet.shallow.keeping() as found:
            model.unet.predict(contexts=contexts, merged_share=merged_share, **inputs)
        inputs["features"] = found[0]

    def predict(rows: range) -> Tensor:
        index = torch.tensor([place[row] for row in rows], device=model.device)
        chosen = {name: value.index_select(0, index) for name, value in inputs.items()}
        told = contexts.select(index) if isinstance(contexts, KeysValues) else contexts.index_select(0, index)
        return model.unet.predict(contexts=told, merged_share=merged_share, compiled=compiled, **chosen).cpu()

    return predict


def random_call(
    model: DiffusionModel, shape: Shape, num_rows: int, conditioner: Conditioner | None = None
) -> UNetArguments:
    """A call of the UNet with ``num_rows`` random rows of ``shape``."""
    inputs = random_inputs(model, shape, num_rows)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    return model.unet.call(contexts=contexts, **inputs)
