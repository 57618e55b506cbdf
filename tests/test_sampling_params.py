"""SamplingParams refuses wrong values with a message that has the value and a fix."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.sampling_params import MAX_STOPS, SamplingParams

INVALID_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("temperature", -1, "temperature is -1; give a number between 0 and 100"),
    ("temperature", math.nan, "temperature is nan"),
    ("temperature", math.inf, "temperature is inf"),
    ("temperature", 1e-9, "give 0 for the most likely token"),
    ("temperature", "hot", "temperature is 'hot'"),
    ("top_p", 1.5, "between 0 and 1; 1 keeps every token"),
    ("top_k", -1, "0 keeps every token"),
    ("top_k", True, "top_k is True"),
    ("top_k", 2.5, "give a whole number"),
    ("min_p", -0.1, "min_p is -0.1"),
    ("repetition_penalty", 0, "1 is no penalty"),
    ("presence_penalty", 3, "between -2 and 2"),
    ("frequency_penalty", math.nan, "frequency_penalty is nan"),
    ("max_tokens", 0, "max_tokens is 0; give a whole number between 1 and"),
    ("max_tokens", 10**400, r"max_tokens is 10{59}\.\.\.; give"),
    ("min_tokens", -1, "min_tokens is -1"),
    ("min_tokens", 300, "min_tokens is 300 and max_tokens 256; raise max_tokens or lower min_tokens"),
    ("stop", "end", "give a tuple of texts"),
    ("stop", ("",), "1 to 256 characters"),
    ("stop", ("x" * 257,), "1 to 256 characters"),
    ("stop", ("x",) * (MAX_STOPS + 1), "at most 16"),
    ("stop_token_ids", (-1,), "stop_token_ids is -1"),
    ("stop_token_ids", 7, "give a tuple of token ids"),
    ("stop_token_ids", (1,) * 300, "at most 256"),
    ("seed", -1, "seed is -1"),
    ("seed", 2**63, "seed is 9223372036854775808"),
    ("logprobs", 21, "between 0 and 20"),
    ("num_beams", 0, "1 is no beam search"),
    ("num_beams", 4, "set temperature to 0, or num_beams to 1"),
    ("length_penalty", math.inf, "length_penalty is inf"),
    ("early_stopping", "always", 'choose true, false or "never"'),
)


@pytest.mark.parametrize(("field", "value", "message"), INVALID_VALUES)
def test_error_names_the_field_the_value_and_a_fix(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_values_at_the_limits_are_accepted() -> None:
    SamplingParams(temperature=100, top_p=0, top_k=2**31 - 1, min_p=1, max_tokens=1, min_tokens=1, logprobs=20)
    SamplingParams(temperature=1e-4, seed=2**63 - 1, repetition_penalty=100, presence_penalty=-2, stop=("x" * 256,))
    SamplingParams(temperature=0, num_beams=64, length_penalty=-10, early_stopping="never")


def test_parameters_survive_encoding_and_decoding() -> None:
    params = SamplingParams(temperature=0, num_beams=3, early_stopping="never", stop=("\n", "end"), stop_token_ids=(5,))
    sent = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params


def test_decoding_refuses_an_unknown_field() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


def test_decoding_refuses_an_invalid_value() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        msgspec.json.decode(b'{"max_tokens": 0}', type=SamplingParams)


def test_greedy_sampling_and_penalties_are_detected() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(presence_penalty=-0.5).has_penalties
