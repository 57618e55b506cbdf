"""The real UNet on random rows: what calls cost and which agree is found out with these."""

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
        told = PLAIN.numbers(width_px, height_px, has_score=model.text.has_score)
        inputs["pooled"] = randn(
            config.projection_class_embeddings_input_dim - len(told) * config.addition_time_embed_dim
        )
        inputs["time_ids"] = torch.tensor([told] * num_rows, dtype=torch.float32)
    if model.unet.guidance_dim:
        inputs["guidance"] = torch.linspace(1.0, 15.0, num_rows)
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
    recorder: Recorder | None = None,
    is_shallow: bool = False,
    lora_rank: int = 0,
    is_controlled: bool = False,
) -> Callable[[range], Tensor]:
    """The real UNet of ``model`` on ``num_rows`` random rows of ``shape``.

    ``conditioner`` makes of their embeddings what the UNet is told; without one it is told the embeddings. With
    ``chosen_rows`` only those are brought to the device, and may be asked for. ``compiled`` makes the calls it can,
    and ``recorder`` replays those it can.
    ``is_shallow``: only the shallow part, on features that one full call of all these rows leaves, made at once.
    ``lora_rank``: of random adapters that change every layer for all rows, not those of texts; 0 or ``WHOLE``: none.
    ``is_controlled``: ControlNets add random numbers to all rows.
    """
    kept = chosen_rows or range(num_rows)
    place = {row: index for index, row in enumerate(kept)}
    inputs = random_inputs(model, shape, num_rows, kept)
    lora = _random_lora(model, lora_rank)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    if is_shallow:
        assert model.unet.shallow is not None
        found: list[Tensor] = []
        loras = RowLoRAs([lora] * len(kept)) if lora else None
        model.unet.predict(contexts=contexts, loras=loras, kept_features=found, **inputs)
        inputs["features"] = found[0]
    residuals: Residuals = ()
    if is_controlled:
        cells = inputs["model_input"].shape[-2:]
        residuals = random_residuals(model.unet.network, cells, kept, inputs["model_input"].to(model.dtype))

    def predict(rows: range) -> Tensor:
        index = torch.tensor([place[row] for row in rows], device=model.device)
        chosen = {name: value.index_select(0, index) for name, value in inputs.items()}
        told = contexts.select(index) if isinstance(contexts, KeysValues) else contexts.index_select(0, index)
        loras = RowLoRAs([lora] * len(rows)) if lora else None
        added = tuple(tensor.index_select(0, index) for tensor in residuals) or None
        output = model.unet.predict(
            contexts=told,
            compiled=compiled,
            recorder=recorder,
            loras=loras,
            residuals=added,
            **chosen,
        )
        return output.cpu()

    return predict


def random_control_rows(
    model: DiffusionModel, control: ControlNetRunner, shape: Shape, num_rows: int, rows: range
) -> Callable[[range], Tensor]:
    """``control`` on random rows of ``shape`` in place of the UNet, of which ``rows`` may be asked for: what tells its
    residuals from others, (R, numbers) int64.
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
        chosen = {name: value.index_select(0, index) for name, value in inputs.items()}
        return bit_sums(control.predict(**chosen))

    return predict


def random_call(
    model: DiffusionModel, shape: Shape, num_rows: int, conditioner: Conditioner | None = None, lora_rank: int = 0
) -> UNetArguments:
    """A call of the UNet with ``num_rows`` random rows of ``shape``, and adapters as ``random_rows`` has them."""
    inputs = random_inputs(model, shape, num_rows)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))
    lora = _random_lora(model, lora_rank)
    call = model.unet.call(contexts=contexts, **inputs)
    return model.unet.with_factors(call, RowLoRAs([lora] * num_rows) if lora else None)


def _random_lora(model: DiffusionModel, rank: int) -> LoRASet | None:
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return random_set(adaptable(model.unet.network).values(), rank, like) if rank > 0 else None
