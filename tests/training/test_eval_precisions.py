"""The rewriter passes its perplexity limit at every supported precision, and fails it at two bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffserve.runtime.language.weight_only import int4_problem
from diffserve.training.eval.rewriter import evaluate_precisions


@pytest.mark.slow
def test_every_precision_of_the_rewriter_keeps_to_its_perplexity() -> None:
    names = ["float32", "int8", *([] if int4_problem(torch.device("cpu")) else ["int4"])]
    results = evaluate_precisions(names, count=40)["precisions"]
    assert all(result["passes"] for result in results.values())
    sizes = [result["weights_bytes"] for result in results.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > sizes[0] / 12


@pytest.mark.slow
def test_two_bits_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_bits(layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").data
        scale = weight.abs().amax(1, keepdim=True)
        weight.copy_((weight / scale).round() * scale)

    monkeypatch.setattr("diffserve.runtime.language.weight_only.hold_int8_weight", two_bits)
    assert not evaluate_precisions(["float32", "int8"], count=10)["precisions"]["int8"]["passes"]
