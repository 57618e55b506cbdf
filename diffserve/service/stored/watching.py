"""What Prometheus is told of the store: how long commits take, its log of writes, and batches that are not over."""

from __future__ import annotations

import sqlite3
from typing import Final

from diffserve.service.metrics import Metrics
from diffserve.store.batches import Batches
from diffserve.store.database import Database

UNREAD: Final[dict[tuple[str, ...], float]] = {}


def watch_store(metrics: Metrics, database: Database, batches: Batches) -> None:
    """Have ``metrics`` tell of ``database`` and ``batches`` at each scrape, and of every commit."""
    database.tell_commit = metrics.observe_commit
    said = "Of the log of writes beside the database."
    metrics.watch("db_wal_bytes", said, lambda: {(): float(database.wal_bytes)})

    def by_status() -> dict[tuple[str, ...], float]:
        try:
            return {(status,): float(count) for status, count in batches.backlog().by_status.items()}
        except sqlite3.Error:
            return UNREAD

    def lines_left() -> dict[tuple[str, ...], float]:
        try:
            return {(): float(batches.backlog().lines_left)}
        except sqlite3.Error:
            return UNREAD

    def oldest_age_s() -> dict[tuple[str, ...], float]:
        try:
            return {(): batches.backlog().oldest_age_s}
        except sqlite3.Error:
            return UNREAD

    metrics.watch("batches", "Batches that are not over.", by_status, "status")
    metrics.watch("batch_lines_left", "Lines of batches that are not done.", lines_left)
    metrics.watch("oldest_batch_age_seconds", "Of the oldest batch that is not over, 0 without one.", oldest_age_s)
