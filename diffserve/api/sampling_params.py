"""SamplingParams: how a language model chooses each next token.

``__post_init__`` validates values and raises :class:`diffserve.api.errors.InvalidRequest`. This module does not import
torch, because the HTTP process uses it, too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from diffserve.api.bounds import check
from diffserve.api.fields import MAX_SEED
from diffserve.api.json_schemas import check_text

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MAX_TOKENS = 1_000_000
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0


NUMBERS = {
    "temperature": (0.0, MAX_TEMPERATURE, "; 0 takes the most likely token"),
    "top_p": (0.0, 1.0, "; 1 keeps every token"),
    "min_p": (0.0, 1.0, "; 0 keeps every token"),
    "repetition_penalty": (0.01, 100.0, "; 1 is no penalty"),
    "presence_penalty": (-2.0, 2.0, "; 0 is no penalty"),
    "frequency_penalty": (-2.0, 2.0, "; 0 is no penalty"),
    "length_penalty": (-10.0, 10.0, ""),
}
COUNTS = {
    "top_k": (0, MAX_TOP_K, "; 0 keeps every token"),
    "seed": (0, MAX_SEED, ""),
    "logprobs": (0, MAX_LOGPROBS, ""),
    "max_tokens": (1, MAX_TOKENS, ""),
    "min_tokens": (0, MAX_TOKENS, ""),
    "num_beams": (1, MAX_BEAMS, "; 1 is no beam search"),
}
"""Minimum, maximum, and a hint for the error message, by field."""


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_count(value: object, param: str, low: int, high: int, hint: str = "") -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    check(
        is_integer and low <= value <= high,  # type: ignore[operator]  # is_integer comes first
        f"{param} is {_shorten(value)}; give a whole number between {low} and {high}{hint}.",
        param,
    )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of token sampling, and the conditions that end a text.

    Attributes:
        temperature: 0: the most likely token (greedy); 1: the unchanged distribution; from 0.0001 to 100.
        top_p: Keep the most likely tokens that together have this probability; 1: all.
        top_k: Keep this many of the most likely tokens; 0: all.
        min_p: Keep tokens at least this many times as likely as the most likely one; 0: all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or output; 1: none
            (Keskar et al. 2019, as in transformers).
        presence_penalty: Subtracted from the logit of every token in the output (as in OpenAI's API).
        frequency_penalty: Subtracted once for each occurrence of the token in the output (as in OpenAI's API).
        logit_bias: Pairs of a token id and a number from -100 to 100 added to its logit (as in OpenAI's API).
        max_tokens: Maximum number of output tokens, including the stop token.
        min_tokens: Minimum number of output tokens before a stop token.
        stop: Texts that end the output when they appear; they are not part of it.
        stop_token_ids: Token ids that end the output, in addition to the model's end tokens.
        seed: Seed of sampling; ``None``: a new one each time.
        logprobs: Report this many of the most likely tokens at each step; 0: only the chosen one; ``None``: none.
        num_beams: Beam search with this many beams; more than 1 needs temperature 0.
        length_penalty: Beam search: scores are divided by length ** length_penalty.
        early_stopping: Beam search: True stops at ``num_beams`` finished texts, False when a better one is unlikely,
            "never" when a better one is impossible (as in transformers).
        json_schema: The text is JSON that follows this JSON Schema, given as JSON; ``None``: any text. If
            ``max_tokens`` or a stop ends it, it is only the beginning of such a text.

    Raises:
        InvalidRequest: A field is wrong; ``param`` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    json_schema: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high, hint) in NUMBERS.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            message = f"{name} is {_shorten(value)}; give a number between {low:g} and {high:g}{hint}."
            check(is_number and low <= value <= high, message, name)  # false for NaN
        for name, bounds in COUNTS.items():
            if getattr(self, name) is not None or name not in ("seed", "logprobs"):
                _check_count(getattr(self, name), name, *bounds)
        check(
            self.temperature == 0.0 or self.temperature >= MIN_TEMPERATURE,
            f"temperature is {self.temperature!r}; give 0 for the most likely token, or at least {MIN_TEMPERATURE:g}.",
            "temperature",
        )
        check(
            self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; raise max_tokens or lower min_tokens.",
            "min_tokens",
        )
        self._check_stops()
        self._check_bias()
        if self.json_schema is not None:
            check_text(self.json_schema, "json_schema")
        check(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            f'early_stopping is {self.early_stopping!r}; choose true, false or "never".',
            "early_stopping",
        )
        check(
            self.num_beams == 1 or self.is_greedy,
            f"num_beams is {self.num_beams} and temperature {self.temperature:g}; beam search does not sample: "
            "set temperature to 0, or num_beams to 1.",
            "num_beams",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check_stops(self) -> None:
        check(isinstance(self.stop, tuple), f"stop is {_shorten(self.stop)}; give a tuple of texts.", "stop")
        check(len(self.stop) <= MAX_STOPS, f"stop has {len(self.stop)} texts; at most {MAX_STOPS} are allowed.", "stop")
        for text in self.stop:
            check(
                isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS,
                f"stop contains {_shorten(text)}; each must be a text of 1 to {MAX_STOP_CHARS} characters.",
                "stop",
            )
        ids = self.stop_token_ids
        check(
            isinstance(ids, tuple), f"stop_token_ids is {_shorten(ids)}; give a tuple of token ids.", "stop_token_ids"
        )
        check(
            len(ids) <= MAX_STOP_TOKEN_IDS,
            f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed.",
            "stop_token_ids",
        )
        for token_id in ids:
            _check_count(token_id, "stop_token_ids", 0, MAX_TOP_K)

    def _check_bias(self) -> None:
        bias, name = self.logit_bias, "logit_bias"
        check(isinstance(bias, tuple), f"{name} is {_shorten(bias)}; give a tuple of (token id, number).", name)
        check(len(bias) <= MAX_BIASES, f"{name} has {len(bias)} tokens; at most {MAX_BIASES} are allowed.", name)
        for token_id, value in bias:
            _check_count(token_id, name, 0, MAX_TOP_K)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            message = (
                f"{name} of token {token_id} is {_shorten(value)}; give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}."
            )
            check(is_number and -MAX_BIAS <= value <= MAX_BIAS, message, name)
        check(len({token_id for token_id, _ in bias}) == len(bias), f"{name} names a token twice; name it once.", name)
