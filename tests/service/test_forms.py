"""Fields of forms, which arrive as text, against what JSON of the same names would be."""

from __future__ import annotations

import pytest

from diffserve.errors import InvalidRequest
from diffserve.service.http.forms import parse_fields
from diffserve.service.images.edit_schemas import EditBody


@pytest.mark.parametrize(
    ("name", "text"),
    [("strength", "NaN"), ("guidance_scale", "Infinity"), ("guidance_scale", "-Infinity"), ("seed", "1e400"),
     ("n", "NaN"), ("variation_strength", "NaN"), ("loras", '[{"name": "gift", "scale": NaN}]')],
)  # fmt: skip
def test_what_is_no_number_in_json_is_none_in_a_form(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is "):
        parse_fields(EditBody, {"prompt": "a fox", name: text})


def test_numbers_lists_and_texts_are_what_json_has() -> None:
    body = parse_fields(EditBody, {"prompt": "NaN", "strength": "1e-1", "n": "2", "loras": '[{"name": "gift"}]'})
    assert (body.prompt, body.strength, body.n) == ("NaN", 0.1, 2)
    assert body.loras is not None
    assert [one.name for one in body.loras] == ["gift"]
