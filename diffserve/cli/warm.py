"""``diffserve warm``: compile the UNet for the sizes that are painted, prove it, and say what it saves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from diffserve.config import Settings
from diffserve.errors import ConfigError
from diffserve.sizes import parse_size, plan_size

if TYPE_CHECKING:
    from diffserve.engine.image.engine import Engine
    from diffserve.engine.image.shape_groups import Groups
    from diffserve.engine.image.task import GroupKey


def run(settings: Settings, sizes: Sequence[str], *, has_loras: bool = False) -> int:
    """Compile for each of ``sizes`` ("WIDTHxHEIGHT"; none: the model's own); 0 where all are faster for it, else 1.

    ``has_loras``: for pictures with any adapter of the folder, too.

    Raises InvalidRequest for a size, and ConfigError where nothing can be compiled.
    """
    asked = [parse_size(size) for size in sizes]
    from diffserve.engine.image.compiling import compile_group
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
    ranks = engine.runners.loras.ranks() if has_loras else ()
    for group in _groups_of(engine, asked, ranks):
        wanted = groups.sizes_to_compile(group)
        started_s = time.monotonic()
        with console.status("") as status:

            def told(num_rows: int = 0) -> None:
                left = [size for size in wanted if size > num_rows]  # noqa: B023
                if left:
                    say(f"{_name(group)}: compiling for {left[0]} rows, {len(left)} of {len(wanted)} to go")  # noqa: B023

            say = status.update if console.is_terminal else console.print
            told()
            compile_group(engine.model, engine.runners.conditioner, packages, group, wanted, told)
            say(f"{_name(group)}: proving")
            is_faster = _prove(groups, group)
        num_slow += not is_faster
        slower = "not faster, so not used"
        if groups.compiled.is_doubted(group._replace(is_compiled=True)):
            slower = "not clearly faster beside other work, so not used until it is seen to be"
        said = "used from now on" if is_faster else slower
        console.print(f"{_name(group)}: {said} ({time.monotonic() - started_s:.0f} s)")
        console.print(_table(groups, group, wanted))
    return min(num_slow, 1)


def _groups_of(engine: Engine, asked: Sequence[tuple[int, int] | None], ranks: Sequence[int]) -> Iterator[GroupKey]:
    plans = [plan_size(engine.info, size) for size in asked if size is not None]
    sizes = [(plan.paint_width_px, plan.paint_height_px) for plan in plans] or engine.info.good_sizes[:1]
    for width_px, height_px in dict.fromkeys(sizes):
        group = engine.runners.group_of_short_prompts(width_px, height_px)
        yield from (group._replace(lora_rank=rank) for rank in (0, *ranks))


def _prove(groups: Groups, group: GroupKey) -> bool:
    compiled = group._replace(is_compiled=True)
    groups.learn(group)
    groups.compiled.forget(compiled)  # it was looked for before there was any
    if groups.best(group) == group:  # proven before, or to be proven now
        while groups.study(compiled):
            pass
    return groups.best(group) != group


def _table(groups: Groups, group: GroupKey, sizes: Sequence[int]) -> Table:
    table = Table("rows", "network, ms a row", "compiled, ms a row", "ratio", box=None)
    network = groups.known(group).curve
    best = groups.best(group)
    for size in sizes:
        before = network.total_s(size) / size
        after = groups.known(best).curve.total_s(size) / size if best != group else float("nan")
        table.add_row(str(size), f"{1e3 * before:.1f}", f"{1e3 * after:.1f}", f"{before / after:.2f}")
    return table


def _name(group: GroupKey) -> str:
    size = f"{group.width_px}x{group.height_px}"
    return f"{size} with adapters of rank {group.lora_rank}" if group.lora_rank else size
