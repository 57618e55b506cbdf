"""Commands that judge pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import (
    ConfigOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    OffloadOption,
    TextEncoderOption,
    VAEOption,
    placement_flags,
)


def sweep(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder for the report; a sweep that is there goes on.", metavar="DIR"),
    ],
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            help="Names with commas between them (ddpm,ddim,dpmpp_2m; of a gate the model's own).",
            metavar="NAMES",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            help="Numbers with commas between them (5,10,20,50,100; of a gate the model's own).",
            metavar="NUMBERS",
        ),
    ] = None,
    guidance: Annotated[
        str | None,
        typer.Option("--guidance", help="One scale or several with commas; the model's own else.", metavar="NUMBERS"),
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            help="So many held-out captions of the embedded model, or a text file, one prompt a line.",
            metavar="N|FILE",
        ),
    ] = "64",
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Pictures of each prompt in each cell (4; of a gate 1).", metavar="N")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the first picture; the next one has the next.", metavar="N")
    ] = 0,
    reference_steps: Annotated[
        int, typer.Option("--reference-steps", help="DDIM steps that count as converged.", metavar="N")
    ] = 200,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            help="Compare precisions instead, for example float32:bfloat16,int8; exit code 3 where one fails.",
            metavar="REFERENCE:CANDIDATES",
        ),
    ] = None,
    gate_exact: Annotated[
        float | None,
        typer.Option("--gate-exact", help="Points of exact prompt match that a precision may lose.", metavar="POINTS"),
    ] = None,
    gate_psnr: Annotated[
        float | None, typer.Option("--gate-psnr", help="Mean PSNR that it must reach.", metavar="DB")
    ] = None,
    gate_frechet: Annotated[
        float | None, typer.Option("--gate-frechet", help="Frechet distance that it may have.", metavar="NUMBER")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
) -> int:
    """Paint the same pictures with every sampler and step count, and report what a step buys.

    Each cell (a sampler, a number of steps, a guidance) paints the same prompts from the same seeds. Every picture is
    held against its prompt and against the converged picture of its seed, and every cell's pictures together against
    drawn scenes. DIR gets report.html to read, report.md with overview.png to keep, cells.csv, report.json and plots.

    Ctrl-C keeps what is painted, and the same command goes on; more samplers or steps add to what is there. The
    defaults are 4,096 pictures: about 35 minutes of the embedded model on two cores.

    With --gate the cells are painted in every precision that it names, and held against the first one's pictures:
    exact prompt match, PSNR and Frechet distance must keep to the limits. DIR gets gate.md, gate.json and gate.png;
    the exit code is 0 where every candidate passes and 3 where one fails.

    A small one: diffserve sweep --samplers ddim,dpmpp_2m --steps 5,10,20 --prompts 8 --seeds 1 -o report
    """
    from diffserve.cli.sweep import SweepOptions, run

    options = SweepOptions(
        samplers=samplers, steps=steps, guidance=guidance, prompts=prompts, num_seeds=seeds, first_seed=seed,
        reference_steps=reference_steps, output=output,
    )  # fmt: skip
    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder)
    given = {"exact_points": gate_exact, "psnr_db": gate_psnr, "frechet": gate_frechet}
    if gate is not None:
        from diffserve.cli.gate import GateOptions
        from diffserve.cli.gate import run as run_gate

        return run_gate(GateOptions(gate, **given), options, model=model, config=config, flags=flags)
    if any(value is not None for value in given.values()):
        raise InvalidRequest("--gate-exact, --gate-psnr and --gate-frechet limit a gate; give --gate, too.")
    return run(options, model=model, config=config, flags=flags)


def verify(
    files: Annotated[list[Path], typer.Argument(help="Pictures: PNG, JPEG or WebP.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, a line of JSON a file.")] = False,
) -> int:
    """Say of each FILE whether it says that a machine painted it. Exit code 1: of one of them nothing says so; 2: one
    cannot be read."""
    from diffserve.cli.verify import run

    return run(files, as_json=as_json)
