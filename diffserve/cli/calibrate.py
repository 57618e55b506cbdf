"""``diffserve calibrate``: measures quality against time and writes the quality profile of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from diffserve.api.errors import InvalidRequest
from diffserve.cli.generate import open_engine
from diffserve.cli.options import SettingsOptions
from diffserve.cli.sweep import check_texts, lasting_interrupt, make_progress
from diffserve.experiments.axes import quote, whole_numbers, write_settings
from diffserve.experiments.plan import MAX_PROMPTS
from diffserve.experiments.prompts import held_out_prompts, read_prompts
from diffserve.experiments.store import refuse_folder, write_whole
from diffserve.experiments.verdicts import LEAST_SEEDS
from diffserve.settings.layers import AUTO_PROFILE, configs_dir, profile_path

if TYPE_CHECKING:
    from diffserve.experiments.calibration import Calibration, MeasuredCell

MAX_MINUTES: Final = 10_000.0


def run(
    sources: SettingsOptions, *, output: Path | None, minutes: float, prompts: str, num_seeds: int, overwrite: bool
) -> int:
    """Measure, write FILE.toml and its data FILE.json, print the points, and return the exit code.

    Raises:
        DiffserveError: The user made an error; it is raised before anything is generated.
    """
    if not 0 < minutes <= MAX_MINUTES:
        raise InvalidRequest(
            f"--minutes is {minutes:g}; it must be above 0 and at most {MAX_MINUTES:g}.", param="minutes"
        )
    if num_seeds < LEAST_SEEDS:
        raise InvalidRequest(f"--seeds is {num_seeds}; verdicts need at least {LEAST_SEEDS} per prompt.", param="seeds")
    texts = _read_prompts(prompts)
    settings = sources.load()
    file = output or configs_dir() / "quality" / f"{Path(settings.model.model_id).name}.toml"
    _check_output(file, overwrite=overwrite)
    check_texts(texts, settings)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {settings.model.path}"):
        engine = open_engine(settings)
    from diffserve.experiments.calibrate import calibrate

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    with make_progress(console) as progress, lasting_interrupt() as check:
        bar = progress.add_task("timing", total=None)

        def show(phase: str, num_done: int, total: int) -> None:
            check()
            progress.update(bar, description=phase, completed=num_done, total=total)

        calibration = calibrate(engine, texts, minutes=minutes, num_seeds=num_seeds, on_note=say, on_progress=show)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    write_whole(file.with_suffix(".json"), data + b"\n")
    write_whole(file, calibration.profile().to_toml().encode())
    for line in _lines(calibration):
        print(line)
    print(file)
    if profile_path(AUTO_PROFILE, settings.model.model_id) != file:
        print(f'to use it, set quality_profile = "{file}" in the table [model] of the configuration')
    return 0


def _read_prompts(text: str) -> tuple[str, ...]:
    """Return the prompts of a file, or the first held-out captions of the embedded model. Raises InvalidRequest."""
    if not text.strip().removeprefix("-").isdecimal():
        prompts = read_prompts(Path(text))
    else:
        (count,) = whole_numbers(text.strip(), "--prompts")
        prompts = held_out_prompts(max(0, min(count, MAX_PROMPTS + 1)))
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        message = f"--prompts is {quote(text)}; give 1 to {MAX_PROMPTS} prompts."
        raise InvalidRequest(message, param="prompts")
    return prompts


def _check_output(file: Path, *, overwrite: bool) -> None:
    """Check that the profile and its data can be written. Raises InvalidRequest."""
    if file.suffix != ".toml":
        raise InvalidRequest(f"--output is {str(file)!r}; give a name that ends in .toml.", param="output")
    for path in (file, file.with_suffix(".json")):
        if path.exists() and not overwrite:
            raise InvalidRequest(f"{str(path)!r} exists; add --overwrite, or give another --output.", param="output")
    refuse_folder(file.parent, ())


def _lines(calibration: Calibration) -> Iterator[str]:
    """Yield a table of the points, and how auto compares with max."""
    from diffserve.experiments.calibration import choose

    cell_by_word = choose(calibration.cells)
    rows = [("quality", "setting", "seconds", "PSNR", "exact match", "against max")]
    for name, each in sorted(cell_by_word.items(), key=lambda item: item[1].seconds):
        rows.append((name, _setting(each), f"{each.seconds:.3f}", f"{each.psnr_db:.1f} dB", *_exact(each)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    share = cell_by_word["auto"].seconds / cell_by_word["max"].seconds
    yield f"auto takes {100 * share:.0f} % of the time of max"
    yield calibration.measure


def _setting(each: MeasuredCell) -> str:
    return f"{each.cell.sampler} {each.cell.num_steps}{write_settings(each.cell.settings)}"


def _exact(each: MeasuredCell) -> tuple[str, str]:
    if each.exact is None:
        return "", ""
    difference = ""
    if each.difference is not None and each.difference.low is not None and each.difference.high is not None:
        low, high = 100 * each.difference.low, 100 * each.difference.high
        difference = f"{100 * each.difference.value:+.1f} points ({low:.1f} to {high:.1f}): {each.verdict}"
    return f"{100 * each.exact.value:.1f} %", difference
