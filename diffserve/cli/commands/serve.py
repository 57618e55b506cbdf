"""Commands that run a server, and commands for its operator."""

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
    folder_settings,
    model_extra_flags,
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
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="Data folder of the server: database, keys and images.")
    ] = None,
    page: PageOption = None,
    watermark: WatermarkOption = None,
    lora_dir: LoraDirOption = None,
    controlnet_dir: ControlNetDirOption = None,
    refiner: RefinerOption = None,
    scorer: ScorerOption = None,
    device: DeviceOption = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", help="Run an engine on each device: cuda:0,cuda:1; cpu,cpu splits the cores.", metavar="LIST"
        ),
    ] = None,
    dtype: DtypeOption = None,
    offload: OffloadOption = None,
    device_map: DeviceMapOption = None,
    vae: VAEOption = None,
    text_encoder: TextEncoderOption = None,
    embeddings_dir: EmbeddingsOption = None,
) -> int:
    """Serve models over HTTP until stopped.

    The server has OpenAI-compatible image endpoints and a web page.
    """
    from functools import partial

    from diffserve.service.run import serve as run
    from diffserve.settings.layers import Flag, load_settings
    from ui import mount_page

    flags, first = serving_flags(host, port, allow_open, data_dir, page, unload_after, model)
    flags["serve.devices"] = Flag(
        "--devices", None if devices is None else [device.strip() for device in devices.split(",")]
    )
    flags |= model_extra_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)
    settings = load_settings(model=first, models=(model or [])[1:], config=config, flags=flags)
    mount = partial(mount_page, grace_s=settings.serve.page_grace_s)
    return run(settings, mount_page=mount if settings.serve.page else None)


def mcp(
    server: Annotated[
        str, typer.Option("--server", help="Address of the running server.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    http: Annotated[
        int | None,
        typer.Option(
            "--http", help="Listen on this local port (path /mcp) instead of standard input and output.", metavar="PORT"
        ),
    ] = None,
) -> int:
    """Offer a running server to assistants as MCP tools.

    The Model Context Protocol runs on standard input and output. Configure an assistant to start this command:
    diffserve mcp --server URL. If the server needs an API key, set DIFFSERVE_API_KEY. The tools are generate_image,
    edit_image and rewrite_prompt.
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
    help="Manage API keys. Once a key exists, every request needs one.",
    rich_markup_mode=None,
)


@keys_app.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="Name of the key.", metavar="NAME")],
    scope: Annotated[
        list[str] | None, typer.Option(help="Scope: generate (default), metrics or admin; repeatable.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Limit generation requests per minute.")] = None,
    share: Annotated[float, typer.Option(help="Weight of this key when requests of several keys compete.")] = 1.0,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> int:
    """Create a key and print it once."""
    from diffserve.cli.keys import add

    return add(folder_settings(data_dir, config), name, scope or [], rate, share)


@keys_app.command("list")
def list_keys(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """List all keys. The secrets are not stored and cannot be shown."""
    from diffserve.cli.keys import show

    return show(folder_settings(data_dir, config))


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Name or id of the key.", metavar="NAME")],
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> int:
    """Revoke a key. A running server applies this within a second."""
    from diffserve.cli.keys import revoke

    return revoke(folder_settings(data_dir, config), name)


cluster_app = typer.Typer(
    name="cluster",
    help="Run, inspect and stop replicas in Ray Serve.",
    rich_markup_mode=None,
)


@cluster_app.command("up")
def cluster_up(
    file: Annotated[
        Path | None, typer.Argument(help="Number and size of the replicas; default: one replica.", metavar="TOML")
    ] = None,
    host: HostOption = None,
    port: PortOption = None,
    allow_open: AllowOpenOption = None,
    address: Annotated[
        str,
        typer.Option(
            "--address", help="Join this Ray cluster; default: start one on this machine.", metavar="HOST:PORT"
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Token of the Ray cluster to join.", metavar="FILE")
    ] = None,
    is_detached: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return when a replica is ready.")
    ] = False,
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
    """Start the replicas and serve until stopped."""
    from functools import partial

    from diffserve.cluster.config import read_cluster
    from diffserve.cluster.run import detach, up
    from diffserve.settings.layers import load_settings
    from ui import mount_page

    flags, first = serving_flags(host, port, allow_open, data_dir, page, unload_after, model)
    flags |= model_extra_flags(lora_dir, controlnet_dir, refiner, scorer, watermark)
    flags |= placement_flags(device, dtype, offload, device_map, vae, text_encoder, embeddings_dir)

    def read() -> tuple[Settings, ClusterConfig]:
        settings = load_settings(model=first, models=(model or [])[1:], config=config, flags=flags)
        return settings, read_cluster(file)

    settings, cluster = read()
    if is_detached:
        arguments = [word for word in sys.argv[1:] if word != "--detach"]
        return detach(arguments, Path(settings.serve.data_dir).expanduser())
    mount = partial(mount_page, grace_s=settings.serve.page_grace_s) if settings.serve.page else None
    return up(settings, cluster, address=address, token_file=token_file, mount_page=mount, read_files=read)


@cluster_app.command("status")
def cluster_status(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Show the replicas in a table."""
    from diffserve.cli.cluster import status

    return status(folder_settings(data_dir, config))


@cluster_app.command("redeploy")
def cluster_redeploy(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Reload the configuration files and update the replicas one after the other."""
    from diffserve.cli.cluster import redeploy

    return redeploy(folder_settings(data_dir, config))


@cluster_app.command("down")
def cluster_down(data_dir: DataDirOption = None, config: ConfigOption = None) -> int:
    """Stop the server, its replicas and the Ray cluster that it started."""
    from diffserve.cli.cluster import down

    return down(folder_settings(data_dir, config))
