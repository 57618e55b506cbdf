"""Persistent data of a server in a database (SQLite or PostgreSQL) and a folder: keys, files, batches, history."""

from diffserve.store.database import Database
from diffserve.store.keys import SCOPES, Key, Keys, Scope

__all__ = ["SCOPES", "Database", "Key", "Keys", "Scope"]
