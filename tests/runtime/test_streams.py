"""Calls that run side by side, of which one is made up."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from diffserve.runtime.unet.package import Streams


@pytest.mark.parametrize(("num_streams", "num_threads"), [(2, 2), (4, 4), (2, 5)])
def test_shares_meet_side_by_side_and_come_back_in_order_each_on_threads_of_its_own(
    num_streams: int, num_threads: int
) -> None:
    together, before = Barrier(num_streams, timeout=30.0), torch.get_num_threads()
    values: list[int] = []
    rows, other_rows = torch.arange(8.0).view(8, 1), torch.arange(8.0).view(8, 1) * 10

    def make(tensors: Sequence[Tensor]) -> Tensor:
        together.wait()  # without the other thread this would block
        values.append(torch.get_num_threads())
        return tensors[0] + tensors[1]

    streams = Streams()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(2):
            assert torch.equal(streams.run(make, [rows, other_rows], num_streams), rows + other_rows)
        assert torch.get_num_threads() == num_threads
        outputs: list[int] = []
        newcomer = Thread(target=lambda: outputs.append(torch.get_num_threads()))
        newcomer.start()
        newcomer.join()
        assert outputs == [num_threads], "what a stream's thread says holds for no other"
    finally:
        torch.set_num_threads(before)
    assert values == [num_threads // num_streams] * 2 * num_streams


def test_a_failed_share_is_raised_after_all_shares_end() -> None:
    done: list[float] = []

    def make(tensors: Sequence[Tensor]) -> Tensor:
        if tensors[0].sum() == 0:
            raise RuntimeError("share 0")
        torch.randn(1 << 20).sort()
        done.append(float(tensors[0].sum()))
        return tensors[0]

    with pytest.raises(RuntimeError, match="share 0"):
        Streams().run(make, [torch.tensor([0.0, 7.0])], 2)
    assert done == [7.0]
