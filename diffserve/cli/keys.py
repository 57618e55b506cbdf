"""``diffserve keys``: make, list and revoke the keys of the server that keeps its things in a folder."""

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
from diffserve.store.keys import ID_CHARS
from diffserve.store.usage import Usage, Used, day_of

DEFAULT_ORIGIN: Final = "configs/serve.toml"
USED_DAYS: Final = 30
MOST_COLUMNS: Final = 500
"""Of a table that nobody looks at in a terminal."""


def add(settings: Settings, name: str, scopes: list[str], rate: int | None, share: float) -> int:
    """Make a key and tell it, once, on standard output."""
    text, key = _keys_to_change(settings).add(name, scopes or ("generate",), rate, share)
    print(f"{key.name} ({', '.join(key.scopes)}): keep it, it is not told again", file=sys.stderr)
    _name_folder(settings)
    print(text)
    return 0


def show(settings: Settings) -> int:
    """A table of all, the revoked ones too; in a pipe, lines as long as they are."""
    table = Table("name")
    table.add_column("id", min_width=ID_CHARS)  # is to be copied
    for column in ("may", "a minute", "share", "made", "revoked", f"in {USED_DAYS} days"):
        table.add_column(column)
    database = _database(settings, is_new=False)
    used: dict[str, Used] = {}
    for owner, _, amounts in Usage(database).days(day_of(time.time(), USED_DAYS - 1)):
        used[owner] = used.get(owner, Used()).plus(amounts)
    for key in Keys(database).all():
        rate = "any" if key.requests_per_minute is None else str(key.requests_per_minute)
        days = _day(key.created_s), _day(key.revoked_s)
        told = _told(used.get(key.id, Used()))
        table.add_row(key.name, key.id, ", ".join(key.scopes), rate, f"{key.share:g}", *days, told)
    Console(width=None if sys.stdout.isatty() else MOST_COLUMNS).print(table)
    _name_folder(settings)
    return 0


def revoke(settings: Settings, name: str) -> int:
    """End one, by name or id; a running server knows within a second."""
    _database(settings, is_new=False)
    key: Key = _keys_to_change(settings).revoke(name)
    print(f"{key.name} ({key.id}) is revoked")
    _name_folder(settings)
    return 0


def _keys_to_change(settings: Settings) -> Keys:
    """Return the keys, after a question where the folder is the default one and a server runs with it.

    Raises:
        InvalidRequest: The answer is no, or standard input is not a terminal.
    """
    database = _database(settings)
    folder = database.file.parent
    if settings.origins["serve.data_dir"] == DEFAULT_ORIGIN and database.is_served:
        question = f"A server runs with {folder}, the default folder; change its keys?"
        if not sys.stdin.isatty() or not typer.confirm(question, err=True):
            message = f"nothing was changed: a server runs with the default folder; to go on, give --data-dir {folder}."
            raise InvalidRequest(message, param="data_dir")
    return Keys(database)


def _name_folder(settings: Settings) -> None:
    """Say which server the keys belong to."""
    print(f"for the server with the folder {Path(settings.serve.data_dir).expanduser()}", file=sys.stderr)


def _database(settings: Settings, *, is_new: bool = True) -> Database:
    """Open the database in the data folder; made there where it is missing and ``is_new`` allows it.

    Raises:
        InvalidRequest: There is none, and none is to be made.
    """
    folder = Path(settings.serve.data_dir).expanduser()
    if not is_new and not folder.is_dir():
        message = f"there is no data folder {folder}; give the one of the server, --data-dir DIR."
        raise InvalidRequest(message, param="data_dir")
    return Database(folder)


def _told(used: Used) -> str:
    tokens = used.input_tokens + used.output_tokens
    counts = ((used.requests, "requests"), (used.pictures, "pictures"), (tokens, "tokens"))
    return ", ".join(f"{count} {what.removesuffix('s') if count == 1 else what}" for count, what in counts if count)


def _day(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
