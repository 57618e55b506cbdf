"""Which rows attend together, and who may see what."""

from __future__ import annotations

import pytest
import torch

from diffserve.runtime.language.row_groups import FEW_TOKENS, RowGroup, Span, arrange

CPU = torch.device("cpu")


def group_of(spans: list[Span], page_tokens: int = 4) -> RowGroup:
    num_logical_pages = max(-(-span.length // page_tokens) for span in spans)
    pages = torch.zeros((1, len(spans), num_logical_pages), dtype=torch.long)
    positions = torch.cat([torch.arange(span.length - span.num_new, span.length) for span in spans])
    return RowGroup(spans, 0, pages, positions, page_tokens)


def test_decode_rows_few_tokens_and_chunks_are_kept_apart() -> None:
    spans = [Span(1, 30), Span(40, 90), Span(3, 20), Span(1, 31), Span(FEW_TOKENS, 20), Span(17, 17)]
    assert arrange(spans, CPU) == [[3, 0], [2, 4], [1], [5]]


def test_a_long_row_is_not_grouped_with_many_short_ones() -> None:
    spans = [Span(1, 2000), *[Span(1, 50)] * 8, Span(1, 1990)]
    assert arrange(spans, CPU) == [[0, 9], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert arrange(spans, torch.device("cuda")) == [[0, 9, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert arrange([*spans, Span(1, 9000), Span(1, 5000)], torch.device("cuda"))[1] == [10, 11]


def test_rows_of_one_length_that_decode_need_no_mask() -> None:
    assert group_of([Span(1, 6), Span(1, 6)]).mask(None, 2, torch.float32) is None
    assert group_of([Span(1, 6), Span(1, 5)]).mask(None, 2, torch.float32) is not None


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_mask_shows_each_query_its_past_within_the_window(window: int | None) -> None:
    spans = [Span(3, 9), Span(1, 4), Span(2, 2)]
    group = group_of(spans)
    mask = group.mask(window, 2, torch.float32)
    assert mask is not None
    assert mask.shape == (3, 1, 2 * 3, 9)
    for row, (num_new, length) in enumerate(spans):
        for query in range(3):
            position = length - num_new + min(query, num_new - 1)
            first = 0 if window is None else max(0, position - window + 1)
            expected = [0.0 if first <= column <= position else -torch.inf for column in range(9)]
            for repeat in range(2):
                assert mask[row, 0, 3 * repeat + query].tolist() == expected


def test_ragged_rows_come_back_as_they_went_in() -> None:
    group = group_of([Span(3, 9), Span(1, 4), Span(2, 2)])
    query = torch.arange(6.0)[:, None, None].expand(6, 2, 4)
    padded = group.take(query)
    assert padded[:, :, 0, 0].tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]]
    assert torch.equal(group.give(padded), query)


def test_only_a_single_row_without_history_is_fresh() -> None:
    assert group_of([Span(5, 5)]).is_fresh
    assert not group_of([Span(5, 6)]).is_fresh
    assert not group_of([Span(5, 5), Span(5, 5)]).is_fresh
