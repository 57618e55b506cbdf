"""Commands that serve, and those for who serves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffserve.api.errors import ConfigError
from diffserve.cli.options import (
    AllowOpenOption,
    ConfigOption,
    ControlNetDirOption,
    DataDirOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    EmbeddingsOption,
    HostOption,
    LoraDirOption,
    ModelsOption,
    OffloadOption,
    PageOption,
    PortOption,
    RefinerOption,
    ScorerOption,
    TextEncoderOption,
    UnloadAfterOption,
    VAEOption,
    WatermarkOption,
    beside_flags,
    folder_settings,
    placement_flags,
    serving_flags,
)

if TYPE_CHECKING:
    from diffserve.cluster.config import ClusterConfig
    from diffserve.settings.config import Settings


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

    from diffserve.service.run import serve as run
    from diffserve.settings.layers import Flag, load_settings
    from ui import mount_page

    flags, first = serving_flags(host, port, allow_open, data_dir, page, unload_after, model)
    flags["serve.devices"] = Flag("--devices", None if devices is None else [one.strip() for one in devices.split(",")])
    flags |= beside_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    settings = load_settings(model=first, models=(model or [])[1:], config=config, flags=flags)
    mount = partial(mount_page, grace_s=settings.serve.page_grace_s)
    return run(settings, mount_page=mount if settings.serve.page else None)


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

    return add(folder_settings(data_dir, config), name, scope or [], rate, share)


@keys_app.command("list")
def list_keys(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Tell of all keys; not the keys themselves, which are not kept."""
    from diffserve.cli.keys import show

    return show(folder_settings(data_dir, config))


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Its name or its id.", metavar="NAME")],
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> int:
    """End a key, for a running server within a second."""
    from diffserve.cli.keys import revoke

    return revoke(folder_settings(data_dir, config), name)


cluster_app = typer.Typer(
    name="cluster",
    help="Serve over replicas in Ray Serve: bring them up, look at them, take them down.",
    rich_markup_mode=None,
)


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

    from diffserve.cluster.config import read_cluster
    from diffserve.cluster.run import detach, up
    from diffserve.settings.layers import load_settings
    from ui import mount_page

    flags, first = serving_flags(host, port, allow_open, data_dir, page, unload_after, model)
    flags |= beside_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)

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

    return status(folder_settings(data_dir, config))


@cluster_app.command("redeploy")
def cluster_redeploy(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Have the front read its files anew, and its replicas take what they say, one after the other."""
    from diffserve.cli.cluster import redeploy

    return redeploy(folder_settings(data_dir, config))


@cluster_app.command("down")
def cluster_down(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """End the front, its replicas, and the Ray that it started."""
    from diffserve.cli.cluster import down

    return down(folder_settings(data_dir, config))
