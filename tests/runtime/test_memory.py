"""Release of unused memory to the operating system."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from diffserve.runtime.memory import give_heap_back

ROLLUP = Path("/proc/self/smaps_rollup")
PIECE_BYTES = 10_000
MANY = 8_000


def anonymous_bytes() -> int:
    match = re.search(r"^Anonymous:\s+(\d+) kB", ROLLUP.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not ROLLUP.exists(), reason="asks glibc and Linux")
def test_gaps_in_the_heap_are_given_back() -> None:
    pieces, tensors = [], []
    for number in range(MANY):
        pieces.append(np.ones(PIECE_BYTES, dtype=np.uint8))
        if number % 50 == 0:
            tensors.append(np.ones(PIECE_BYTES, dtype=np.uint8))  # holds on to its place, and so to all before it
    del pieces
    before = anonymous_bytes()
    give_heap_back()
    assert before - anonymous_bytes() > 0.8 * MANY * PIECE_BYTES
    assert all(tensor.all() for tensor in tensors)
