"""Commands that generate images or rewrite prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import (
    COMPONENTS,
    FURTHER_FILES,
    MODEL_HELP,
    ServerOption,
    SettingsOptions,
    complete_model,
    complete_quality,
    complete_sampler,
    with_settings,
    with_shared_fields,
)


@with_shared_fields
@with_settings("watermark", "config", *FURTHER_FILES, "device", *COMPONENTS, "embeddings_dir")
def generate(
    *,
    context: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompt in quotes; - reads standard input.", metavar="PROMPT")
    ] = None,
    infotext: Annotated[
        Path | None,
        typer.Option(
            "--infotext",
            help="Use the parameters of this image (or text file) for options that are not given.",
            metavar="FILE",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File (.png .jpg .webp), folder, or - for standard output. Default: named after the prompt.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files instead of numbering new ones.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help=MODEL_HELP, metavar="MODEL", autocompletion=complete_model)
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option("--quality", help="Quality: draft, standard, fine, max or auto.", autocompletion=complete_quality),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Number of denoising steps.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option("--sampler", help="Sampler, such as dpmpp_2m or 'Euler a'.", autocompletion=complete_sampler),
    ] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="Guidance scale; 1: no guidance.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the first image; -1: random.")] = None,
    negative: Annotated[str, typer.Option("--negative", help="Negative prompt.")] = "",
    size: Annotated[
        str, typer.Option("--size", help="Image size, such as 512x512; auto: the native size.", metavar="WxH")
    ] = "auto",
    num_images: Annotated[
        int,
        typer.Option(
            "-n", help="Number of images. Image i uses seed + i, or variation seed + i for variations.", metavar="N"
        ),
    ] = 1,
    prompt_syntax: Annotated[
        str, typer.Option("--prompt-syntax", help="a1111: brackets weight words; plain: brackets are literal.")
    ] = "a1111",
    template: Annotated[
        str,
        typer.Option(
            "--template", help="Resolve braces and wildcards of the prompt: random or combinatorial.", metavar="MODE"
        ),
    ] = "off",
    shared: dict[str, Any],
    sizes: Annotated[
        str | None,
        typer.Option(
            "--micro-conditioning",
            help="SDXL conditioning: 'original_size 640x480 crop 0x0 target_size 1024x1024', also negative_*.",
            metavar="SIZES",
        ),
    ] = None,
    variation_seed: Annotated[
        int | None,
        typer.Option(
            "--variation-seed",
            help="Seed of the variation noise; image i uses this + i and the same --seed. -1: random.",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", help="LoRA adapter from --lora-dir and its scale; repeatable.", metavar="NAME:SCALE"),
    ] = None,
    controlnet: Annotated[
        list[str] | None,
        typer.Option(
            "--controlnet",
            help="ControlNet of --controlnet-dir, control image, scale, canny for edges, step range; repeatable.",
            metavar="NAME:IMAGE[:SCALE][:PREPROCESSOR][:START-END][:resize]",
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="Reference image, IP-Adapter of --reference-dir, scale, step range; repeatable.",
            metavar="IMAGE[:ADAPTER][:SCALE][:START-END]",
        ),
    ] = None,
    switch_at: Annotated[
        float | None,
        typer.Option("--switch-at", help="Share of steps before --refiner takes over (default 0.8).", metavar="SHARE"),
    ] = None,
    best_of: Annotated[
        int | None, typer.Option("--best-of", help="Generate N candidates and keep the best -n.", metavar="N")
    ] = None,
    init: Annotated[Path | None, typer.Option("--init", help="Start from this image.", metavar="IMAGE")] = None,
    strength: Annotated[
        float | None, typer.Option("--strength", help="How strongly to change --init, 0 to 1 (default 0.75).")
    ] = None,
    mask: Annotated[
        Path | None,
        typer.Option("--mask", help="Change only the white or transparent parts of --init.", metavar="IMAGE"),
    ] = None,
    settings: SettingsOptions,
    server: ServerOption = None,
) -> int:
    """Generate images from a prompt.

    Each image is written to a file, and its path, seed and timing are printed.
    """
    from diffserve.api.micro_conditioning import MicroConditioning
    from diffserve.api.prompt_syntax import in_a1111
    from diffserve.api.types import SWITCH_AT
    from diffserve.cli.generate import GenerateArguments, run
    from diffserve.cli.inputs import fill_in, read_recorded, read_text_argument
    from diffserve.models.controlnets import read_control
    from diffserve.models.loras import Lora
    from diffserve.models.references import read_reference

    recorded = None if infotext is None else read_recorded(infotext, has_start=init is not None)
    if prompt:
        text = read_text_argument(prompt, command="generate")
        text = text if template != "off" else in_a1111(text, prompt_syntax)
    elif recorded is not None:
        text = str(recorded["prompt"])
    else:
        raise InvalidRequest("Missing argument 'PROMPT'; give a prompt in quotes.", param="PROMPT")
    has_refiner = bool(settings.flags["model.refiner"].value)
    order = GenerateArguments(
        prompt=text, output=output, overwrite=overwrite,
        negative=in_a1111(negative, prompt_syntax), size=size,
        num_images=num_images, seed=seed, quality=quality, sampler=sampler, num_steps=steps, guidance_scale=guidance,
        further={
            **shared,
            "variation_seed": None if variation_seed == -1 else variation_seed,
            "loras": tuple(map(Lora.read, lora or ())),
            "micro_conditioning": MicroConditioning.read(sizes) if sizes else None,
            "switch_at": SWITCH_AT if has_refiner and switch_at is None else switch_at,
        },
        best_of=best_of,
        init=init, strength=strength, mask=mask, controlnets=tuple(map(read_control, controlnet or ())),
        references=tuple(map(read_reference, reference or ())),
        template=template, prompt_syntax=prompt_syntax,
    )  # fmt: skip
    if recorded is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        options = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        order = fill_in(order, recorded, options)
    settings = settings._replace(model=model)
    if server:
        from diffserve.cli.remote import run as run_there

        return run_there(order, server, settings)
    return run(order, settings)


@with_settings("watermark", "model", "config", *FURTHER_FILES, "device", *COMPONENTS, "embeddings_dir")
def batch(
    *,
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON lines (a quoted prompt, or an object with API fields and an optional id), or a .txt file with "
            "one prompt per line; - reads standard input.",
            metavar="FILE",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the images and results.jsonl.", metavar="DIR")
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="Number of lines in progress at a time.", metavar="N")
    ] = 8,
    server: ServerOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Split the file into shards for workers of a Ray cluster.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --cluster: HOST:PORT of the Ray cluster, or auto. Default: start one on this machine.",
            metavar="ADDRESS",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --cluster: number of workers. Default: one per GPU or machine.", metavar="N"),
    ] = None,
    shard_lines: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="With --cluster: lines per shard (default 200).", metavar="N")
    ] = None,
    webdataset: Annotated[
        bool, typer.Option("--webdataset", help="With --cluster: write one tar of images and JSON per shard.")
    ] = False,
    settings: SettingsOptions,
) -> int:
    """Generate images for every line of FILE. Run the same command again to continue.

    results.jsonl records the files, seeds and parameters of each line, or its error. A failed line does not stop the
    others. The exit code is 0 if every line succeeded and 1 if some failed.
    """
    from diffserve.cli.batch.run import run

    if cluster:
        from diffserve.cli.batch.cluster_run import ClusterOptions
        from diffserve.cli.batch.cluster_run import run as run_there

        message = "--cluster cannot read standard input; give a file that all workers can read instead of -."
        check(str(prompts) != "-", message, "prompts")
        check(not server, "--cluster and --server exclude each other; give only one of them.", "--cluster")
        options = ClusterOptions(address=address, num_workers=workers, shard_lines=shard_lines, webdataset=webdataset)
        return run_there(prompts, output, options, settings, concurrency=concurrency)
    cluster_options = {
        "--address": address, "--workers": workers, "--shard-lines": shard_lines, "--webdataset": webdataset,
    }  # fmt: skip
    for option, value in cluster_options.items():
        message = f"{option} needs --cluster; add --cluster, or omit {option}."
        check(not value, message, option)
    if str(prompts) == "-":
        from diffserve.cli.batch.lines import standard_input

        with standard_input() as lines:
            return run(lines, output, settings, server=server, concurrency=concurrency, folder=Path.cwd())
    return run(prompts, output, settings, server=server, concurrency=concurrency)


@with_settings("device")
def rewrite(
    *,
    wish: Annotated[
        list[str],
        typer.Argument(help="What the image should show, in your own words; - reads standard input.", metavar="WISH"),
    ],
    num_prompts: Annotated[
        int, typer.Option("-n", help="Number of prompts; the most likely comes first.", metavar="N")
    ] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Print the words as they are generated.")] = False,
    model: Annotated[
        str,
        typer.Option("--model", help="Language model: embedded, or the folder of an instruct model.", metavar="DIR"),
    ] = "embedded",
    style: Annotated[
        str | None,
        typer.Option(
            "--style", help="Prompt style: embedded, tags (SD 1.x) or prose (SDXL). Default: chosen by the model."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of all prompts but the first (default 0).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all details as JSON.")] = False,
    settings: SettingsOptions,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Precision: auto, float32, bfloat16, float16, int8 or int4.")
    ] = None,
    server: ServerOption = None,
) -> int:
    """Rewrite WISH into prompts for an image model, one per line."""
    from diffserve.api.rewrite_types import RewriteRequest
    from diffserve.api.types import RewriteOptions
    from diffserve.cli.inputs import read_text_argument
    from diffserve.cli.rewrite import run

    text = read_text_argument(wish, command="rewrite", name="wish")
    request = RewriteRequest(wish=text, num_prompts=num_prompts, options=RewriteOptions(seed=seed), deltas=stream)
    if server:
        from diffserve.cli.remote import refuse_placement
        from diffserve.cli.remote import rewrite as rewrite_there
        from diffserve.settings.layers import Flag

        model_flag = None if model == "embedded" else model
        refuse_placement({"model": Flag("--model", model_flag), **settings.flags, "dtype": Flag("--dtype", dtype)})
        return rewrite_there(request, style, server, is_json=as_json)
    device = settings.flags["model.device"].value
    return run(request, model, style, device=device or "auto", dtype=dtype or "auto", is_json=as_json)


@with_settings("watermark", "config", "upscaler_dir", "device", "dtype")
def upscale(
    *,
    image: Annotated[Path, typer.Argument(help="PNG, JPEG or WebP file to enlarge.", metavar="IMAGE")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File or folder; - for standard output. Default: IMAGE-upscaled.png."),
    ] = None,
    upscaler: Annotated[
        str | None,
        typer.Option("--upscaler", help="Name from diffserve list upscalers. Default: embedded-4x.", metavar="NAME"),
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Enlargement. Default: that of the upscaler.", metavar="FACTOR")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="Size instead of --scale, WIDTHxHEIGHT; crops other shapes.", metavar="SIZE"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    settings: SettingsOptions,
    server: ServerOption = None,
) -> int:
    """Enlarge IMAGE with an upscaler network, or with a filter (lanczos, nearest)."""
    from diffserve.cli.upscale import UpscaleArguments, run, run_on_server

    arguments = UpscaleArguments(image, output, upscaler, scale, size, overwrite)
    if server:
        from diffserve.cli.remote import refuse_placement

        refuse_placement(settings.loading_flags)
        return run_on_server(arguments, server)
    return run(arguments, settings.load())
