"""``diffserve warm``: compiles the UNet for given image sizes, validates it and reports the speedup."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from diffserve.api.errors import ConfigError
from diffserve.api.sizes import parse_size, plan_size
from diffserve.api.types import UNetPath
from diffserve.disk_cache import DiskCache
from diffserve.settings.config import Settings
from diffserve.store.unet_paths import UNetPathFile

if TYPE_CHECKING:
    from diffserve.engine.image.engine import Engine
    from diffserve.engine.image.shape_groups import Groups
    from diffserve.engine.image.task import GroupKey


def run(settings: Settings, sizes: Sequence[str], *, has_loras: bool = False) -> int:
    """Compile the UNet for ``sizes`` and return 0 if every size is faster compiled, else 1.

    A server whose data folder has stored UNet paths uses the new ones from its next start.

    Args:
        settings: Settings with the model and the data folder.
        sizes: Image sizes as "WIDTHxHEIGHT". Empty: the native size of the model.
        has_loras: Whether to compile also for images with LoRA adapters of the folder.

    Raises:
        InvalidRequest: A size is invalid.
        ConfigError: Compilation is not possible.
    """
    requested = [parse_size(size) for size in sizes]
    from diffserve.engine.image.compiling import COMPILED, PLAIN, PathChoice, compile_group, path_key, path_of
    from diffserve.engine.image.engine import Engine

    console = Console(highlight=False, soft_wrap=True)
    profile = settings.model
    engine = Engine.from_pretrained(
        profile.path,
        dtype=profile.dtype,
        device=profile.device,
        profile=profile,
        config=replace(settings.engine, compile="warm"),
    )
    engine.warm_up()
    groups = engine.runners.groups
    packages = groups.compiled.packages
    assert packages is not None
    if packages.reason:
        raise ConfigError(f"nothing can be compiled: {packages.reason}.", param="compile")
    num_slow = 0
    paths: list[UNetPath] = []
    ranks = engine.runners.loras.ranks() if has_loras else ()
    for group in _groups_of(engine, requested, ranks):
        batch_sizes = groups.sizes_to_compile(group)
        started_s = time.monotonic()
        with console.status("") as status:

            def report_progress(num_rows: int = 0) -> None:
                left = [size for size in batch_sizes if size > num_rows]  # noqa: B023
                if left:
                    show(f"{_name(group)}: compiling for {left[0]} rows, {len(left)} of {len(batch_sizes)} left")  # noqa: B023

            show = status.update if console.is_terminal else console.print
            report_progress()
            if engine.model.device.type == "cuda":
                _compile_in_children(engine, group, batch_sizes, report_progress)
            else:
                compile_group(engine.model, engine.runners.conditioner, packages, group, batch_sizes, report_progress)
            show(f"{_name(group)}: measuring")
            is_faster = _prove(groups, group)
        num_slow += not is_faster
        key = path_key(engine.model, packages, settings.engine.compile)
        reason = f"packages by {packages.compiler_name}, compiled by diffserve warm"
        choice = (
            PathChoice(COMPILED, reason) if is_faster else PathChoice(PLAIN, "measured as not faster by diffserve warm")
        )
        paths.append(path_of(key, group, choice))
        status_text = "used from the next start" if is_faster else "not faster, not used"
        console.print(f"{_name(group)}: {status_text} ({time.monotonic() - started_s:.0f} s)")
        console.print(_table(groups, group, batch_sizes))
    stored = UNetPathFile(Path(settings.serve.data_dir).expanduser())
    if stored.exists():
        stored.store(paths, overwrite=True)
    if engine.model.device.type == "cuda":
        _compile_decoder(engine, requested, console)
    return min(num_slow, 1)


def _compile_in_children(
    engine: Engine, group: GroupKey, sizes: Sequence[int], report_progress: Callable[[int], None]
) -> None:
    """Compile the calls of ``group`` in child processes, each of which also runs the result once.

    Args:
        engine: Engine with the model.
        group: Image size and other properties that the compiled call depends on.
        sizes: Numbers of rows to compile for.
        report_progress: Called with each finished number of rows.

    Raises:
        ConfigError: A child process fails or crashes.
    """
    from diffserve.engine.image.compiling import BUILD_TIMEOUT_S, CompileError, compile_in_child

    for num_rows in sizes:
        try:
            compile_in_child(engine.model, engine.config, group, (num_rows,), BUILD_TIMEOUT_S)
        except CompileError as error:
            raise ConfigError(f"the UNet was not compiled: {error}.", param="compile") from error
        report_progress(num_rows)


def _compile_decoder(engine: Engine, sizes: Sequence[tuple[int, int] | None], console: Console) -> None:
    """Compile the VAE decoder for ``sizes``, and print the measured speedup or the error of each."""
    from diffserve.runtime.vae.compiled import DecoderPackages

    vae = engine.model.vae
    packages = DecoderPackages(vae, DiskCache.at(engine.config.cache_dir))
    for width_px, height_px in _sizes_of(engine, sizes):
        name = f"VAE at {width_px}x{height_px}"
        try:
            console.print(f"{name}: {packages.make(height_px // vae.factor, width_px // vae.factor)}")
        except Exception as error:  # compilers raise errors of many kinds
            console.print(f"{name}: not compiled: {str(error).partition(chr(10))[0]}")


def _sizes_of(engine: Engine, sizes: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """Return the (width, height) at which images of ``sizes`` are generated, or the native size if there are none."""
    plans = [plan_size(engine.info, size) for size in sizes if size is not None]
    painted = [(plan.paint_width_px, plan.paint_height_px) for plan in plans] or engine.info.good_sizes[:1]
    return list(dict.fromkeys(painted))


def _groups_of(engine: Engine, sizes: Sequence[tuple[int, int] | None], ranks: Sequence[int]) -> Iterator[GroupKey]:
    for width_px, height_px in _sizes_of(engine, sizes):
        group = engine.runners.group_of_short_prompts(width_px, height_px)
        yield from (group._replace(lora_rank=rank) for rank in (0, *ranks))


def _prove(groups: Groups, group: GroupKey) -> bool:
    groups.learn(group)
    return groups.prove(group._replace(is_compiled=True))


def _table(groups: Groups, group: GroupKey, sizes: Sequence[int]) -> Table:
    table = Table("rows", "eager, ms per row", "compiled, ms per row", "ratio", box=None)
    network = groups.facts_of(group).curve
    compiled = group._replace(is_compiled=True)
    best = compiled if groups.compiled.is_proven(compiled) else group
    for size in sizes:
        before = network.total_s(size) / size
        after = groups.facts_of(best).curve.total_s(size) / size if best != group else float("nan")
        table.add_row(str(size), f"{1e3 * before:.1f}", f"{1e3 * after:.1f}", f"{before / after:.2f}")
    return table


def _name(group: GroupKey) -> str:
    size = f"{group.width_px}x{group.height_px}"
    return f"{size} with adapters of rank {group.lora_rank}" if group.lora_rank else size
