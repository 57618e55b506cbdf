"""The pool's memory is taken when it is made, not page by page while the server runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from diffserve.runtime.kv.arena import Arena

PAGE_BYTES = 1 << 20
NUM_PAGES = 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_are_used_for_the_first_time_do_not_make_the_process_grow() -> None:
    before = anonymous_bytes()
    arena = Arena(NUM_PAGES, PAGE_BYTES, torch.device("cpu"))
    made = anonymous_bytes()
    arena.data.fill_(1)
    assert made - before > 0.9 * NUM_PAGES * PAGE_BYTES
    assert anonymous_bytes() - made < 0.1 * NUM_PAGES * PAGE_BYTES


def anonymous_bytes() -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
