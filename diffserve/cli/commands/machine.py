"""Commands about models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    from diffserve.settings import load_settings

    flags = placement_flags(device, dtype, offload, device_map, vae, text_encoder)
    return run(load_settings(model=model, config=config, flags=flags), gpu)


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
    from diffserve.settings import load_settings

    flags = placement_flags(device, dtype, None, None, vae, text_encoder)
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
    from diffserve.settings import load_settings

    return run(load_settings(model=model, config=config, flags={}), output, heads=heads, channels=channels)
