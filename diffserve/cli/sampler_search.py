"""``diffserve sweep --search``: learns samplers for a model and writes their files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import SettingsOptions
from diffserve.cli.start import import_libraries
from diffserve.cli.sweep import SweepOptions, check_texts, lasting_interrupt
from diffserve.disk_cache import DiskCache
from diffserve.experiments.axes import numbers, whole_numbers
from diffserve.experiments.prompts import held_out_prompts, read_prompts
from diffserve.experiments.store import refuse_folder, write_whole
from diffserve.settings.config import Settings

if TYPE_CHECKING:
    from diffserve.experiments.search.sampler_search import SearchProgress

MAX_ROWS: Final = 50
"""Largest number of evaluations of a search; gradients pass through all of them."""

MIN_PROMPTS: Final = 5
UNSEEN: Final = 200
"""Number of first held-out captions that a search leaves to sweeps and gates."""

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


def run(options: SweepOptions, sources: SettingsOptions) -> int:
    """Search a table for every number of steps, write DIR/NAME.json for each, and return the exit code.

    With ``plan_only`` it only states the memory, which is computed from the shapes of the weights.

    Raises:
        DiffserveError: The user made an error; it is raised before the model is loaded.
    """
    settings = sources.load()
    steps, guidance_scale, prompts = _check(options, settings)
    refuse_folder(options.output, ())
    files = [options.output / f"{settings.model.model_id}-{num_rows}.json" for num_rows in steps]
    existing = [str(file) for file in files if file.exists()]
    if existing:
        raise InvalidRequest(f"{existing[0]} exists; give another folder, or remove it.", param="output")
    check_texts(prompts, settings)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_libraries()
    from diffserve.engine.loading import load_for
    from diffserve.experiments.search.sampler_search import Memory, SamplerSearch, SearchPlan
    from diffserve.runtime import choose_for, load_model

    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    profile = settings.model
    if profile.dtype == "auto":
        profile = msgspec.structs.replace(profile, dtype="float32")
    cache = DiskCache.at(settings.engine.cache_dir)
    device = choose_for(profile.path, profile.device, profile.dtype, settings.engine.offload, cache).device
    outline = load_model(profile.path, device="meta", dtype=profile.dtype, profile=profile)
    memory = Memory.of(outline, SearchPlan.batch, device)
    for num_rows in steps:
        say(memory.describe(num_rows))
    if options.plan_only:
        return 0
    model = load_for(profile, settings.engine, cache)
    plan = SearchPlan.split(prompts, guidance_scale, first_seed=options.first_seed + SearchPlan.first_seed)
    search = SamplerSearch(model, plan)
    with lasting_interrupt() as check:

        def show(now: SearchProgress) -> None:
            check()
            say(now.describe())

        search.prepare(check)
        for num_rows, file in zip(steps, files, strict=True):
            started_s = time.monotonic()
            learned = search.run(num_rows, file.stem, show)
            options.output.mkdir(parents=True, exist_ok=True)
            write_whole(file, learned.to_json().encode())
            after, before = learned.measured["psnr_db"], learned.measured["start_psnr_db"]
            gain = f"{after:.2f} dB on test prompts, DPM++ 2M {before:.2f} dB"
            print(f"{file}  {gain}; {time.monotonic() - started_s:.0f} s")
    return 0


def _check(options: SweepOptions, settings: Settings) -> tuple[tuple[int, ...], float, tuple[str, ...]]:
    """Return numbers of steps, guidance scale and prompts. Raises InvalidRequest."""
    if options.steps is None:
        raise InvalidRequest("--search needs --steps, the network evaluations to learn, such as 5.", param="steps")
    steps = tuple(dict.fromkeys(whole_numbers(options.steps, "--steps")))
    for count in steps:
        if not 1 <= count <= MAX_ROWS:
            raise InvalidRequest(f"--steps has {count}; a search takes 1 to {MAX_ROWS} evaluations.", param="steps")
    if settings.model.dtype not in DTYPES:
        message = f"dtype is {settings.model.dtype!r}; quantized networks have no gradients: give float32 or bfloat16."
        raise InvalidRequest(message, param="dtype")
    default = (settings.model.guidance_scale,)
    scales: tuple[float, ...] = default if options.guidance is None else numbers(options.guidance, "--guidance")
    if len(scales) != 1 or not 1.0 <= scales[0] <= 100.0:
        message = f"--guidance is {options.guidance!r}; a search takes one scale from 1 to 100."
        raise InvalidRequest(message, param="guidance")
    return steps, scales[0], _prompts(options.prompts.strip())


def _prompts(text: str) -> tuple[str, ...]:
    """Return different prompts: held-out captions that sweeps do not use by default, or those of a file."""
    if text.isdecimal():
        (count,) = whole_numbers(text, "--prompts")
        prompts: Sequence[str] = held_out_prompts(UNSEEN + min(count, 10_000))[UNSEEN:]
    else:
        prompts = read_prompts(Path(text))
    distinct = tuple(dict.fromkeys(prompts))
    if len(distinct) < MIN_PROMPTS:
        message = f"--prompts has {len(distinct)} different prompts; a search needs at least {MIN_PROMPTS}."
        raise InvalidRequest(message, param="prompts")
    return distinct
