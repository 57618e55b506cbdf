"""``diffserve keys``: create, change, list and revoke the API keys of a server, given its data folder."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from diffserve.api.errors import InvalidRequest
from diffserve.settings.config import Settings
from diffserve.store import Database, Key, Keys
from diffserve.store.keys import ID_CHARS, USER
from diffserve.store.usage import Usage, UsageCounts, day_of

USED_DAYS: Final = 30
PIPE_COLUMNS: Final = 500
"""Width of the table when standard output is not a terminal."""


def add(
    settings: Settings,
    name: str,
    scopes: list[str],
    rate: int | None,
    share: float,
    images_per_day: int | None,
    device_seconds_per_day: float | None,
    *,
    is_user: bool,
) -> int:
    """Create a key and print it once on standard output, or store the limits of a user."""
    quotas = images_per_day, device_seconds_per_day
    text, key = _keys_to_change(settings).add(name, scopes or ("generate",), rate, share, *quotas, is_user=is_user)
    if is_user:
        print(f"{key.name} ({key.id}): limits are stored; revoke it to block the user")
        _name_folder(settings)
        return 0
    print(f"{key.name} ({', '.join(key.scopes)}): store it now; it is not shown again", file=sys.stderr)
    _name_folder(settings)
    print(text)
    return 0


def show(settings: Settings) -> int:
    """Print a table of all keys, including revoked ones. Lines are not wrapped in a pipe."""
    table = Table("name")
    table.add_column("id", min_width=ID_CHARS)  # never cut off, so that it can be copied
    for column in ("scopes", "per minute", "per day", "share", "created", "revoked", f"last {USED_DAYS} days"):
        table.add_column(column)
    database = _database(settings, is_new=False)
    used: dict[str, UsageCounts] = {}
    for owner, _, amounts in Usage(database).days(day_of(time.time(), USED_DAYS - 1)):
        used[owner] = used.get(owner, UsageCounts()).plus(amounts)
    for key in Keys(database).all():
        rate = "unlimited" if key.requests_per_minute is None else str(key.requests_per_minute)
        days = _day(key.created_s), _day(key.revoked_s)
        usage = _usage_text(used.get(key.id, UsageCounts()))
        quotas = _quotas_text(key)
        table.add_row(key.name, key.id, ", ".join(key.scopes), rate, quotas, f"{key.share:g}", *days, usage)
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)
    _name_folder(settings)
    return 0


def change(settings: Settings, name: str, images_per_day: int | None, device_seconds_per_day: float | None) -> int:
    """Change the quotas of a key by name or id.

    Raises:
        InvalidRequest: No quota is given, a value is invalid, or there is no such key.
    """
    if images_per_day is None and device_seconds_per_day is None:
        raise InvalidRequest("nothing to change; give --images-per-day or --device-seconds-per-day.")
    _database(settings, is_new=False)
    key = _keys_to_change(settings).change_quotas(name, images_per_day, device_seconds_per_day)
    print(f"{key.name} ({key.id}): {_quotas_text(key)} per day")
    _name_folder(settings)
    return 0


def revoke(settings: Settings, name: str) -> int:
    """Revoke a key by name or id. A running server applies this within a second."""
    _database(settings, is_new=False)
    key: Key = _keys_to_change(settings).revoke(name)
    print(f"{key.name} ({key.id}) is revoked")
    _name_folder(settings)
    return 0


def _keys_to_change(settings: Settings) -> Keys:
    """Open the keys, and ask for confirmation if a server runs with the default data folder.

    Raises:
        InvalidRequest: The user declines, or standard input is not a terminal.
    """
    database = _database(settings)
    folder = database.folder
    if settings.has_default_data_dir and database.is_served:
        question = f"A server is running with the default data folder {folder}. Change its keys?"
        if not sys.stdin.isatty() or not typer.confirm(question, err=True):
            raise InvalidRequest(
                "keys were not changed: a server is running with the default data folder; to confirm, give "
                f"--data-dir {folder}.",
                param="data_dir",
            )
    return Keys(database)


def _name_folder(settings: Settings) -> None:
    """Print the data folder of the server that the keys belong to."""
    print(f"data folder of the server: {Path(settings.serve.data_dir).expanduser()}", file=sys.stderr)


def _database(settings: Settings, *, is_new: bool = True) -> Database:
    """Open the database in the data folder.

    Args:
        settings: Settings with the data folder.
        is_new: Whether to create a missing data folder.

    Raises:
        InvalidRequest: The data folder does not exist and must not be created.
    """
    folder = Path(settings.serve.data_dir).expanduser()
    if not is_new and not folder.is_dir():
        message = f"there is no data folder {folder}; give the data folder of the server with --data-dir DIR."
        raise InvalidRequest(message, param="data_dir")
    return Database(folder, settings.store.url)


def _quotas_text(key: Key) -> str:
    quotas = (key.images_per_day, "images"), (key.device_seconds_per_day, "device s")
    default = "default" if key.name.startswith(USER) and None in (quotas[0][0], quotas[1][0]) else ""
    texts = [f"{limit:g} {unit}" for limit, unit in quotas if limit]
    return ", ".join([*texts, default] if default else texts) or "unlimited"


def _usage_text(used: UsageCounts) -> str:
    tokens = used.input_tokens + used.output_tokens
    counts = ((used.requests, "requests"), (used.pictures, "images"), (tokens, "tokens"))
    return ", ".join(f"{count} {unit.removesuffix('s') if count == 1 else unit}" for count, unit in counts if count)


def _day(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
