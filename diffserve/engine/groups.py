"""What is known of each group of rows that may share a call: exact batch sizes, their costs, and the knee."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from diffserve.config import EngineConfig
from diffserve.engine.buckets import CostCurve
from diffserve.engine.conditioners import Conditioner, PlainConditioner
from diffserve.engine.exactness import SOLO, Predict, check_buckets, sizes_to_check
from diffserve.engine.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.cross_attention import KeysValues

MOST_ROWS_CPU = 16
MOST_ROWS_DEVICE = 32

PROBE_EVERY = 16

CHECK_LIMIT_CPU = 2e11
CHECK_LIMIT_DEVICE = 1e15
"""Parameters times latent cells above which the check would take many seconds: there one row fills the machine."""


def is_deterministic(model: DiffusionModel, config: EngineConfig) -> bool:
    """Whether an image's bytes are to be independent of its neighbours; by default on a CPU."""
    return model.device.type == "cpu" if config.deterministic == "auto" else config.deterministic


class Groups:
    """A :class:`CostCurve` for each group, measured when the group is first seen (62 rows of UNet on a CPU)."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, conditioner: Conditioner) -> None:
        self.model = model
        self.conditioner = conditioner
        self.on_cpu = model.device.type == "cpu"
        self.is_deterministic = is_deterministic(model, config)
        self.most_rows = config.max_rows or (MOST_ROWS_CPU if self.on_cpu else MOST_ROWS_DEVICE)
        self.has_fixed_cap = config.max_rows is not None
        self._curves: dict[GroupKey, CostCurve] = {}
        self._calls = itertools.count(1)

    def learn(self, group: GroupKey) -> None:
        """Measure ``group`` unless it is known."""
        if group not in self._curves:
            self._curves[group] = self._measure(group)

    def curve(self, group: GroupKey) -> CostCurve:
        """The buckets and costs of a group seen before."""
        return self._curves[group]

    def row_cap(self, group: GroupKey) -> int:
        """Rows that a tick of ``group`` may hold: as configured, else the knee of its curve.

        Every ``PROBE_EVERY``-th time twice the knee is let in, so that a knee found on a busy machine does not stick.
        """
        if self.has_fixed_cap:
            return self.most_rows
        knee = self._curves[group].knee(self.most_rows)
        return min(2 * knee, self.most_rows) if next(self._calls) % PROBE_EVERY == 0 else knee

    def describe(self) -> dict[GroupKey, tuple[int, ...]]:
        """Bucket sizes in use, by group."""
        return {group: curve.buckets for group, curve in self._curves.items()}

    def _measure(self, group: GroupKey) -> CostCurve:
        factor = self.model.info.vae_factor
        work = self.model.info.num_parameters * (group.height_px // factor) * (group.width_px // factor)
        if work > (CHECK_LIMIT_CPU if self.on_cpu else CHECK_LIMIT_DEVICE):
            return CostCurve(SOLO, is_exact=self.is_deterministic)
        sizes = sizes_to_check(self.most_rows)
        predict = random_rows(self.model, group, sizes[-1], self.conditioner)
        return check_buckets(predict, sizes, is_exact=self.is_deterministic)


def random_inputs(model: DiffusionModel, group: GroupKey, num_rows: int) -> dict[str, Tensor]:
    """Arguments of ``UNetRunner.predict`` for random rows of the group's shape; the same numbers every time.

    ``contexts`` are embeddings (R, tokens, dim).
    """
    factor = model.info.vae_factor
    config = model.unet.network.config
    rng = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn((num_rows, *shape), generator=rng).to(model.device)

    cells = (group.height_px // factor, group.width_px // factor)
    inputs = {"model_input": randn(model.info.latent_channels, *cells)}
    inputs["timesteps"] = torch.linspace(0, model.info.train_timesteps - 1, num_rows).round().to(model.device)
    inputs["contexts"] = randn(group.num_tokens, config.cross_attention_dim)
    if model.unet.has_size_conditioning:
        inputs["pooled"] = randn(config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
        sizes = [group.height_px, group.width_px, 0, 0, group.height_px, group.width_px]
        inputs["time_ids"] = torch.tensor([sizes] * num_rows, dtype=torch.float32, device=model.device)
    if model.unet.extra_channels:
        inputs["extra"] = randn(model.unet.extra_channels, *cells)
    return inputs


def random_rows(
    model: DiffusionModel, group: GroupKey, num_rows: int, conditioner: Conditioner | None = None
) -> Predict:
    """The real UNet of ``model`` on ``num_rows`` random rows of the group's shape.

    ``conditioner`` makes of their embeddings what the UNet is told; without one it is told the embeddings.
    """
    inputs = random_inputs(model, group, num_rows)
    contexts = (conditioner or PlainConditioner(model)).of_embeddings(inputs.pop("contexts"))

    def predict(rows: range) -> Tensor:
        index = torch.tensor(list(rows), device=model.device)
        chosen = {name: value.index_select(0, index) for name, value in inputs.items()}
        told = contexts.select(index) if isinstance(contexts, KeysValues) else contexts.index_select(0, index)
        return model.unet.predict(contexts=told, **chosen).cpu()

    return predict
