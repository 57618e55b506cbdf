"""Commands that measure and examine images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import COMPONENTS, SettingsOptions, with_settings


@with_settings("model", "config", "lora_dir", "sampler_dir", "refiner", "device", *COMPONENTS)
def sweep(
    *,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder for the report; an existing sweep is continued.", metavar="DIR"),
    ],
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            help="Samplers, comma-separated, also learned:NAME with its own steps (default ddpm,ddim,dpmpp_2m; with "
            "--gate the model's sampler).",
            metavar="NAMES",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            help="Step counts, comma-separated (default 5,10,20,50,100; with --gate the model's default).",
            metavar="NUMBERS",
        ),
    ] = None,
    guidance: Annotated[
        str | None,
        typer.Option("--guidance", help="Guidance scales, comma-separated (default: the model's).", metavar="NUMBERS"),
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            help="Another field and its values: eta=0,0.5, lora:NAME=0-1 [5], precision=float32,int8, model=A,B; "
            "repeatable.",
            metavar="NAME=VALUES",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="Number of held-out captions of the embedded model (default 64; with --search 200), a text file with "
            "one prompt per line, a .jsonl file with a prompt field (GenEval), or a folder of .txt files (DPG-Bench).",
            metavar="N|FILE|FOLDER",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="Images per prompt in each cell (default 4; with --gate 1).", metavar="N"),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the first image; later images use the following seeds.", metavar="N")
    ] = 0,
    reference_steps: Annotated[
        int, typer.Option("--reference-steps", help="DDIM steps of the reference images.", metavar="N")
    ] = 200,
    detect: Annotated[
        str | None,
        typer.Option(
            "--detect",
            help="Differences that verdicts should detect (default exact=5,psnr_db=1; also ssim, latent_rmse and those "
            "of --measures).",
            metavar="MEASURE=DIFFERENCE,...",
        ),
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measures",
            help="Further measures and the folders of their weights: clip_score, pick_score, hps_v2, image_reward, "
            "lpips; repeatable.",
            metavar="NAME=FOLDER,...",
        ),
    ] = None,
    export_layout: Annotated[
        str | None,
        typer.Option(
            "--export-layout",
            help="Also write the images in the layout of a benchmark: geneval, dpg-bench or t2i-compbench.",
            metavar="NAME",
        ),
    ] = None,
    until_decided: Annotated[
        bool,
        typer.Option("--until-decided", help="Add seeds to cells with an open verdict, up to --max-images."),
    ] = False,
    max_images: Annotated[
        int, typer.Option("--max-images", help="With --until-decided: largest number of images per cell.", metavar="N")
    ] = 1024,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            "--max-minutes",
            help="With --until-decided: add no images after this time; the first ones are always completed.",
            metavar="MINUTES",
        ),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(
            "--previous",
            help="Report of an earlier sweep, from which the needed number of images is computed.",
            metavar="DIR",
        ),
    ] = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only",
            help="Only print the cost and the differences that can be detected; with --search the memory.",
        ),
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Learn samplers with --steps evaluations instead; see below.")
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            help="Compare precisions instead, such as float32:bfloat16,int8; exit code 3 if one fails.",
            metavar="REFERENCE:CANDIDATES",
        ),
    ] = None,
    gate_exact: Annotated[
        float | None,
        typer.Option(
            "--gate-exact", help="Largest allowed loss of exact prompt match, in percentage points.", metavar="POINTS"
        ),
    ] = None,
    gate_psnr: Annotated[
        float | None, typer.Option("--gate-psnr", help="Smallest allowed mean PSNR.", metavar="DB")
    ] = None,
    gate_frechet: Annotated[
        float | None, typer.Option("--gate-frechet", help="Largest allowed Frechet distance.", metavar="NUMBER")
    ] = None,
    settings: SettingsOptions,
) -> int:
    """Compare samplers and step counts on the same prompts and seeds.

    Each cell (sampler, number of steps, guidance, values of --axis) generates the same prompts from the same seeds.
    Every image is compared with its prompt and with the converged image of its seed; the images of each cell are also
    compared with reference scenes. DIR receives report.html, report.md, overview.png, cells.csv, report.json and plots.

    Numbers may be ranges as in A1111: 10-50 (+10) counts in steps of 10, 1-3 [5] takes 5 values. A field of a request
    can be an axis: --axis spacing=leading,trailing --axis guidance_interval=0-1,0.2-0.8 --axis "cache_interval=1-3".

    --axis precision=float32,bfloat16,int8 and --axis model=embedded,embedded-turbo,NAME=PATH open one engine after the
    other. Converged images are generated in the first precision, and for every model; without --guidance each model
    uses its own default. With --refiner, --axis switch_at=0.6-0.9 [4] varies when the refiner takes over.

    Before it starts, the sweep states which differences the images can detect (80 % power, 5 % level), and how many
    are needed for those of --detect. With --until-decided, verdicts are looked at after 1, 2, 4, ... times --seeds
    images of each prompt, with bounds that keep the level of 5 % over all looks; decided cells get no more images.

    Ctrl-C keeps finished images; the same command continues. More samplers or steps extend the report. The defaults
    generate 4,096 images, about 35 minutes with the embedded model on two cores.

    --measures clip_score=FOLDER,lpips=FOLDER adds measures by networks, whose weights are safetensors on disk: a CLIP
    model (clip_score, pick_score, hps_v2), ImageReward, or a backbone for an LPIPS-like distance. With --export-layout,
    the folder of each cell below DIR is what the benchmark's own evaluation script reads.

    With --gate, the cells are generated in every named precision and compared with the first one. Exact prompt match,
    PSNR and Frechet distance must stay within the limits. DIR receives gate.md, gate.json and gate.png. The exit code
    is 0 if every candidate passes and 3 if one fails. Exact prompt match is only measured for images of the embedded
    model; --gate-exact with another model is an error.

    With --search, a sampler is learned for every number of --steps: timesteps and coefficients are chosen so that
    images come close to converged ones at one guidance scale. Training, validation and test prompts differ. DIR
    receives MODEL-STEPS.json for each. A server with --sampler-dir DIR runs it for requests with the sampler
    learned:MODEL-STEPS. The needed memory is stated first, before weights are loaded.

    Example: diffserve sweep --samplers ddim,dpmpp_2m --steps 5,10,20 --prompts 8 --seeds 1 -o report
    """
    from diffserve.cli.sweep import SweepOptions, run

    if prompts is None:
        prompts = "200" if search else "64"
    options = SweepOptions(
        samplers=samplers, steps=steps, guidance=guidance, prompts=prompts, num_seeds=seeds, first_seed=seed,
        reference_steps=reference_steps, output=output, axes=tuple(axes or ()), detect=detect,
        until_decided=until_decided, max_images=max_images, max_minutes=max_minutes, previous=previous,
        plan_only=plan_only, measures=tuple(measures or ()), export_layout=export_layout,
    )  # fmt: skip
    if not until_decided and max_minutes is not None:
        raise InvalidRequest("--max-minutes needs --until-decided; add it, or leave --max-minutes out.")
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise InvalidRequest(f"--max-minutes is {max_minutes:g}; it must be a positive number.", param="max_minutes")
    if (search or gate is not None) and (measures or export_layout is not None):
        raise InvalidRequest("--measures and --export-layout are for sweeps; leave them out with --search and --gate.")
    if search:
        from diffserve.cli.sampler_search import run as run_search

        if gate or samplers or seeds is not None or axes or detect or until_decided or previous:
            raise InvalidRequest(
                "--search takes --steps, --guidance, --prompts, --seed and --plan-only; leave out other options of a "
                "sweep or gate."
            )
        return run_search(options, settings)
    limits = {"exact_points": gate_exact, "psnr_db": gate_psnr, "frechet": gate_frechet}
    if gate is not None:
        if until_decided or plan_only:
            raise InvalidRequest("--until-decided and --plan-only are for sweeps; leave them out with --gate.")
        from diffserve.cli.gate import GateOptions
        from diffserve.cli.gate import run as run_gate

        return run_gate(GateOptions(gate, **limits), options, settings)
    if any(value is not None for value in limits.values()):
        raise InvalidRequest(
            "--gate-exact, --gate-psnr and --gate-frechet need --gate; add --gate REFERENCE:CANDIDATES."
        )
    return run(options, settings)


@with_settings("model", "config", "sampler_dir", "device", *COMPONENTS)
def calibrate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Profile to write (default configs/quality/MODEL.toml).", metavar="FILE"),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time budget.", metavar="MINUTES")] = 10.0,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            help="Largest number of held-out captions of the embedded model, or a text file with one prompt per line.",
            metavar="N|FILE",
        ),
    ] = "96",
    seeds: Annotated[int, typer.Option("--seeds", help="Images per prompt of the exact match.", metavar="N")] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing profile.")] = False,
    settings: SettingsOptions,
) -> int:
    """Measure quality against time on this machine, and write what the quality words mean for a model.

    Samplers, step counts, DeepCache, guidance intervals and the learned samplers of the model are timed and compared
    with converged images. max is the closest setting. auto is the fastest whose exact prompt match is equivalent to
    that of max within 5 points and that takes at most half of its time, or for prompts that cannot be checked the knee
    of the front of PSNR against seconds. draft, standard and fine are points of the same front.

    FILE is a quality profile: requests to a model with these weights that give a quality, and neither sampler nor
    steps, run at its point. FILE with the ending .json has all measurements. The command takes about --minutes, and
    longer if they do not suffice for 4 prompts.

    Example: diffserve calibrate --model embedded --minutes 10 -o embedded.toml
    """
    from diffserve.cli.calibrate import run

    return run(settings, output=output, minutes=minutes, prompts=prompts, num_seeds=seeds, overwrite=overwrite)


def verify(
    files: Annotated[list[Path], typer.Argument(help="Image files: PNG, JPEG or WebP.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all details, one line of JSON per file.")] = False,
) -> int:
    """Report for each FILE whether it is marked as AI-generated.

    Exit code 0: all files are marked; 1: a file is not marked; 2: a file cannot be read.
    """
    from diffserve.cli.verify import run

    return run(files, as_json=as_json)
