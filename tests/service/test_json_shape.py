"""Limits on the shape of JSON: checked in linear time and reported by name."""

from __future__ import annotations

import json
import time

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import MAX_JSON_DEPTH, MAX_KEYS, MAX_VALUES, check_shape, check_strict, parse
from diffserve.service.images.schemas import GenerateBody

MEGABYTE = 1 << 20


def refusal(data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_strict(data)
    return caught.value


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'{"a": 1, "a": 2}', "a"),
        (b'{"a": 1, "\\u0061": 2}', "a"),
        (b'[{"b": {"c": 1, "d": 2, "c": 3}}]', "c"),
        ('{"ä b": 1, "ä b": 2}'.encode(), "??b"),
        (b'{"n": %s, "x": 1, "x": 1}' % (b"9" * 10_000), "x"),
    ],
)
def test_a_duplicate_key_is_reported(data: bytes, name: str) -> None:
    error = refusal(data)
    assert (error.code, error.param) == ("duplicate_parameter", name)


def test_an_out_of_range_saving_is_refused_with_its_bounds() -> None:
    for field, value, expected in (
        ("similarity_threshold", 0, "must be more than 0"),
        ("similarity_threshold", 1.01, "must be at most 1"),
        ("token_merging", 0.8, "must be at most 0.75"),
        ("cache_interval", 0, "must be at least 1"),
        ("guidance_interval", "0,1", "must be a list"),
    ):
        with pytest.raises(InvalidRequest, match=expected) as caught:
            parse(GenerateBody, json.dumps({"prompt": "a", field: value}).encode())
        assert caught.value.param == field


def test_the_same_key_in_two_objects_is_accepted() -> None:
    check_strict(b'[{"a": {"a": 1}}, {"a": 2}]')


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_counted_before_anything_is_built(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    check_strict(opening * MAX_JSON_DEPTH + b"1" + closing * MAX_JSON_DEPTH)
    assert "nested" in refusal(opening * (MAX_JSON_DEPTH + 1) + b"1" + closing * (MAX_JSON_DEPTH + 1)).message
    assert refusal(opening * 100_000).code in ("invalid_json", "body_too_complex")


def test_keys_and_values_are_counted() -> None:
    check_strict(json.dumps({f"k{number}": 1 for number in range(MAX_KEYS)}).encode())
    many_keys = refusal(json.dumps({f"k{number}": 1 for number in range(MAX_KEYS + 1)}).encode())
    assert (many_keys.code, str(MAX_KEYS) in many_keys.message) == ("body_too_complex", True)
    check_strict(json.dumps([1] * (MAX_VALUES - 1)).encode())
    assert refusal(json.dumps([1] * (MAX_VALUES + 1)).encode()).code == "body_too_complex"


def test_brackets_within_a_string_do_not_count() -> None:
    check_strict(json.dumps({"a": '\\",:{[' * 100_000, "b": "[" * 1000}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b'"' * MEGABYTE,
        b'\\"' * (MEGABYTE // 2),
        b'"\\\\"' * (MEGABYTE // 4),
        b'"' + b"\\" * MEGABYTE,
        b'["",' * 262_144,
    ],
    ids=["quotes", "escaped-quotes", "escaped-escapes", "escapes", "empty-texts"],
)
def test_unterminated_values_are_scanned_once(data: bytes) -> None:
    started_s = time.process_time()
    with pytest.raises(InvalidRequest):
        check_strict(data + b',"x":1' * 2000)
    assert time.process_time() - started_s < 10  # quadratic time would take an hour


@pytest.mark.parametrize("data", [b"", b"NaN", b"[1e400]", b'"\\ud800"', b'"\xff"', b"[1,]", b"\xef\xbb\xbf{}", b"1 2"])
def test_invalid_json_is_refused_only_in_strict_mode(data: bytes) -> None:
    assert refusal(data).code == "invalid_json"
    check_shape(data)
