"""Windows of a prompt: cut as the encoders read them, named so that only equal values share pages."""

from __future__ import annotations

import pytest

from diffserve.runtime.text.prompt import Chunk, Window
from tests.runtime.conftest import LoadTiny


def window(*ids: int, weights: tuple[float, ...] | None = None) -> Window:
    return Window((Chunk(ids, weights or (1.0,) * len(ids)),))


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_every_encoder_reads_its_own_ids_in_every_window(tiny: LoadTiny, kind: str) -> None:
    text = tiny(kind).text
    first, second = text.windows("a cat BREAK (a dog:1.2)")
    assert len(first.chunks) == len(text.encoders)
    assert first.num_tokens == 77
    assert (first.is_weighted, second.is_weighted) == (False, True)
    for index, encoder in enumerate(text.encoders):
        assert [prompt.chunks[index] for prompt in (first, second)] == encoder.chunks("a cat BREAK (a dog:1.2)")
    assert text.windows("a cat BREAK (a dog:1.2)") is text.windows("a cat BREAK (a dog:1.2)")


def test_a_difference_in_either_encoder_makes_another_name() -> None:
    chunk, other = Chunk((1, 2), (1.0, 1.0)), Chunk((1, 3), (1.0, 1.0))
    names = {Window(chunks).token_ids for chunks in ((chunk, chunk), (chunk, other), (other, chunk), (other, other))}
    assert len(names) == 4
    assert all(name[0] == (1 << 31) + 1 for name in names)


def test_plain_windows_share_the_pages_of_their_common_beginning() -> None:
    names = [window(1, 2, 3, 4, last).logical_page_names(2) for last in (5, 6)]
    assert len(names[0]) == 3
    assert len(names[0] & names[1]) == 2


def test_weighted_windows_share_no_page_with_others() -> None:
    plain = window(1, 2, 3, 4)
    weighted = [
        window(1, 2, 3, 4, weights=(1.0, 1.0, 1.0, 1.5)),
        window(1, 2, 3, 4, weights=(1.0, 1.0, 1.0, 1.4)),
        window(1, 2, 3, 5, weights=(1.0, 1.0, 1.0, 1.5)),
    ]
    names = [prompt.logical_page_names(2) for prompt in (plain, *weighted)]
    assert len(set().union(*names)) == 8
    assert window(1, 2, 3, 4, weights=(1.0, 1.0, 1.0, 1.5)).logical_page_names(2) == names[1]


def test_silence_is_not_the_text_that_stands_in_its_place() -> None:
    text = window(1, 2)
    silent = Window(text.chunks, is_silent=True)
    assert not text.logical_page_names(2) & silent.logical_page_names(2)
    assert text.salt == b"" != silent.salt
