"""Commands about models on this machine."""

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
        typer.Option(help="Work out the least time of a step on this GPU, here or not: h100, l4, rtx4090..."),
    ] = None,
) -> int:
    """Say what was found: device, precision, model, the memory each part needs, and where each setting comes from."""
    from diffserve.cli.doctor import run
    from diffserve.settings.layers import Flag, load_settings

    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder)
    flags["serve.data_dir"] = Flag("--data-dir", data_dir)
    return run(load_settings(model=model, config=config, flags=flags), gpu)


def list_names(
    kind: Annotated[
        str, typer.Argument(help="samplers, models, loras, controlnets, embeddings or styles.", metavar="KIND")
    ],
    server: ServerOption = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    embeddings_dir: EmbeddingsOption = None,
    data_dir: DataDirOption = None,
) -> int:
    """List the names that requests may use, one a line, and on standard error the files that cannot be used."""
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
        typer.Option(help="WIDTHxHEIGHT to compile for, perhaps several times; else the model's own.", metavar="SIZE"),
    ] = None,
    loras: Annotated[bool, typer.Option("--loras", help="Also for pictures with adapters of the folder.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    data_dir: DataDirOption = None,
) -> int:
    """Compile the UNet ahead, a minute for each number of rows; kept on disk and used from then on where faster."""
    from diffserve.cli.warm import run
    from diffserve.settings.layers import Flag, load_settings

    flags = placement_flags(device, dtype, None, None, vae, text_encoder)
    flags["serve.data_dir"] = Flag("--data-dir", data_dir)
    return run(load_settings(model=model, config=config, flags=flags), size or [], has_loras=loras)


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
    from diffserve.settings.layers import load_settings

    return run(load_settings(model=model, config=config, flags={}), output, heads=heads, channels=channels)
