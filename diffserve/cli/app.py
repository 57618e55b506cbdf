"""The commands and their options. Nothing heavy is imported before a command runs: ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffserve.cli.start import end_soon, own_process, refuse
from diffserve.errors import ConfigError, DiffserveError, InvalidRequest
from diffserve.version import __version__

if TYPE_CHECKING:
    from diffserve.config import Flag, Settings

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
EmbeddingsOption = Annotated[
    str | None, typer.Option("--embeddings-dir", help="Folder of learnt words (textual inversion).", metavar="DIR")
]
OffloadOption = Annotated[
    str | None, typer.Option("--offload", help="Where weights rest between uses: none, auto, cpu or disk.")
]
DeviceMapOption = Annotated[
    str | None, typer.Option("--device-map", help="One model over all GPUs: none, auto or balanced.")
]
VAEOption = Annotated[
    str | None,
    typer.Option("--vae", help="A VAE, or a model that has one, in place of the model's own.", metavar="PATH"),
]
TextEncoderOption = Annotated[
    str | None, typer.Option("--text-encoder", help="The same of the text encoder and its tokenizer.", metavar="DIR")
]
RefinerOption = Annotated[
    str | None, typer.Option("--refiner", help="A model that takes over for the last steps.", metavar="MODEL")
]
ScorerOption = Annotated[
    str | None, typer.Option("--scorer", help="What --best-of chooses by: checker, or a CLIP model.", metavar="DIR")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="DIFFSERVE_SERVER", help="A running server that does it, by its address.", metavar="URL"
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0: any free one.")]
AllowOpenOption = Annotated[
    bool | None, typer.Option("--allow-open", help="Let other machines in, though there are no keys.")
]
PageOption = Annotated[bool | None, typer.Option("--page/--no-page", help="A page for browsers at /, or none.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="As for generate, or NAME=MODEL; several: the others are loaded when requests name them.",
        metavar="MODEL",
        autocompletion=_models,
    ),
]
UnloadAfterOption = Annotated[
    float | None,
    typer.Option("--unload-after", help="Unload a model after so long without work; 0: never.", metavar="SECONDS"),
]
LoraDirOption = Annotated[
    str | None, typer.Option("--lora-dir", help="A folder of adapters that requests may name.", metavar="DIR")
]

ControlNetDirOption = Annotated[
    str | None, typer.Option("--controlnet-dir", help="A folder of ControlNets that requests may name.", metavar="DIR")
]

WatermarkOption = Annotated[
    bool | None,
    typer.Option("--watermark/--no-watermark", help="Pixels that say, unseen, that a machine painted them."),
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
        code = refuse(error.message)
    except OSError as error:  # a name too long, a folder that may not be read, a full disk
        code = refuse(f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}.")
    except MemoryError:
        code = refuse("there is not enough memory (see ulimit -v, and free).")
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except _ClickException as error:
        code = refuse(error.format_message() if hasattr(error, "format_message") else str(error))
    end_soon()
    sys.exit(code if isinstance(code, int) else 0)


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
    num_images: Annotated[
        int, typer.Option("-n", help="How many; image i has seed + i, or varied by + i.", metavar="N")
    ] = 1,
    eta: Annotated[float | None, typer.Option("--eta", help="Fresh noise in ddim and euler_a, 0 to 1.")] = None,
    guidance_interval: Annotated[
        tuple[float, float],
        typer.Option("--guidance-interval", help="Part of the steps that is guided.", metavar="FROM TO"),
    ] = (0.0, 1.0),
    prompt_syntax: Annotated[
        str, typer.Option("--prompt-syntax", help="a1111: brackets weigh words; plain: they are brackets.")
    ] = "a1111",
    clip_skip: Annotated[
        int, typer.Option("--clip-skip", help="Layers from the text encoders' end; 1: none is left out.", metavar="N")
    ] = 1,
    guidance_rescale: Annotated[
        float,
        typer.Option(
            "--guidance-rescale", help="Bring the guided output back to its unguided spread, 0 to 1.", metavar="SHARE"
        ),
    ] = 0.0,
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
    sizes: Annotated[
        str | None,
        typer.Option(
            "--micro-conditioning",
            help="Sizes SDXL is told: 'original_size 640x480 crop 0x0 target_size 1024x1024', and negative_ ones.",
            metavar="SIZES",
        ),
    ] = None,
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
    variation_strength: Annotated[
        float,
        typer.Option("--variation-strength", help="Vary the picture: other noise mixed in, 0 to 1.", metavar="SHARE"),
    ] = 0.0,
    variation_seed: Annotated[
        int | None,
        typer.Option("--variation-seed", help="Of that noise: image i has it + i, all the same --seed; -1: any."),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", help="An adapter of --lora-dir, and how much of it; several.", metavar="NAME:SCALE"),
    ] = None,
    controlnet: Annotated[
        list[str] | None,
        typer.Option(
            "--controlnet",
            help="One of --controlnet-dir, its picture, how much (1), canny for edges, when (0-1), resize; several.",
            metavar="NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize]",
        ),
    ] = None,
    switch_at: Annotated[
        float | None, typer.Option("--switch-at", help="Where --refiner takes over, 0 to 1 (0.8).", metavar="SHARE")
    ] = None,
    best_of: Annotated[
        int | None, typer.Option("--best-of", help="Paint so many and keep the best, -n of them.", metavar="N")
    ] = None,
    init: Annotated[Path | None, typer.Option("--init", help="Start from this picture.", metavar="IMAGE")] = None,
    strength: Annotated[
        float | None, typer.Option("--strength", help="How much of --init is repainted, 0 to 1 (0.75).")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option("--mask", help="White (or transparent) is repainted; needs --init.", metavar="IMAGE")
    ] = None,
    watermark: WatermarkOption = None,
    config: ConfigOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    refiner: RefinerOption = None,
    scorer: ScorerOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    embeddings_dir: EmbeddingsOption = None,
    server: ServerOption = None,
) -> int:
    """Paint PROMPT into a file and say its seed, the time of a step and where it lies."""
    from diffserve.cli.generate import GenerateArguments, run
    from diffserve.cli.prompts import one_text
    from diffserve.config import Flag
    from diffserve.controlnets import read_control
    from diffserve.loras import Lora
    from diffserve.micro_conditioning import MicroConditioning
    from diffserve.prompt_syntax import in_a1111
    from diffserve.types import SWITCH_AT

    order = GenerateArguments(
        prompt=in_a1111(one_text(prompt, command="generate"), prompt_syntax), output=output, overwrite=overwrite,
        negative=in_a1111(negative, prompt_syntax), size=size,
        num_images=num_images, seed=seed, quality=quality, sampler=sampler, num_steps=steps, guidance_scale=guidance,
        further={
            "eta": eta, "guidance_interval": guidance_interval, "guidance_rescale": guidance_rescale,
            "clip_skip": clip_skip,
            "cache_interval": cache_interval,
            "token_merging": token_merging, "similarity_threshold": similarity_threshold, "noise_source": noise_source,
            "variation_strength": variation_strength,
            "variation_seed": None if variation_seed == -1 else variation_seed,
            "loras": tuple(map(Lora.read, lora or ())),
            "micro_conditioning": MicroConditioning.read(sizes) if sizes else None,
            "switch_at": SWITCH_AT if refiner and switch_at is None else switch_at,
        },
        best_of=best_of,
        init=init, strength=strength, mask=mask, controlnets=tuple(map(read_control, controlnet or ())),
    )  # fmt: skip
    flags = _placement(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    flags |= _beside(lora_dir, controlnet_dir, refiner, scorer, watermark)
    if server:
        from diffserve.cli.remote import run as run_there

        return run_there(order, server, model=model, flags={**flags, "": Flag("--config", config)})
    return run(order, model=model, config=config, flags=flags)


@app.command()
def batch(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, each a prompt in quotes or an object with the API's fields and perhaps an id; or a .txt "
            "with a prompt a line.",
            metavar="FILE",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the pictures and results.jsonl.", metavar="DIR")
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="How many lines are painted at a time.", metavar="N")
    ] = 8,
    server: ServerOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="In shards, by the workers of a Ray cluster, of this machine or of many.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of --cluster: HOST:PORT of one that this machine is part of, or auto; else one begins here.",
            metavar="ADDRESS",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Of --cluster: engines; else one for each GPU, or machine.", metavar="N")
    ] = None,
    shard_lines: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Of --cluster: lines that go together; else 200.", metavar="N")
    ] = None,
    webdataset: Annotated[
        bool, typer.Option("--webdataset", help="Of --cluster: a tar of pictures and JSON for each shard.")
    ] = False,
    watermark: WatermarkOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    refiner: RefinerOption = None,
    scorer: ScorerOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    embeddings_dir: EmbeddingsOption = None,
) -> int:
    """Paint every line of FILE into a folder; the same command goes on with what is missing.

    results.jsonl tells of each line its files, seeds and recipe, or why it failed, and the others go on. The exit code
    is 0 where every line is painted, and 1 where some failed.
    """
    from diffserve.cli.batch.run import run

    flags = _placement(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    flags |= _beside(lora_dir, controlnet_dir, refiner, scorer, watermark)
    if cluster:
        from diffserve.cli.batch.cluster_run import Ordered
        from diffserve.cli.batch.cluster_run import run as run_there

        if server:
            raise InvalidRequest("--cluster and --server are two places; give one of them.", param="--cluster")
        ordered = Ordered(address=address, num_workers=workers, shard_lines=shard_lines, webdataset=webdataset)
        return run_there(prompts, output, ordered, concurrency=concurrency, model=model, config=config, flags=flags)
    if given := [
        name
        for name, one in (
            ("--address", address),
            ("--workers", workers),
            ("--shard-lines", shard_lines),
            ("--webdataset", webdataset),
        )
        if one
    ]:
        raise InvalidRequest(f"{given[0]} is given without --cluster, which it is of.", param=given[0])
    return run(prompts, output, server=server, concurrency=concurrency, model=model, config=config, flags=flags)


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
    server: ServerOption = None,
) -> int:
    """Rewrite WISH into prompts that an image model understands, one line each."""
    from diffserve.cli.prompts import one_text
    from diffserve.cli.rewrite import run
    from diffserve.rewrite_types import RewriteRequest
    from diffserve.types import RewriteOptions

    text = one_text(wish, command="rewrite", name="wish")
    request = RewriteRequest(wish=text, num_prompts=num_prompts, options=RewriteOptions(seed=seed), deltas=stream)
    if server:
        from diffserve.cli.remote import refuse_placement
        from diffserve.cli.remote import rewrite as rewrite_there
        from diffserve.config import Flag

        named = None if model == "embedded" else model
        refuse_placement({"model": Flag("--model", named), "d": Flag("--device", device), "t": Flag("--dtype", dtype)})
        return rewrite_there(request, style, server, is_json=as_json)
    return run(request, model, style, device=device or "auto", dtype=dtype or "auto", is_json=as_json)


@app.command()
def serve(
    host: HostOption = None,
    port: PortOption = None,
    allow_open: AllowOpenOption = None,
    config: ConfigOption = None,
    model: ModelsOption = None,
    unload_after: UnloadAfterOption = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="Where pictures lie for their URLs.")] = None,
    page: PageOption = None,
    watermark: WatermarkOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    refiner: RefinerOption = None,
    scorer: ScorerOption = None,
    device: DeviceOption = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="An engine on each: cuda:0,cuda:1; cpu,cpu divides the cores.", metavar="LIST"),
    ] = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    embeddings_dir: EmbeddingsOption = None,
) -> int:
    """Serve the model over HTTP (OpenAI's image endpoints, and a page for browsers) until stopped."""
    from functools import partial

    from diffserve.config import Flag, load_settings
    from diffserve.service.run import serve as run
    from ui import mount_page

    flags, first = _serving(host, port, allow_open, data_dir, page, unload_after, model)
    flags["serve.devices"] = Flag("--devices", None if devices is None else [one.strip() for one in devices.split(",")])
    flags |= _beside(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= _placement(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    settings = load_settings(model=first, models=(model or [])[1:], config=config, flags=flags)
    mount = partial(mount_page, grace_s=settings.serve.page_grace_s)
    return run(settings, mount_page=mount if settings.serve.page else None)


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
    flags = _placement(device, dtype, offload, device_map, vae, text_encoder)
    given = {"exact_points": gate_exact, "psnr_db": gate_psnr, "frechet": gate_frechet}
    if gate is not None:
        from diffserve.cli.gate import GateOptions
        from diffserve.cli.gate import run as run_gate

        return run_gate(GateOptions(gate, **given), options, model=model, config=config, flags=flags)
    if any(value is not None for value in given.values()):
        raise InvalidRequest("--gate-exact, --gate-psnr and --gate-frechet limit a gate; give --gate, too.")
    return run(options, model=model, config=config, flags=flags)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Pictures: PNG, JPEG or WebP.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, a line of JSON a file.")] = False,
) -> int:
    """Say of each FILE whether it says that a machine painted it. Exit code 1: of one of them nothing says so; 2: one
    cannot be read."""
    from diffserve.cli.verify import run

    return run(files, as_json=as_json)


@app.command()
def doctor(
    model: ModelOption = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Work out the least time of a step on this GPU, here or not: h100, l4, rtx4090..."),
    ] = None,
) -> int:
    """Say what was found: device, precision, model, the memory each part needs, and where each setting comes from."""
    from diffserve.cli.doctor import run
    from diffserve.config import load_settings

    flags = _placement(device, dtype, offload, device_map, vae, text_encoder)
    return run(load_settings(model=model, config=config, flags=flags), gpu)


@app.command()
def warm(
    model: ModelOption = None,
    config: ConfigOption = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT to compile for, perhaps several times; else the model's own.", metavar="SIZE"),
    ] = None,
    loras: Annotated[bool, typer.Option("--loras", help="Also for pictures with adapters of the folder.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
) -> int:
    """Compile the UNet ahead, a minute for each number of rows; kept on disk and used from then on where faster."""
    from diffserve.cli.warm import run
    from diffserve.config import load_settings

    flags = _placement(device, dtype, None, None, vae, text_encoder)
    return run(load_settings(model=model, config=config, flags=flags), size or [], has_loras=loras)


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


@app.command()
def mcp(
    server: Annotated[
        str, typer.Option("--server", help="The running server that paints.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    http: Annotated[
        int | None,
        typer.Option("--http", help="Listen on this port of this machine instead (/mcp).", metavar="PORT"),
    ] = None,
) -> int:
    """Offer a running server's pictures as tools of the Model Context Protocol, on standard input and output.

    An assistant starts this by itself: command diffserve, arguments mcp --server URL, and the server's key, where it
    asks for one, as DIFFSERVE_API_KEY. The tools are generate_image, edit_image and rewrite_prompt.
    """
    try:
        from diffserve.cli.mcp import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise ConfigError("the package mcp is not installed: pip install 'diffserve[mcp]'.") from None
    return run(server, http)


keys_app = typer.Typer(
    name="keys",
    help="The keys of a server: whoever has none may not come in, once there is one.",
    rich_markup_mode=None,
)
app.add_typer(keys_app)
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The server's own folder.", metavar="DIR")]


@keys_app.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="What to call it.", metavar="NAME")],
    scope: Annotated[
        list[str] | None, typer.Option(help="generate (the default), metrics or admin; perhaps several times.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Requests for work that it may make in a minute.")] = None,
    share: Annotated[float, typer.Option(help="How many times as much as others it gets when all want some.")] = 1.0,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> int:
    """Make a key, and print it once."""
    from diffserve.cli.keys import add

    return add(_served(data_dir, config), name, scope or [], rate, share)


@keys_app.command("list")
def list_keys(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Tell of all keys; not the keys themselves, which are not kept."""
    from diffserve.cli.keys import show

    return show(_served(data_dir, config))


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Its name or its id.", metavar="NAME")],
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> int:
    """End a key, for a running server within a second."""
    from diffserve.cli.keys import revoke

    return revoke(_served(data_dir, config), name)


cluster_app = typer.Typer(
    name="cluster",
    help="Serve over replicas in Ray Serve: bring them up, look at them, take them down.",
    rich_markup_mode=None,
)
app.add_typer(cluster_app)


@cluster_app.command("up")
def cluster_up(
    file: Annotated[
        Path | None, typer.Argument(help="How many replicas, and of what size; one where left out.", metavar="TOML")
    ] = None,
    host: HostOption = None,
    port: PortOption = None,
    allow_open: AllowOpenOption = None,
    address: Annotated[
        str, typer.Option("--address", help="A Ray to join; else one is started here.", metavar="HOST:PORT")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The token of the Ray to join.", metavar="FILE")
    ] = None,
    is_detached: Annotated[bool, typer.Option("--detach", help="Come back when a replica is ready.")] = False,
    config: ConfigOption = None,
    model: ModelsOption = None,
    unload_after: UnloadAfterOption = None,
    data_dir: DataDirOption = None,
    page: PageOption = None,
    watermark: WatermarkOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    refiner: RefinerOption = None,
    scorer: ScorerOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    embeddings_dir: EmbeddingsOption = None,
) -> int:
    """Start the replicas, and serve over them until stopped."""
    from functools import partial

    from diffserve.cluster.config import ClusterConfig, read_cluster
    from diffserve.cluster.run import detach, up
    from diffserve.config import load_settings
    from ui import mount_page

    flags, first = _serving(host, port, allow_open, data_dir, page, unload_after, model)
    flags |= _beside(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= _placement(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)

    def read() -> tuple[Settings, ClusterConfig]:
        settings = load_settings(model=first, models=(model or [])[1:], config=config, flags=flags)
        return settings, read_cluster(file)

    settings, cluster = read()
    if is_detached:
        arguments = [word for word in sys.argv[1:] if word != "--detach"]
        return detach(arguments, Path(settings.serve.data_dir).expanduser())
    mount = partial(mount_page, grace_s=settings.serve.page_grace_s) if settings.serve.page else None
    return up(settings, cluster, address=address, token_file=token_file, mount_page=mount, read_again=read)


@cluster_app.command("status")
def cluster_status(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """A table of the replicas."""
    from diffserve.cli.cluster import status

    return status(_served(data_dir, config))


@cluster_app.command("redeploy")
def cluster_redeploy(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Have the front read its files anew, and its replicas take what they say, one after the other."""
    from diffserve.cli.cluster import redeploy

    return redeploy(_served(data_dir, config))


@cluster_app.command("down")
def cluster_down(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """End the front, its replicas, and the Ray that it started."""
    from diffserve.cli.cluster import down

    return down(_served(data_dir, config))


def _served(data_dir: str | None, config: str | None) -> Settings:
    """Settings for what has to do with a server's folder alone."""
    from diffserve.config import Flag, load_settings

    return load_settings(config=config, flags={"serve.data_dir": Flag("--data-dir", data_dir)})


def _serving(
    host: str | None,
    port: int | None,
    allow_open: bool | None,
    data_dir: str | None,
    page: bool | None,
    unload_after: float | None,
    models: list[str] | None,
) -> tuple[dict[str, Flag], str | None]:
    """Who may come where, for what, and the first model: options of commands that serve."""
    from diffserve.config import Flag, split_name

    name, first = split_name(models[0]) if models else (None, None)
    flags = {
        "serve.host": Flag("--host", host),
        "serve.port": Flag("--port", port),
        "serve.allow_open": Flag("--allow-open", allow_open),
        "serve.data_dir": Flag("--data-dir", data_dir),
        "serve.page": Flag("--page/--no-page", page),
        "serve.unload_after_s": Flag("--unload-after", unload_after),
        "model.model_id": Flag("--model", name),
    }
    return flags, first


def _beside(
    lora_dir: str | None, controlnet_dir: str | None, refiner: str | None, scorer: str | None, watermark: bool | None
) -> dict[str, Flag]:
    """What may stand beside a model, and what its pictures bear: options of commands."""
    from diffserve.config import Flag

    return {
        "model.lora_dir": Flag("--lora-dir", lora_dir),
        "model.controlnet_dir": Flag("--controlnet-dir", controlnet_dir),
        "model.refiner": Flag("--refiner", refiner),
        "model.scorer": Flag("--scorer", scorer),
        "serve.watermark": Flag("--watermark/--no-watermark", watermark),
    }


def _placement(
    device: str | None,
    dtype: str | None,
    offload: str | None,
    device_map: str | None,
    vae: str | None = None,
    text_encoder: str | None = None,
    embeddings_dir: str | None = None,
) -> dict[str, Flag]:
    """Where a model and its parts lie, where they run, how precisely, and where weights rest: options of commands."""
    from diffserve.config import Flag

    return {
        "model.embeddings_dir": Flag("--embeddings-dir", embeddings_dir),
        "model.device": Flag("--device", device),
        "model.dtype": Flag("--dtype", dtype),
        "model.vae": Flag("--vae", vae),
        "model.text_encoder": Flag("--text-encoder", text_encoder),
        "engine.offload": Flag("--offload", offload),
        "engine.device_map": Flag("--device-map", device_map),
    }
