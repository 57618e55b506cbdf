"""The commands and their options. Nothing heavy is imported before a command runs: ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffserve.cli.start import end_soon, own_process
from diffserve.errors import DiffserveError, InvalidRequest
from diffserve.version import __version__

if TYPE_CHECKING:
    from diffserve.config import Flag

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""The base of every usage error, wherever this typer keeps its click."""

app = typer.Typer(
    name="diffserve",
    help="Paint pictures from text, or serve those who want to.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _names_in(module: str, table: str) -> Callable[[str], list[str]]:
    """Completes to the names in a ``table`` of a ``module``."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in getattr(import_module(module), table) if name.lower().startswith(incomplete.lower())]

    return complete


_models = _names_in("diffserve.config", "PROFILES")
_samplers = _names_in("schedulers", "SAMPLERS")
_qualities = _names_in("diffserve.quality", "QUALITIES")
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="embedded, embedded-turbo, sd15, sdxl, a diffusers folder or a .safetensors file.",
        metavar="MODEL",
        autocompletion=_models,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="A TOML file, or embedded, embedded-turbo, sd15, sdxl, edge.", metavar="FILE"),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:0 or mps.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, bfloat16, float16, int8, int8_dynamic, int8_static or float8."),
]
OffloadOption = Annotated[
    str | None, typer.Option("--offload", help="Where weights rest between uses: none, auto, cpu or disk.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. A user's mistake is one line on standard error and exit code 2.

    ``arguments``: of a caller who goes on afterwards; None: the shell's, and the process is the command's own.
    """
    if arguments is None:
        own_process()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="diffserve", standalone_mode=False)
    except DiffserveError as error:
        code = _refuse(error.message)
    except OSError as error:  # a name too long, a folder that may not be read, a full disk
        code = _refuse(f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}.")
    except MemoryError:
        code = _refuse("there is not enough memory (see ulimit -v, and free).")
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except _ClickException as error:
        code = _refuse(error.format_message() if hasattr(error, "format_message") else str(error))
    end_soon()
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> int:
    print(f"diffserve: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Paint pictures from text, or serve those who want to."""
    if version:
        print(f"diffserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    prompt: Annotated[
        list[str], typer.Argument(help="What to paint, in quotes; - reads standard input.", metavar="PROMPT")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write (.png .jpg .webp), a folder, or - for standard output; the prompt names it else.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there; otherwise the next free number is taken.")
    ] = False,
    model: ModelOption = None,
    quality: Annotated[
        str | None,
        typer.Option("--quality", help="draft, standard or fine: how many steps.", autocompletion=_qualities),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", help="For example dpmpp_2m or 'Euler a'.", autocompletion=_samplers)
    ] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="Weight of the prompt; 1: none.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same picture; -1: any.")] = None,
    negative: Annotated[str, typer.Option("--negative", help="What should not be in the picture.")] = "",
    size: Annotated[str, typer.Option("--size", help="For example 512x512; auto: native.", metavar="WxH")] = "auto",
    num_images: Annotated[int, typer.Option("-n", help="How many; image i has seed + i.", metavar="N")] = 1,
    eta: Annotated[float | None, typer.Option("--eta", help="Fresh noise in ddim and euler_a, 0 to 1.")] = None,
    guidance_interval: Annotated[
        tuple[float, float],
        typer.Option("--guidance-interval", help="Part of the steps that is guided.", metavar="FROM TO"),
    ] = (0.0, 1.0),
    cache_interval: Annotated[
        int,
        typer.Option(
            "--cache-interval", help="The whole UNet at every so many-th evaluation (DeepCache); 1: each.", metavar="N"
        ),
    ] = 1,
    token_merging: Annotated[
        float,
        typer.Option("--token-merging", help="Share of tokens merged in self-attention, 0 to 0.75.", metavar="SHARE"),
    ] = 0.0,
    similarity_threshold: Annotated[
        float | None,
        typer.Option(
            "--similarity-threshold",
            help="Begin from a kept picture of so similar a prompt, above 0 to 1.",
            metavar="COSINE",
        ),
    ] = None,
    noise_source: Annotated[
        str | None,
        typer.Option("--noise-source", help="cpu, or device: CUDA's numbers (A1111: NV).", metavar="SOURCE"),
    ] = None,
    init: Annotated[Path | None, typer.Option("--init", help="Start from this picture.", metavar="IMAGE")] = None,
    strength: Annotated[
        float | None, typer.Option("--strength", help="How much of --init is repainted, 0 to 1 (0.75).")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option("--mask", help="White (or transparent) is repainted; needs --init.", metavar="IMAGE")
    ] = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
) -> int:
    """Paint PROMPT into a file and say its seed, the time of a step and where it lies."""
    from diffserve.cli.generate import GenerateArguments, run
    from diffserve.cli.prompts import one_text

    order = GenerateArguments(
        prompt=one_text(prompt, command="generate"), output=output, overwrite=overwrite, negative=negative, size=size,
        num_images=num_images, seed=seed, quality=quality, sampler=sampler, num_steps=steps, guidance_scale=guidance,
        further={
            "eta": eta, "guidance_interval": guidance_interval, "cache_interval": cache_interval,
            "token_merging": token_merging, "similarity_threshold": similarity_threshold, "noise_source": noise_source,
        },
        init=init, strength=strength, mask=mask,
    )  # fmt: skip
    return run(order, model=model, config=config, flags=_placement(device, dtype, offload))


