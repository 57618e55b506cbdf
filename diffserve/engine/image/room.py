"""Room: limits rows of UNet calls by available memory, and refuses images that can never fit.

Running out of memory costs the call and all cached blocks on a GPU, and the process on a CPU. So rows are limited by
the memory of their call, which a dry run determines, and by what is free. If memory still runs out, because other
processes took it, ``unet_calls`` halves the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Final

from diffserve.api.bounds import check
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.buckets import NO_LIMIT
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel
from diffserve.runtime.footprint import Activations, margin
from diffserve.runtime.low_rank import adaptable, factor_bytes, shape_of
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.unet.controlnet import residual_shapes
from diffserve.runtime.vae.vae import TILE_SHARES, fitting_share, tile_cells
from diffserve.settings.config import EngineConfig

LOOK_EVERY_S: Final = 1.0
"""Between two looks at what is free."""


class Room:
    """Memory available for the calls of ``model``'s networks, created after all resident weights are loaded.

    Whether an image is refused, and whether it is encoded and decoded in one piece or in tiles, depends on the memory
    that is free at first or configured, never on other images. The number of rows is limited by what is free now, which
    changes no bytes. Without a known amount of free memory nothing is limited. Thread-safe.

    Args:
        most_rows: The largest number of rows of a call.
        planned_bytes: Memory that is free at first and will be used later, by the weights of ControlNets.
        recorded_bytes: Returns the memory of recorded calls: the part that the device reports as free, and the total.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        most_rows: int,
        clock: Callable[[], float],
        planned_bytes: int = 0,
    ) -> None:
        self.model = model
        self._config = config
        self._most_rows = most_rows
        self._clock = clock
        self._margin = margin(model)
        self._bound = Activations.at_most(model)
        self._looked_s = clock()
        self.recorded_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._now_bytes, self._first_bytes = self._look(), self._look(planned_bytes)

    @cached_property
    def activations(self) -> Activations:
        """Activation sizes from a dry run of the networks, which takes seconds at a model's first start."""
        return Activations.of(self.model, self._config, DiskCache.at(self._config.cache_dir))

    def prepare(self) -> None:
        """Run the dry run now if a large request would need it."""
        side_px = self.model.info.max_side_px
        self.decodable_cells(self._cells(side_px, side_px))
        self._rows(GroupKey(side_px, side_px, self.model.text.window_tokens), self._first_bytes)

    def rows(self, group: GroupKey) -> int:
        """Return the number of rows that fit into a call of ``group`` now, at least one."""
        if self._clock() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._clock()
            self._now_bytes = self._look()
        return max(1, self._rows(group, self._now_bytes))

    def check(
        self,
        width_px: int,
        height_px: int,
        least_rows: int,
        *,
        is_encoded: bool = False,
        is_controlled: bool = False,
        tile_px: tuple[int, int] | None = None,
    ) -> None:
        """Raise InvalidRequest for an image that can never fit, with the bytes it needs and a size that fits.

        Checked are a UNet call of ``least_rows`` rows, the smallest decoder tile and, with ``is_encoded``, the smallest
        tile of the init image. A control map takes less memory than an init image. ``tile_px`` is
        the width and height that a UNet row evaluates, if that is not the entire image.
        """
        free = self._first_bytes
        call_px = tile_px or (width_px, height_px)
        arguments = (width_px, height_px, call_px, least_rows, is_encoded or is_controlled, is_controlled)
        if free is None or self._min_bytes(self._bound, *arguments) <= free:
            return
        need = self._min_bytes(self.activations, *arguments)
        share, factor = min(1.0, free / need) ** 0.5, self.model.vae.factor
        width, height = (int(side_px * share) // factor * factor for side_px in (width_px, height_px))
        smaller = f"ask for {width}x{height} or less" if min(width, height) else "choose a smaller model"
        problem = f"{width_px}x{height_px} px takes {format_bytes(need)} of memory in addition to the weights, "
        problem += f"and {format_bytes(free)} are free"
        check(need <= free, f"{problem}: {smaller}{self._further_ways()}.", "size", "invalid_size")

    @cached_property
    def _adaptable(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights that adapters may change."""
        return tuple(shape_of(layer) for layer in adaptable(self.model.unet.network).values())

    def _further_ways(self) -> str:
        """Return alternatives to a smaller image, as a clause of the error message."""
        if self._config.activation_bytes == self._first_bytes:
            return ", or raise engine.activation_bytes"
        if self._config.offload != "none" or self.model.choice.unet_scheme is not None:
            return ""
        return f", or start with --offload {'disk' if self.model.device.type == 'cpu' else 'cpu'}"

    def _rows(self, group: GroupKey, free: int | None) -> int:
        cells = self._cells(group.width_px, group.height_px)
        rank = max(group.lora_rank, 0)  # whole changes are not stacked for a call
        factors = rank and factor_bytes(self._adaptable, rank, self.model.dtype.itemsize)

        def fitting(activations: Activations) -> int:
            row = activations.of_row(cells, group.num_tokens, is_shallow=group.is_shallow)
            if group.is_controlled or group.control:
                row += self._residual_bytes(group.width_px, group.height_px)
            return int((free or 0) / (self._margin * row + factors))

        if free is None or fitting(self._bound) >= self._most_rows:
            return NO_LIMIT
        return fitting(self.activations)

    def _min_bytes(
        self,
        activations: Activations,
        width_px: int,
        height_px: int,
        call_px: tuple[int, int],
        num_rows: int,
        is_encoded: bool,
        is_controlled: bool,
    ) -> float:
        """Return the bytes without which an image of this size, evaluated in rows of ``call_px``, is impossible."""
        factor = self.model.vae.factor
        row = activations.of_row(self._cells(*call_px), self.model.text.window_tokens)
        step = num_rows * (row + is_controlled * self._residual_bytes(*call_px))
        cells = tile_cells(height_px // factor, width_px // factor, TILE_SHARES[-1])
        cell_bytes = max(activations.picture_cell_bytes, is_encoded * activations.encoded_cell_bytes)
        return self._margin * max(step, cells * cell_bytes)

    def _residual_bytes(self, width_px: int, height_px: int) -> float:
        """Return the bytes of a row's residuals: the sum, the last ControlNet's, and the skips before and after.

        A ControlNet itself holds less than its UNet, which is deeper.
        """
        factor = self.model.vae.factor
        shapes = residual_shapes(self.model.unet.network, height_px // factor, width_px // factor)
        return 3.0 * self.model.dtype.itemsize * sum(map(math.prod, shapes))

    def decodable_cells(self, num_cells: int) -> int:
        """Return how many of ``num_cells`` latent cells one call may decode."""
        free = self._first_bytes
        if free is None or self._margin * num_cells * self._bound.picture_cell_bytes <= free:
            return num_cells
        return int(free / (self._margin * self.activations.picture_cell_bytes))

    def encode_share(self, width_px: int, height_px: int) -> float:
        """Return the side of the tiles in which an image is encoded, in shares of its side; 1.0: in one piece."""
        free, cells = self._first_bytes, self._cells(width_px, height_px)
        if free is None or self._margin * cells * self._bound.encoded_cell_bytes <= free:
            return 1.0
        most_cells, factor = int(free / (self._margin * self.activations.encoded_cell_bytes)), self.model.vae.factor
        return fitting_share(height_px // factor, width_px // factor, most_cells)

    def _cells(self, width_px: int, height_px: int) -> int:
        return (width_px // self.model.vae.factor) * (height_px // self.model.vae.factor)

    def _look(self, planned_bytes: int = 0) -> int | None:
        every = [free_bytes(device) for device in self.model.choice.painting_devices]
        # the device with least memory decides
        free = min((num_bytes for num_bytes in every if num_bytes is not None), default=None)
        configured = self._config.activation_bytes
        hidden, recorded = self.recorded_bytes()
        limits = (
            None if free is None else free - planned_bytes - hidden,
            None if configured is None else configured - recorded,
        )
        left = min((limit for limit in limits if limit is not None), default=None)
        return None if left is None else max(0, left)


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
