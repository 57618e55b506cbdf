"""What is known of each group of rows that may share a call: exact batch sizes, their costs, and the knee."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from diffserve.config import EngineConfig
from diffserve.engine.buckets import CostCurve
from diffserve.engine.exactness import SOLO, Predict, check_buckets, sizes_to_check
from diffserve.engine.task import GroupKey
from diffserve.runtime import DiffusionModel

MOST_ROWS_CPU = 16
MOST_ROWS_DEVICE = 32

PROBE_EVERY = 16

CHECK_LIMIT_CPU = 2e11
CHECK_LIMIT_DEVICE = 1e15
"""Parameters times latent cells above which the check would take many seconds: there one row fills the machine."""


class Groups:
    """A :class:`CostCurve` for each group, measured when the group is first seen (62 rows of UNet on a CPU)."""

    def __init__(self, model: DiffusionModel, config: EngineConfig) -> None:
        self.model = model
        self.on_cpu = model.device.type == "cpu"
        self.is_deterministic = self.on_cpu if config.deterministic == "auto" else config.deterministic
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
        return check_buckets(random_rows(self.model, group, sizes[-1]), sizes, is_exact=self.is_deterministic)


def random_rows(model: DiffusionModel, group: GroupKey, num_rows: int) -> Predict:
    """The real UNet of ``model`` on ``num_rows`` random rows of the group's shape; the same numbers every time."""
    factor = model.info.vae_factor
    config = model.unet.network.config
    rng = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn((num_rows, *shape), generator=rng).to(model.device)

    cells = (group.height_px // factor, group.width_px // factor)
    latents = randn(model.info.latent_channels, *cells)
    timesteps = torch.linspace(0, model.info.train_timesteps - 1, num_rows).round().to(model.device)
    contexts = randn(group.num_tokens, config.cross_attention_dim)
    optional: dict[str, Tensor] = {}
    if model.unet.has_size_conditioning:
        optional["pooled"] = randn(config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
        sizes = [group.height_px, group.width_px, 0, 0, group.height_px, group.width_px]
        optional["time_ids"] = torch.tensor([sizes] * num_rows, dtype=torch.float32, device=model.device)
    if model.unet.extra_channels:
        optional["extra"] = randn(model.unet.extra_channels, *cells)

    def predict(rows: range) -> Tensor:
        index = torch.tensor(list(rows), device=model.device)
        chosen = {name: value.index_select(0, index) for name, value in optional.items()}
        output = model.unet.predict(
            latents.index_select(0, index),
            timesteps.index_select(0, index),
            contexts.index_select(0, index),
            pooled=chosen.get("pooled"),
            time_ids=chosen.get("time_ids"),
            extra=chosen.get("extra"),
        )
        return output.cpu()

    return predict
