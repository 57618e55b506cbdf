"""What a server keeps beyond its own life, in one SQLite file: keys, and what signs sessions. No torch."""

from diffserve.store.database import Database
from diffserve.store.keys import SCOPES, Key, Keys, Scope

__all__ = ["SCOPES", "Database", "Key", "Keys", "Scope"]
