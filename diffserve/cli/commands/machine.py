"""Commands that inspect and prepare models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import COMPONENTS, FOLDERS, ServerOption, SettingsOptions, with_settings


@with_settings("model", "config", "device", *COMPONENTS, *FOLDERS, "data_dir")
def doctor(
    *,
    settings: SettingsOptions,
    gpu: Annotated[
        str | None,
        typer.Option(help="Estimate the minimum step time on a GPU that need not be present: h100, l4, rtx4090..."),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Also plan the memory of an image of this size.", metavar="WxH")
    ] = None,
    tile_size: Annotated[
        int, typer.Option("--tile-size", help="With --size: side of its tiles in pixels; 0: none.", metavar="PX")
    ] = 0,
) -> int:
    """Check this machine, the model and the settings.

    The report shows device, precision, model, memory of each part, and the source of each setting.
    """
    from diffserve.api.sizes import parse_size
    from diffserve.cli.doctor import run

    return run(settings.load(), gpu, None if size is None else parse_size(size), tile_size)


@with_settings("model", "config", *FOLDERS, "embeddings_dir", "data_dir")
def list_names(
    *,
    kind: Annotated[
        str,
        typer.Argument(
            help="Kind of name: samplers, models, loras, controlnets, references, upscalers, embeddings, wildcards or "
            "styles.",
            metavar="KIND",
        ),
    ],
    server: ServerOption = None,
    settings: SettingsOptions,
) -> int:
    """List names that requests can use, one per line. Unusable files are reported on standard error."""
    from diffserve.cli.names import Kind, run, run_on_server
    from diffserve.settings.layers import Flag

    if kind not in get_args(Kind):
        raise InvalidRequest(f"KIND is {kind[:40]!r}; give one of {', '.join(get_args(Kind))}.", param="KIND")
    if server:
        from diffserve.cli.remote import refuse_placement

        refuse_placement({**settings.loading_flags, "model": Flag("--model", settings.model)})
        return run_on_server(cast(Kind, kind), server)
    return run(cast(Kind, kind), settings.load())


@with_settings("model", "config", "device", "dtype", "vae", "text_encoder", "data_dir")
def warm(
    *,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Image size to compile for, WIDTHxHEIGHT; repeatable. Default: the native size.", metavar="SIZE"
        ),
    ] = None,
    loras: Annotated[
        bool, typer.Option("--loras", help="Also compile for images with LoRA adapters of --lora-dir.")
    ] = False,
    settings: SettingsOptions,
) -> int:
    """Compile the UNet in advance, about a minute per batch size.

    The compiled calls are stored on disk. The next start uses those that are faster.
    """
    from diffserve.cli.warm import run

    return run(settings.load(), size or [], has_loras=loras)


@with_settings("model", "config")
def prune(
    *,
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
    settings: SettingsOptions,
) -> int:
    """Remove the least important parts of the UNet.

    Attention heads and feed-forward channels are removed, and the result is written to a new model folder. Shares
    are 0 to 0.9 of each layer, rounded down; at least one head stays. Nothing is retrained, so check the images.
    """
    from diffserve.cli.prune import run

    return run(settings.load(), output, heads=heads, channels=channels)
