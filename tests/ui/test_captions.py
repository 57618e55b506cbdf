"""Captions of images."""

from __future__ import annotations

import pytest

from ui.captions import seconds_text, status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1 s"), (0.2, "1 s"), (2.1, "3 s"), (59.0, "59 s"), (59.5, "1 min"), (125.0, "2 min 5 s")],
)
def test_seconds_are_rounded_up(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_markup_in_a_text_is_escaped() -> None:
    shown = status("<img src=x onerror=alert(1)>", notes=("<script>", "<script>"), is_error=True)
    assert "<img" not in shown
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 1
    assert 'role="alert"' in shown