@app.command()
def rewrite(
    wish: Annotated[
        list[str],
        typer.Argument(help="What you would like to see, in your own words; - reads standard input.", metavar="WISH"),
    ],
    num_prompts: Annotated[
        int, typer.Option("-n", help="How many prompts; the first is the likeliest.", metavar="N")
    ] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Show the words as they come.")] = False,
    model: Annotated[
        str, typer.Option("--model", help="embedded, or the folder of any instruct model.", metavar="DIR")
    ] = "embedded",
    style: Annotated[
        str | None, typer.Option("--style", help="embedded, tags (SD 1.x) or prose (SDXL); the model decides else.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the second prompt and those after it (0).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="auto, float32, bfloat16, float16, int8 or int4.")
    ] = None,
) -> int:
    """Rewrite WISH into prompts that an image model understands, one line each."""
    from diffserve.cli.prompts import one_text
    from diffserve.cli.rewrite import run
    from diffserve.rewrite_types import RewriteRequest
    from diffserve.types import RewriteOptions

    text = one_text(wish, command="rewrite", name="wish")
    request = RewriteRequest(wish=text, num_prompts=num_prompts, options=RewriteOptions(seed=seed), deltas=stream)
    return run(request, model, style, device=device or "auto", dtype=dtype or "auto", is_json=as_json)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0: any free one.")] = None,
    allow_open: Annotated[
        bool | None, typer.Option("--allow-open", help="Let other machines in, though there are no keys yet.")
    ] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="Where pictures lie for their URLs.")] = None,
    page: Annotated[bool | None, typer.Option("--page/--no-page", help="A page for browsers at /, or none.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
) -> int:
    """Serve the model over HTTP (OpenAI's image endpoints, and a page for browsers) until stopped."""
    from diffserve.config import Flag, load_settings
    from diffserve.service.run import serve as run
    from ui import mount_page

    flags = {
        "serve.host": Flag("--host", host),
        "serve.port": Flag("--port", port),
        "serve.allow_open": Flag("--allow-open", allow_open),
        "serve.data_dir": Flag("--data-dir", data_dir),
        "serve.page": Flag("--page/--no-page", page),
    }
    settings = load_settings(model=model, config=config, flags=flags | _placement(device, dtype, offload))
    return run(settings, mount_page=mount_page if settings.serve.page else None)


@app.command()
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
    flags = _placement(device, dtype, offload)
    given = {"exact_points": gate_exact, "psnr_db": gate_psnr, "frechet": gate_frechet}
    if gate is not None:
        from diffserve.cli.gate import GateOptions
        from diffserve.cli.gate import run as run_gate

        return run_gate(GateOptions(gate, **given), options, model=model, config=config, flags=flags)
    if any(value is not None for value in given.values()):
        raise InvalidRequest("--gate-exact, --gate-psnr and --gate-frechet limit a gate; give --gate, too.")
    return run(options, model=model, config=config, flags=flags)


@app.command()
def doctor(
    model: ModelOption = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Work out the least time of a step on this GPU, here or not: h100, l4, rtx4090..."),
    ] = None,
) -> int:
    """Say what was found: device, precision, model, the memory each part needs, and where each setting comes from."""
    from diffserve.cli.doctor import run
    from diffserve.config import load_settings

    return run(load_settings(model=model, config=config, flags=_placement(device, dtype, offload)), gpu)


@app.command()
def warm(
    model: ModelOption = None,
    config: ConfigOption = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT to compile for, perhaps several times; else the model's own.", metavar="SIZE"),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> int:
    """Compile the UNet ahead, a minute for each number of rows; kept on disk and used from then on where faster."""
    from diffserve.cli.warm import run
    from diffserve.config import load_settings

    return run(load_settings(model=model, config=config, flags=_placement(device, dtype, None)), size or [])


@app.command()
def prune(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the pruned model; there is none yet.", metavar="DIR")
    ],
    heads: Annotated[
        float, typer.Option("--heads", help="Share of the heads of every attention layer to cut.", metavar="SHARE")
    ] = 0.0,
    channels: Annotated[
        float, typer.Option("--channels", help="Share of the inner channels of every feed-forward.", metavar="SHARE")
    ] = 0.0,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> int:
    """Cut the least important heads and channels out of the UNet, into a model directory of its own.

    Shares are 0 to 0.9 of each layer, rounded down; at least one head stays. Nothing is trained: judge the pictures.
    """
    from diffserve.cli.prune import run
    from diffserve.config import load_settings

    return run(load_settings(model=model, config=config, flags={}), output, heads=heads, channels=channels)


def _placement(device: str | None, dtype: str | None, offload: str | None) -> dict[str, Flag]:
    """Where a model runs, how precisely, and where its weights rest, as options of the command line."""
    from diffserve.config import Flag

    return {
        "model.device": Flag("--device", device),
        "model.dtype": Flag("--dtype", dtype),
        "engine.offload": Flag("--offload", offload),
    }
