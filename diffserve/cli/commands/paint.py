"""Commands that paint, and the one that finds the words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import (
    ConfigOption,
    ControlNetDirOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    EmbeddingsOption,
    LoraDirOption,
    ModelOption,
    OffloadOption,
    RefinerOption,
    ScorerOption,
    ServerOption,
    TextEncoderOption,
    VAEOption,
    WatermarkOption,
    beside_flags,
    complete_quality,
    complete_sampler,
    placement_flags,
)


def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to paint, in quotes; - reads standard input.", metavar="PROMPT")
    ] = None,
    infotext: Annotated[
        Path | None,
        typer.Option(
            "--infotext",
            help="Repeat this picture (or a text file with its parameters), but for what other options say.",
            metavar="FILE",
        ),
    ] = None,
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
        typer.Option("--quality", help="draft, standard or fine: how many steps.", autocompletion=complete_quality),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option("--sampler", help="For example dpmpp_2m or 'Euler a'.", autocompletion=complete_sampler),
    ] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="Weight of the prompt; 1: none.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same picture; -1: any.")] = None,
    negative: Annotated[str, typer.Option("--negative", help="What should not be in the picture.")] = "",
    size: Annotated[str, typer.Option("--size", help="For example 512x512; auto: native.", metavar="WxH")] = "auto",
    num_images: Annotated[
        int, typer.Option("-n", help="How many; image i has seed + i, or varied by + i.", metavar="N")
    ] = 1,
    eta: Annotated[float | None, typer.Option("--eta", help="Fresh noise in ddim, euler_a and tcd, 0 to 1.")] = None,
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
        typer.Option("--token-merging", hidden=True, help="Without effect: removed in 0.2."),
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
    from diffserve.api.micro_conditioning import MicroConditioning
    from diffserve.api.prompt_syntax import in_a1111
    from diffserve.api.types import SWITCH_AT
    from diffserve.cli.generate import GenerateArguments, run
    from diffserve.cli.prompts import one_text
    from diffserve.cli.recorded import read_recorded
    from diffserve.models.controlnets import read_control
    from diffserve.models.loras import Lora
    from diffserve.settings.layers import Flag

    recorded = None if infotext is None else read_recorded(infotext, has_start=init is not None)
    if prompt:
        text = in_a1111(one_text(prompt, command="generate"), prompt_syntax)
    elif recorded is not None:
        text = recorded.prompt
    else:
        raise InvalidRequest("Missing argument 'PROMPT'; say what to paint, in quotes.", param="PROMPT")
    order = GenerateArguments(
        prompt=text, output=output, overwrite=overwrite,
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
    if recorded is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        order = recorded.fill(
            order, [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        )
    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    flags |= beside_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    if server:
        from diffserve.cli.remote import run as run_there

        return run_there(order, server, model=model, flags={**flags, "": Flag("--config", config)})
    return run(order, model=model, config=config, flags=flags)


def batch(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, each a prompt in quotes or an object with the API's fields and perhaps an id; or a .txt "
            "with a prompt a line; - reads standard input.",
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

    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    flags |= beside_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    if cluster:
        from diffserve.cli.batch.cluster_run import Ordered
        from diffserve.cli.batch.cluster_run import run as run_there

        if str(prompts) == "-":
            raise InvalidRequest("--cluster needs a file, which its workers read; FILE is -.", param="prompts")
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
    if str(prompts) == "-":
        from diffserve.cli.batch.lines import standard_input

        with standard_input() as lines:
            return run(
                lines, output, server=server, concurrency=concurrency, model=model, config=config, flags=flags,
                folder=Path.cwd(),
            )  # fmt: skip
    return run(prompts, output, server=server, concurrency=concurrency, model=model, config=config, flags=flags)


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
    from diffserve.api.rewrite_types import RewriteRequest
    from diffserve.api.types import RewriteOptions
    from diffserve.cli.prompts import one_text
    from diffserve.cli.rewrite import run

    text = one_text(wish, command="rewrite", name="wish")
    request = RewriteRequest(wish=text, num_prompts=num_prompts, options=RewriteOptions(seed=seed), deltas=stream)
    if server:
        from diffserve.cli.remote import refuse_placement
        from diffserve.cli.remote import rewrite as rewrite_there
        from diffserve.settings.layers import Flag

        named = None if model == "embedded" else model
        refuse_placement({"model": Flag("--model", named), "d": Flag("--device", device), "t": Flag("--dtype", dtype)})
        return rewrite_there(request, style, server, is_json=as_json)
    return run(request, model, style, device=device or "auto", dtype=dtype or "auto", is_json=as_json)
