"""The pool's memory is taken when it is made, not page by page while the server runs."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from diffserve.runtime.kv.layout import Arena

PAGE_BYTES = 1 << 20
NUM_PAGES = 64


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which pages there are")
def test_pages_that_are_used_for_the_first_time_do_not_make_the_process_grow() -> None:
    arena = Arena(NUM_PAGES, PAGE_BYTES, torch.device("cpu"))
    untouched = torch.empty(NUM_PAGES * PAGE_BYTES * 16, dtype=torch.uint8)  # more than is free from earlier tests
    assert resident_share(arena.data) == 1.0
    assert resident_share(untouched) < 0.5


def resident_share(tensor: torch.Tensor) -> float:
    """Return the share of the pages of ``tensor`` that are in memory (``mincore``)."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(start, num_bytes, pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) / len(pages)
