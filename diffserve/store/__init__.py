"""Persistent data of a server in one SQLite file and a folder: keys, files, batches, history and usage. No PyTorch."""

from diffserve.store.database import Database
from diffserve.store.keys import SCOPES, Key, Keys, Scope

__all__ = ["SCOPES", "Database", "Key", "Keys", "Scope"]
