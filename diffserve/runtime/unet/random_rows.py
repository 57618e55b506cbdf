"""The real UNet on random rows, to measure the cost of calls and which batch sizes agree bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffserve.api.micro_conditioning import PLAIN
from diffserve.runtime.low_rank import LoRASet, RowLoRAs, adaptable, random_set
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.text.conditioning import Conditioner, PlainConditioner
from diffserve.runtime.unet.batch_invariance import bit_sums
from diffserve.runtime.unet.call import Compiled, Recorder, UNetArguments
from diffserve.runtime.unet.controlnet import ControlNetRunner, Residuals, random_residuals
from diffserve.runtime.unet.cross_attention import KeysValues

Shape = tuple[int, int, int]
"""Height and width of the image in pixels, and tokens of the text."""


def random_inputs(
    model: DiffusionModel, shape: Shape, num_rows: int, row_numbers: range | None = None
) -> dict[str, Any]:
    """Return arguments of ``UNetRunner.predict`` for random rows of ``shape``; the same numbers every time.

    ``contexts`` are embeddings (R, tokens, dim).

    Args:
        model: The model of the UNet.
        shape: The shape of all rows.
        num_rows: How many rows are drawn.
        row_numbers: Rows that are moved to the device; by default all.
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
        size_numbers = PLAIN.numbers(width_px, height_px, has_score=model.text.has_score)
        inputs["pooled"] = randn(
            config.projection_class_embeddings_input_dim - len(size_numbers) * config.addition_time_embed_dim
        )
        inputs["time_ids"] = torch.tensor([size_numbers] * num_rows, dtype=torch.float32)
    if model.unet.guidance_dim:
        inputs["guidance"] = torch.linspace(1.0, 15.0, num_rows)
    if model.unet.extra_channels:
        inputs["extra"] = randn(model.unet.extra_channels, *cells)
    order = torch.tensor(row_numbers or range(num_rows))
    return {name: value.index_select(0, order).to(model.device) for name, value in inputs.items()}


def random_rows(
    model: DiffusionModel,
    shape: Shape,
    num_rows: int,
    conditioner: Conditioner | None = None,
    chosen_rows: range | None = None,
    compiled: Compiled | None = None,
    *,
    recorder: Recorder | None = None,
    is_shallow: bool = False,
    lora_rank: int = 0,
    is_controlled: bool = False,
) -> Callable[[range], Tensor]:
    """Return a function that runs the real UNet of ``model`` on given ones of ``num_rows`` random rows of ``shape``.

    Args:
        model: The model of the UNet.
        shape: The shape of all rows.
        num_rows: How many rows are drawn.
        conditioner: Makes the contexts of the UNet from the embeddings; by default the embeddings are used.
        chosen_rows: Rows that are moved to the device and may be requested; by default all.
        compiled: Makes the calls that it can.
        recorder: Replays the calls that it can.
        is_shallow: Run the shallow part only, on features of one full call of all rows, made at once.
        lora_rank: Rank of random adapters that change every layer for all rows except those of texts; 0 or ``WHOLE``:
            none.
        is_controlled: Add random ControlNet residuals to all rows.
    """
    row_numbers = chosen_rows or range(num_rows)
    place = {row: index for index, row in enumerate(row_numbers)}
    inputs = random_inputs(model, shape, num_rows, row_numbers)
    lora = _random_lora(model, lora_rank)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    if is_shallow:
        assert model.unet.shallow is not None
        features: list[Tensor] = []
        loras = RowLoRAs([lora] * len(row_numbers)) if lora else None
        model.unet.predict(contexts=contexts, loras=loras, kept_features=features, **inputs)
        inputs["features"] = features[0]
    residuals: Residuals = ()
    if is_controlled:
        cells = inputs["model_input"].shape[-2:]
        residuals = random_residuals(model.unet.network, cells, row_numbers, inputs["model_input"].to(model.dtype))

    def predict(rows: range) -> Tensor:
        index = torch.tensor([place[row] for row in rows], device=model.device)
        selected = {name: value.index_select(0, index) for name, value in inputs.items()}
        row_contexts = contexts.select(index) if isinstance(contexts, KeysValues) else contexts.index_select(0, index)
        loras = RowLoRAs([lora] * len(rows)) if lora else None
        added = tuple(tensor.index_select(0, index) for tensor in residuals) or None
        output = model.unet.predict(
            contexts=row_contexts,
            compiled=compiled,
            recorder=recorder,
            loras=loras,
            residuals=added,
            **selected,
        )
        return output.cpu()

    return predict


def random_control_rows(
    model: DiffusionModel, control: ControlNetRunner, shape: Shape, num_rows: int, rows: range
) -> Callable[[range], Tensor]:
    """Return a function that runs ``control`` on given random rows of ``shape`` in place of the UNet.

    It returns bit sums of the residuals (R, numbers) int64, which identify them. Only ``rows`` may be requested.
    """
    place = {row: index for index, row in enumerate(rows)}
    inputs = random_inputs(model, shape, num_rows, rows)
    inputs = {name: value for name, value in inputs.items() if name not in ("guidance", "extra")}
    cells = inputs["model_input"].shape[-2:]
    rngs = [torch.Generator("cpu").manual_seed(row) for row in rows]
    hints = torch.stack([torch.randn((control.hint_channels, *cells), generator=rng) for rng in rngs])
    inputs["hints"] = hints.to(model.device, control.dtype)
    inputs["scales"] = torch.ones(len(rows), device=model.device)

    def predict(rows: range) -> Tensor:
        index = torch.tensor([place[row] for row in rows], device=model.device)
        return bit_sums(control.predict(**{name: value.index_select(0, index) for name, value in inputs.items()}))

    return predict


def random_call(
    model: DiffusionModel, shape: Shape, num_rows: int, conditioner: Conditioner | None = None, lora_rank: int = 0
) -> UNetArguments:
    """Return a UNet call with ``num_rows`` random rows of ``shape``, and adapters as in ``random_rows``."""
    inputs = random_inputs(model, shape, num_rows)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    lora = _random_lora(model, lora_rank)
    call = model.unet.call(contexts=contexts, **inputs)
    return model.unet.with_factors(call, RowLoRAs([lora] * num_rows) if lora else None)


def _random_lora(model: DiffusionModel, rank: int) -> LoRASet | None:
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return random_set(adaptable(model.unet.network).values(), rank, like) if rank > 0 else None
