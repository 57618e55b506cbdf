"""The UNet benchmark's parts that are not time, and one small run of all arms that compile nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import unet_peers
from benchmarks.bench_unet import in_turns, relative_error
from tests.benches import run_bench
from tests.tiny_models import ONE_LEVEL

ARMS = ("torch", "ours", "ours-compiled", "openvino-f32", "onnxruntime-f32")


def test_the_error_is_that_of_the_worst_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert relative_error(expected + torch.tensor([[0.0, 0.5], [1.0, 0.0]]), expected) == pytest.approx(0.5)


def test_arms_take_turns_there_and_back() -> None:
    names: list[str] = []

    def call(name: str) -> torch.Tensor:
        names.append(name)
        return torch.zeros(1)

    row_ms = in_turns({name: partial(call, name) for name in "ab"}, 2, rounds=3, calls=2)
    assert "".join(names) == "aaabbb" + "bbbaaa" + "aaabbb"
    assert {name: len(each) for name, each in row_ms.items()} == {"a": 3, "b": 3}


def test_a_peer_that_is_not_installed_says_how_it_is() -> None:
    with pytest.raises(unet_peers.Absent, match=r"no_such_peer is not installed: pip install .*bench"):
        unet_peers._import("no_such_peer")


@pytest.mark.slow
def test_a_small_run_has_every_arm_or_the_reason_why_not(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--model", tiny_model(ONE_LEVEL), "--dtype", "float32", "--device", "cpu", "--rows", "1,2"]
    options += ["--arms", ",".join(ARMS), "--rounds", 2, "--calls", 1, "--threads", 1]
    document = run_bench("bench_unet", *options, out=tmp_path / "unet.json")
    for point in document["points"]:
        assert {*point["arms"], *point["left_out"]} == set(ARMS)
        assert "diffserve warm" in point["left_out"]["ours-compiled"]
        assert all(arm["relative_error"] < 1e-4 for arm in point["arms"].values())
        assert point["arms"]["torch"]["ours_over_it"]["median"] > 0
    assert [point["arms"]["ours"]["bytes_equal_to_smallest_call"] for point in document["points"]] == [True, True]
