"""Commands that inspect and prepare models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import (
    ConfigOption,
    ControlNetDirOption,
    DataDirOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    EmbeddingsOption,
    LoraDirOption,
    ModelOption,
    OffloadOption,
    ServerOption,
    TextEncoderOption,
    VAEOption,
    placement_flags,
)


def doctor(
    model: ModelOption = None,
    config: ConfigOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    data_dir: DataDirOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Estimate the minimum step time on this GPU, present or not: h100, l4, rtx4090..."),
    ] = None,
) -> int:
    """Check this machine, the model and the settings.

    The report shows device, precision, model, memory of each part, and the source of each setting.
    """
    from diffserve.cli.doctor import run
    from diffserve.settings.layers import Flag, load_settings

    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder)
    flags["serve.data_dir"] = Flag("--data-dir", data_dir)
    return run(load_settings(model=model, config=config, flags=flags), gpu)


def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            help="Kind of name: samplers, models, loras, controlnets, embeddings or styles.", metavar="KIND"
        ),
    ],
    server: ServerOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    embeddings_dir: EmbeddingsOption = None,
    data_dir: DataDirOption = None,
) -> int:
    """List names that requests can use, one per line. Unusable files are reported on standard error."""
    from diffserve.cli.names import Kind, run, run_on_server
    from diffserve.settings.layers import Flag, load_settings

    if kind not in get_args(Kind):
        raise InvalidRequest(f"KIND is {kind[:40]!r}; give one of {', '.join(get_args(Kind))}.", param="KIND")
    flags = {
        "model.lora_dir": Flag("--lora-dir", lora_dir),
        "model.controlnet_dir": Flag("--controlnet-dir", controlnet_dir),
        "model.embeddings_dir": Flag("--embeddings-dir", embeddings_dir),
        "serve.data_dir": Flag("--data-dir", data_dir),
    }
    if server:
        from diffserve.cli.remote import refuse_placement

        refuse_placement({**flags, "model": Flag("--model", model), "": Flag("--config", config)})
        return run_on_server(cast(Kind, kind), server)
    return run(cast(Kind, kind), load_settings(model=model, config=config, flags=flags))


def warm(
    model: ModelOption = None,
    config: ConfigOption = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Image size to compile for, WIDTHxHEIGHT; repeatable. Default: the native size.", metavar="SIZE"
        ),
    ] = None,
    loras: Annotated[
        bool, typer.Option("--loras", help="Also compile for images with LoRA adapters of --lora-dir.")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    data_dir: DataDirOption = None,
) -> int:
    """Compile the UNet in advance, about a minute per batch size.

    The compiled calls are stored on disk. The next start uses those that are faster.
    """
    from diffserve.cli.warm import run
    from diffserve.settings.layers import Flag, load_settings

    flags = placement_flags(device, dtype, None, None, vae, text_encoder)
    flags["serve.data_dir"] = Flag("--data-dir", data_dir)
    return run(load_settings(model=model, config=config, flags=flags), size or [], has_loras=loras)


def prune(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to create for the pruned model.", metavar="DIR")
    ],
    heads: Annotated[
        float, typer.Option("--heads", help="Share of attention heads to remove from every layer.", metavar="SHARE")
    ] = 0.0,
    channels: Annotated[
        float,
        typer.Option(
            "--channels", help="Share of feed-forward inner channels to remove from every layer.", metavar="SHARE"
        ),
    ] = 0.0,
    model: ModelOption = None,
    config: ConfigOption = None,
) -> int:
    """Remove the least important parts of the UNet.

    Attention heads and feed-forward channels are removed, and the result is written to a new model folder. Shares
    are 0 to 0.9 of each layer, rounded down; at least one head stays. Nothing is retrained, so check the images.
    """
    from diffserve.cli.prune import run
    from diffserve.settings.layers import load_settings

    return run(load_settings(model=model, config=config, flags={}), output, heads=heads, channels=channels)
