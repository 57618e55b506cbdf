"""``diffserve prune``: removes heads and channels of a UNet and reports the new size and cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from diffserve.settings.config import Settings

if TYPE_CHECKING:
    from diffserve.runtime.footprint import Footprint


def run(settings: Settings, output: Path, *, heads: float, channels: float) -> int:
    """Write a pruned copy of the model to ``output`` and print a comparison.

    Args:
        settings: Settings with the model.
        output: Folder to create.
        heads: Share of attention heads to remove from every layer.
        channels: Share of feed-forward inner channels to remove from every layer.

    Raises:
        ConfigError: A share is out of range, the folder exists, or the model cannot be loaded.
    """
    from diffserve.runtime import choose_for
    from diffserve.runtime.footprint import footprint_of
    from diffserve.runtime.loading.pruned import prune_directory
    from diffserve.runtime.unet.pruning import Shares

    shares = Shares(heads=heads, channels=channels)
    profile = settings.model
    dtype = choose_for(profile.path, profile.device, profile.dtype).dtype
    console = Console(highlight=False, soft_wrap=True)
    prune_directory(profile.path, output, shares)
    paths = (profile.path, output)
    before, after = (
        footprint_of(path, dtype=dtype, config=settings.engine, profile=profile, rows=(1,)) for path in paths
    )
    console.print(_table(before, after))
    console.print(f"{output}: check image quality (benchmarks/bench_pruning.py) before use", markup=False)
    return 0


def _table(before: Footprint, after: Footprint) -> Table:
    width_px, height_px = before.model.info.good_sizes[0]
    table = Table("UNet", "before", "after", "ratio", box=None)
    old, new = (
        next(part for part in footprint.model.memory_report() if part.component == "unet")
        for footprint in (before, after)
    )
    flops = f"GFLOP per row at {width_px}x{height_px}"
    for name, unit, was, is_now in (
        ("million parameters", 1e6, old.num_parameters, new.num_parameters),
        (f"MiB in {before.model.choice.dtype}", 2**20, old.weights_bytes, new.weights_bytes),
        (flops, 1e9, before.steps[1].flops, after.steps[1].flops),
    ):
        table.add_row(name, f"{was / unit:.2f}", f"{is_now / unit:.2f}", f"{is_now / was:.3f}")
    return table
