"""Commands that run a server, and commands for its operator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from diffserve.api.errors import ConfigError
from diffserve.cli.options import COMPONENTS, FURTHER_FILES, SettingsOptions, with_settings

if TYPE_CHECKING:
    from diffserve.cluster.config import ClusterConfig
    from diffserve.service.page import MountPage
    from diffserve.settings.config import Settings


SERVING: Final = ("host", "port", "allow_open", "config", "models", "unload_after", "data_dir", "page", "watermark")


@with_settings(*SERVING, *FURTHER_FILES, "device", "devices", *COMPONENTS, "embeddings_dir")
def serve(*, settings: SettingsOptions) -> int:
    """Serve models over HTTP until stopped.

    The server has OpenAI-compatible image endpoints and a web page.
    """
    from diffserve.service.run import serve as run

    devices = settings.flags["serve.devices"]
    if devices.value is not None:
        names = [device.strip() for device in devices.value.split(",")]
        settings.flags["serve.devices"] = devices._replace(value=names)
    loaded = settings.load()
    return run(loaded, mount_page=_mount_page(loaded))


def _mount_page(settings: Settings) -> MountPage | None:
    """Return the function that adds the web page to the server, or None if there is no page."""
    from functools import partial

    from ui import mount_page

    return partial(mount_page, grace_s=settings.serve.page_grace_s) if settings.serve.page else None


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
    edit_image, upscale_image and rewrite_prompt.
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
@with_settings("data_dir", "config")
def add_key(
    *,
    name: Annotated[str, typer.Argument(help="Name of the key, or of the user.", metavar="NAME")],
    scope: Annotated[
        list[str] | None, typer.Option(help="Scope: generate (default), metrics or admin; repeatable.")
    ] = None,
    rate: Annotated[int | None, typer.Option(help="Limit generation requests per minute.")] = None,
    share: Annotated[float, typer.Option(help="Weight of this key when requests of several keys compete.")] = 1.0,
    images_per_day: Annotated[
        int | None, typer.Option(help="Quota of images per UTC day; 0: no quota.", metavar="N")
    ] = None,
    device_seconds_per_day: Annotated[
        float | None, typer.Option(help="Quota of seconds of device time per UTC day; 0: no quota.", metavar="S")
    ] = None,
    user: Annotated[
        bool, typer.Option("--user", help="Set the limits of a user that a proxy names; there is no key.")
    ] = False,
    settings: SettingsOptions,
) -> int:
    """Create a key and print it once, or set the limits of a user (``[serve] trusted_user_header``)."""
    from diffserve.cli.keys import add

    return add(settings.load(), name, scope or [], rate, share, images_per_day, device_seconds_per_day, is_user=user)


@keys_app.command("set")
@with_settings("data_dir", "config")
def set_key(
    *,
    name: Annotated[str, typer.Argument(help="Name or id of the key; user:NAME for a user.", metavar="NAME")],
    images_per_day: Annotated[
        int | None, typer.Option(help="Quota of images per UTC day; 0: no quota.", metavar="N")
    ] = None,
    device_seconds_per_day: Annotated[
        float | None, typer.Option(help="Quota of seconds of device time per UTC day; 0: no quota.", metavar="S")
    ] = None,
    settings: SettingsOptions,
) -> int:
    """Change the quotas of a key. A running server applies this within a second."""
    from diffserve.cli.keys import change

    return change(settings.load(), name, images_per_day, device_seconds_per_day)


@keys_app.command("list")
@with_settings("data_dir", "config")
def list_keys(*, settings: SettingsOptions) -> int:
    """List all keys. The secrets are not stored and cannot be shown."""
    from diffserve.cli.keys import show

    return show(settings.load())


@keys_app.command("revoke")
@with_settings("data_dir", "config")
def revoke_key(
    *,
    name: Annotated[str, typer.Argument(help="Name or id of the key.", metavar="NAME")],
    settings: SettingsOptions,
) -> int:
    """Revoke a key. A running server applies this within a second."""
    from diffserve.cli.keys import revoke

    return revoke(settings.load(), name)


cluster_app = typer.Typer(
    name="cluster",
    help="Run, inspect and stop replicas in Ray Serve.",
    rich_markup_mode=None,
)


@cluster_app.command("up")
@with_settings(*SERVING, *FURTHER_FILES, "device", *COMPONENTS, "embeddings_dir")
def cluster_up(
    *,
    file: Annotated[
        Path | None, typer.Argument(help="Number and size of the replicas; default: one replica.", metavar="TOML")
    ] = None,
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
    settings: SettingsOptions,
) -> int:
    """Start the replicas and serve until stopped."""
    from diffserve.cluster.config import read_cluster
    from diffserve.cluster.run import detach, up

    def read() -> tuple[Settings, ClusterConfig]:
        return settings.load(), read_cluster(file)

    loaded, cluster = read()
    if is_detached:
        arguments = [word for word in sys.argv[1:] if word != "--detach"]
        return detach(arguments, Path(loaded.serve.data_dir).expanduser())
    mount = _mount_page(loaded)
    return up(loaded, cluster, address=address, token_file=token_file, mount_page=mount, read_files=read)


@cluster_app.command("status")
@with_settings("data_dir", "config")
def cluster_status(*, settings: SettingsOptions) -> int:
    """Show the replicas in a table."""
    from diffserve.cli.cluster import status

    return status(settings.load())


@cluster_app.command("redeploy")
@with_settings("data_dir", "config")
def cluster_redeploy(*, settings: SettingsOptions) -> int:
    """Reload the configuration files and update the replicas one after the other."""
    from diffserve.cli.cluster import redeploy

    return redeploy(settings.load())


@cluster_app.command("down")
@with_settings("data_dir", "config")
def cluster_down(*, settings: SettingsOptions) -> int:
    """Stop the server, its replicas and the Ray cluster that it started."""
    from diffserve.cli.cluster import down

    return down(settings.load())
