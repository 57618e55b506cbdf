"""Layers that round the same in every batch, and the checksums that detect one that does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diffserve.runtime.unet.batch_invariance import with_layer_sums
from diffserve.runtime.unet.layers import ROWS_TOGETHER, RowLinear, use_steady_layers
from tests.runtime.conftest import LoadTiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_vector_becomes_the_same_bytes_alone_and_among_many(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = RowLinear(256, 320, dtype=dtype)
    vectors = torch.randn(3 * ROWS_TOGETHER - 5, 256, dtype=dtype)
    together = layer(vectors)
    assert torch.equal(torch.cat([layer(vector[None]) for vector in vectors]), together)
    assert torch.equal(layer(vectors[7:9]), together[7:9])
    torch.testing.assert_close(together, nn.functional.linear(vectors, layer.weight, layer.bias), rtol=0.02, atol=0.01)


def test_it_replaces_the_row_output_and_tokens_take_the_usual_path(tiny: LoadTiny) -> None:
    layers = {
        name: type(part) for name, part in tiny("sdxl").unet.network.named_modules() if isinstance(part, nn.Linear)
    }
    time_layers = {name for name in layers if name.endswith("time_emb_proj") or "embedding" in name}
    assert {name for name, kind in layers.items() if kind is RowLinear} == time_layers
    assert {"time_embedding.linear_1", "add_embedding.linear_2"} < time_layers
    layer = nn.Linear(4, 4)
    tokens = torch.randn(1, 3, 4)
    expected = layer(tokens)
    layer.__class__ = RowLinear
    assert torch.equal(layer(tokens), expected)


class Rounding(nn.Module):
    """A middle that is not the same in a call of its own, and an output that hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.end = nn.Identity(), nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        middle: Tensor = self.middle(rows + 2**-7 if len(rows) == 1 else rows)
        end: Tensor = self.end(middle * 0)
        return end.float()


def test_what_differs_in_the_middle_is_seen_where_the_output_hides_it() -> None:
    network, rows = Rounding(), torch.ones(2, 6, dtype=torch.bfloat16)
    alone, together = (
        with_layer_sums(network, lambda: network(rows[:1])),
        with_layer_sums(network, lambda: network(rows)),
    )
    assert torch.equal(alone[:, :6], together[:1, :6])
    assert not torch.equal(alone, together[:1])
    assert torch.equal(together[0], together[1])
    assert not network.middle._forward_hooks


def test_numbers_that_change_places_change_their_rows_sum_alone() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    use_steady_layers(layers, torch.bfloat16)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear]  # by name: other layers see tokens, too
    rows = torch.randn(4, 64).to(torch.bfloat16)
    sums = with_layer_sums(layers, lambda: layers(rows))
    assert sums.shape == (4, 64 + 3 - 1)
    changed = rows.clone()
    changed[2, [3, 4]] = rows[2, [4, 3]]
    assert (with_layer_sums(layers, lambda: layers(changed)) != sums).any(1).tolist() == [False, False, True, False]
