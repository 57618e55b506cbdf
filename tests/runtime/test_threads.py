"""How many threads torch computes on, here and in threads that begin meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from threading import Thread

import pytest
import torch

from diffserve.runtime.threads import computing_on, patient_threads, pool_of_threads


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Torch's number, until the test ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_block_within_another_gives_back_the_number_of_that_one() -> None:
    with computing_on(1):
        with computing_on(3):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_a_thread_of_a_pool_computes_on_the_number_that_was_when_it_was_made() -> None:
    with pool_of_threads(1, "late") as pool, computing_on(1):
        assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 1, "what a thread says holds for no other"
    with pool_of_threads(1, "told", 2) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a kernel that does not know of such threads")
def test_patient_threads_are_those_that_begin_within_the_block_and_no_others() -> None:
    thread_counts: list[int] = []

    def look() -> None:
        thread_counts.append(os.sched_getscheduler(0))

    for block in (patient_threads(), nullcontext(), computing_on(1)):
        with block:
            thread = Thread(target=look)
            thread.start()
            thread.join()
    assert thread_counts == [os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a kernel that does not know of such threads")
def test_where_the_kernel_refuses_patience_all_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with patient_threads():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
