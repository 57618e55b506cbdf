"""Token merging: fewer tokens in the self-attention of the highest resolution, the same bytes for the same row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffserve.runtime.unet.token_merging import MergingProcessor, rows_at, staying


def seen(num_merged_of: float, hidden: Tensor, size: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """What comes back of ``hidden`` where the layer gives what it gets, and what it got."""
    got: list[Tensor] = []

    def layer(_attn: object, tokens: Tensor, *_: object) -> Tensor:
        got.append(tokens)
        return tokens

    return MergingProcessor(layer, *size, num_merged_of)(None, hidden), got


def test_one_of_every_two_by_two_stays() -> None:
    assert staying(3, 4, torch.device("cpu")).view(3, 4).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]]


@pytest.mark.parametrize(("share", "num_left"), [(0.25, 9), (0.5, 6), (0.75, 4)])
def test_those_most_alike_are_merged_by_their_mean_and_come_back(share: float, num_left: int) -> None:
    hidden = torch.randn((2, 12, 5), generator=torch.Generator().manual_seed(1))
    out, [got] = seen(share, hidden, (3, 4))
    assert got.shape == (2, num_left, 5)
    stays = staying(3, 4, hidden.device)
    for row, before, after in zip(got, hidden, out, strict=True):
        fixed, free = before[stays], before[~stays]
        cosines = torch.nn.functional.cosine_similarity(free[:, None], fixed[None], dim=-1)
        most, into = cosines.max(1)
        merged = most.argsort(descending=True)[: 12 - num_left].tolist()
        means = [
            torch.stack([fixed[place], *(free[one] for one in merged if into[one] == place)]).mean(0)
            for place in range(4)
        ]
        assert torch.allclose(row[-4:], torch.stack(means), atol=1e-6)
        wanted = [means[into[one]] if one in merged else free[one] for one in range(8)]
        assert torch.allclose(after[~stays], torch.stack(wanted), atol=1e-6)
        assert torch.allclose(after[stays], torch.stack(means), atol=1e-6)


def test_a_row_gives_the_same_bytes_in_any_company_and_on_meta_only_shapes() -> None:
    hidden = torch.randn((3, 64, 8), generator=torch.Generator().manual_seed(2))
    together, _ = seen(0.5, hidden, (8, 8))
    alone, _ = seen(0.5, hidden[1:2], (8, 8))
    assert torch.equal(together[1:2], alone)
    equal = torch.ones((1, 64, 8))
    assert torch.allclose(seen(0.5, equal, (8, 8))[0], equal)
    out, [got] = seen(0.5, torch.empty((2, 64, 8), device="meta"), (8, 8))
    assert (out.shape, got.shape) == ((2, 64, 8), (2, 32, 8))


def test_rows_are_gathered_each_by_its_own_places() -> None:
    tokens = torch.arange(6.0).view(2, 3, 1)
    assert rows_at(tokens, torch.tensor([[2, 0], [1, 1]])).flatten().tolist() == [2.0, 0.0, 4.0, 4.0]
