"""The proof finds what is wrong: each kind of damage, done on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diffserve.runtime.kv import PageTable, PoolIntegrityError
from diffserve.runtime.kv.ledger import PageLedger
from tests.runtime.kv.story import LLM, ten_pages, write_sequence

Damage = Callable[[PageLedger, PageTable], object]

DAMAGES: dict[str, Damage] = {
    r"pages \[9\] are nowhere": lambda ledger, _: ledger.free.remove(9),
    r"pages \[0\] are in two places": lambda ledger, _: ledger.free.append(0),
    r"pages \[10\] are outside the pool": lambda ledger, _: ledger.free.append(10),
    r"has 1 holders and counts 2": lambda _, table: setattr(table.logical_pages[0], "num_holders", 2),
    r"filed under another key": lambda _, table: setattr(table.logical_pages[0], "key", b"?"),
    r"has 1 holders and is idle": lambda ledger, table: ledger.index.mark_idle(table.logical_pages[0]),
    r"has 0 holders and is not idle": lambda ledger, _: ledger.index.mark_held(ledger.index.idle[0]),
    r"is idle and not filed": lambda ledger, _: setattr(ledger.index.idle[0], "key", None),
    r"held pages by tenant are .*6.* and counted as .*5": lambda ledger, _: ledger.held.subtract(["llm"]),
    r"idle pages by tenant are .*2.* and counted as .*3": lambda ledger, _: ledger.idle.update(["llm"]),
    r"has 3 logical pages for 14 tokens": lambda _, table: setattr(table, "num_tokens", 14),
    r"knows 3 full logical pages and has 10 tokens": lambda _, table: table.keys.append(b"?"),
    r"a logical page of another tenant": lambda _, table: setattr(table.logical_pages[0], "tenant", "unet"),
}


@pytest.mark.parametrize("finding", DAMAGES)
def test_damage_is_found(finding: str) -> None:
    pool = ten_pages(LLM)
    pool.close(write_sequence(pool, "llm", [90, 91, 92, 93]))
    table = write_sequence(pool, "llm", range(10))
    pool.check_integrity()
    DAMAGES[finding](pool._ledger, table)
    with pytest.raises(PoolIntegrityError, match=finding):
        pool.check_integrity()
