"""Texts that are JSON of a schema: the models' weights are random, and what they say is valid all the same."""

from __future__ import annotations

import json
import threading
from typing import Any, Final, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from diffserve.api.errors import InvalidRequest
from diffserve.api.json_schemas import ANY_OBJECT, check_schema, followed, max_tokens_of
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextAccepted, TextFinished, TextRequest, TextResult
from diffserve.runtime.decoding import json_constraint
from tests.engine.text.conftest import MakeEngine
from tests.engine.text.text_requests import greedy, token_ids_of
from tests.runtime.language import tiny

IDS: Final = tiny.random_ids(7, seed=3)
SHORT: Final = {"type": "string", "maxLength": 4}
PERSON: Final = {
    "type": "object",
    "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: Final = {
    "$defs": {"leaf": {"enum": [1, "two", None]}, "two": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}},
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/two", "maxItems": 2}, "right": {"$ref": "#/$defs/leaf"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}
CASE: Final = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "boolean"}}, "required": ["kind"]}
        | {"additionalProperties": False}
        for kind in ("cat", "dog")
    ]
}
SCHEMAS: Final[list[dict[str, Any]]] = [
    PERSON,
    TREE,
    CASE,
    {"type": "boolean"},
    {"enum": ["sepia", "ink", {"a": [1, 2]}, None]},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "pattern": "^[a-f]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0.25, "maximum": 7},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": "é\N{FOX FACE}"}, SHORT], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"anyOf": [PERSON, {"type": "null"}]},
]


def constrained_request(schema: dict[str, Any], seed: int, max_tokens: int = 120, **fields: Any) -> TextRequest:
    request_fields = {name: fields.pop(name) for name in list(fields) if name in TextRequest.__struct_fields__}
    params = {"temperature": 1.5, "seed": seed, "max_tokens": max_tokens, **fields}
    settings = SamplingParams(json_schema=json.dumps(schema), **params)
    return TextRequest(token_ids=tuple(IDS), params=settings, **request_fields)


def check_follows(result: TextResult, schema: dict[str, Any]) -> Any:
    """Validate the text of ``result`` and return its value, or ``...`` if the token limit cut it."""
    if result.finish_reason == "length":
        return ...
    value = json.loads(result.text)
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return value


def test_a_model_of_random_weights_says_what_every_schema_allows(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sequences=64)
    free = TextRequest(token_ids=tuple(IDS), params=SamplingParams(seed=5, max_tokens=24))
    cases = [(schema, constrained_request(schema, seed, 80)) for seed, schema in enumerate([PERSON, *SCHEMAS])]
    *answers, free_answer = engine.generate([*(request for _, request in cases), free])
    values = [check_follows(answer.results[0], schema) for (schema, _), answer in zip(cases, answers, strict=True)]
    assert sum(value is not ... for value in values) > len(values) * 3 / 4
    assert values[0] != values[1] or values[0] is ...  # the seeds differ
    assert token_ids_of(free_answer) == token_ids_of(
        make_engine().generate(free)[0]
    )  # other requests of the batch do not matter
    alone = make_engine()
    assert [token_ids_of(alone.generate(request)[0]) for _, request in cases[:2]] == [
        token_ids_of(answer) for answer in answers[:2]
    ]


@pytest.mark.parametrize("draft_seed", [None, 1])
def test_drafts_do_not_change_the_output_and_keys_are_forced(draft_seed: int | None, make_engine: MakeEngine) -> None:
    requests = [
        constrained_request(PERSON, 3, num_texts=2),
        constrained_request(PERSON, 3, temperature=0.0),
        constrained_request(TREE, 4),
    ]
    plain = make_engine().generate(requests)
    engine = make_engine(num_draft_tokens=4, draft_seed=draft_seed)
    drafted = engine.generate(requests)
    for schema, request, plain_answer, other in zip((PERSON, PERSON, TREE), requests, plain, drafted, strict=True):
        for result in other.results:
            check_follows(result, schema)
        if draft_seed is None or request.params.is_greedy:  # what a model proposes takes random numbers of its own
            assert [result.text for result in plain_answer.results] == [result.text for result in other.results]
    assert engine.stats().accepted_tokens > 0


def test_beams_follow_too_and_other_fields_mean_what_they_do(make_engine: MakeEngine) -> None:
    engine = make_engine()
    beams = engine.generate(constrained_request(PERSON, 1, temperature=0.0, num_beams=3, num_texts=2, logprobs=2))[0]
    assert all(check_follows(result, PERSON) is not ... for result in beams.results)
    assert len(beams.results[0].tokens) == len(beams.results[0].token_ids)
    cut = engine.generate(constrained_request(PERSON, 1, max_tokens=5))[0].results[0]
    assert (cut.finish_reason, cut.text) == ("length", '{"nam')
    stopped = engine.generate(constrained_request(PERSON, 1, stop=("age",)))[0].results[0]
    assert (stopped.finish_reason, stopped.stop_text) == ("stop", "age")
    longer = engine.generate(constrained_request({"type": "integer", "minimum": 1}, 1, min_tokens=9))[0].results[0]
    assert len(longer.token_ids) >= 9
    assert check_follows(longer, {"type": "integer"}) is not None
    assert json.loads(engine.generate(constrained_request({"const": {"a": 1}}, 1, presence_penalty=2.0))[0].text) == {
        "a": 1
    }


def test_schemas_are_compiled_in_the_background_and_few_are_cached(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_constraint, "KEPT_SCHEMAS", 3)
    engine = make_engine()
    assert engine._schemas is not None
    for number in range(9):
        assert json.loads(engine.generate(constrained_request({"const": number}, 0))[0].text) == number
    assert len(engine._schemas) == 3
    gate = threading.Event()
    engine._schemas._thread.submit(gate.wait)
    engine.submit(constrained_request({"const": 99}, 0, request_id="later"))
    first = engine.submit(greedy(IDS, 2))
    texts = set[str]()
    for _ in range(9):
        texts |= {event.request_id for event in engine.tick() if not isinstance(event, TextAccepted)}
    gate.set()
    assert texts == {first}, "somebody waits for a schema who did not ask for it"
    assert [event.text for event in engine.events() if isinstance(event, TextFinished)] == ["99"]


class Address(BaseModel):
    street: str
    number: int | None = None


class Plain(BaseModel):
    """A usual model of an application, which bounds nothing and does not forbid other keys."""

    name: str
    age: int
    height: float
    mood: Literal["calm", "wild"]
    tags: list[str]
    home: Address
    addresses: list[Address]


class Loose(BaseModel):
    """Values that may be nearly anything."""

    counts: dict[str, int]
    anything: Any
    either: int | str
    maybe: float | None = None


class Tree(BaseModel):
    """A schema that refers to itself."""

    value: int
    parts: list[Tree]


@pytest.mark.parametrize("kind", [Plain, Loose, Tree])
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_texts_of_plain_schemas_end_as_valid_objects(
    kind: type[BaseModel], num_draft_tokens: int, make_engine: MakeEngine
) -> None:
    schema = kind.model_json_schema()
    engine = make_engine(max_sequences=16, num_draft_tokens=num_draft_tokens)
    requests = [constrained_request(schema, seed, 160, temperature=0.5 + seed) for seed in range(4)]
    for answer in engine.generate(requests):
        [result] = answer.results
        assert result.finish_reason == "stop", result.text
        assert set(json.loads(result.text)) <= set(kind.model_fields), "no key is invented"
        kind.model_validate_json(result.text)


def test_numbers_strings_and_lists_have_default_limits(make_engine: MakeEngine) -> None:
    for schema, max_chars in (
        ({"type": "integer"}, 19),
        ({"type": "integer", "minimum": 7}, 18),
        ({"type": "number"}, 24),
        ({"type": ["integer", "null"]}, 19),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, 41),
        ({"minimum": 0}, 24),
    ):
        text = json.dumps(schema)
        check_schema(text, "schema")
        assert max_tokens_of(text, 1024) <= max_chars + 12
        for seed in range(4):
            [answer] = make_engine().generate([constrained_request(schema, seed, 60)])
            assert len(answer.text) <= max_chars, answer.text
            check_follows(answer.results[0], schema)
    assert max_tokens_of('{"type":"boolean"}', 1024) == 6
    assert max_tokens_of(json.dumps(Plain.model_json_schema()), 256) == 256
    limits = json.dumps(followed(json.dumps({"type": "array", "items": {"type": "string"}})))
    assert '"maxItems": 64' in limits
    assert '"maxLength": 1024' in limits


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**20}}, "required": ["a"]},
        {"type": "string", "pattern": "^[a-f]{2000}$"},
        {"type": "string", "minLength": 2000},
        {"type": "array", "items": {"const": 1}, "minItems": 100},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
         "$defs": {name: {"properties": {name: {"type": "boolean"}}, "required": [name]} for name in "ab"}},
        {"type": "number", "multipleOf": 0.5},
        {"properties": {"a": {"properties": {"b": {}}}}},
    ],
)  # fmt: skip
def test_a_schema_with_its_own_limits_is_still_followed(schema: dict[str, Any]) -> None:
    check_schema(json.dumps(schema), "schema")


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ('{"type":"objekt"}', "", "objekt"),
        ('{"properties":{"a":{"type":"array","items":{"not":{}}}}}', ".properties.a.items", "not"),
        ('{"$ref":"#/$defs/b","$defs":{"b":{"type":"array","uniqueItems":true}}}', ".$defs.b", "uniqueItems"),
        ('{"properties":{"a":{"type":"string","pattern":"(("}}}', ".properties.a", "unclosed"),
        ('{"anyOf":[{"type":"object","minProperties":2}]}', ".anyOf[0].minProperties", "minProperties"),
        ('{"$ref":"#"}', "", "no JSON text"),
        ('{"$ref":"file:///etc/passwd"}', "", "not"),
        ('{"x-guidance":{"lenient":true},"not":{}}', "", "x-guidance"),
        ('{"type":"integer","minimum":5,"maximum":3}', "", "minimum"),
        ("[1]", "", "object"),
        ("{", "", "JSON"),
        ('{"a":' * 65 + "1" + "}" * 65, "", "deep"),
        ("[" * 60_000, "", "deep"),
        ('"' + "x" * 70_000 + '"', "", "70002"),
        (json.dumps({"allOf": [{"anyOf": [{"const": i + j} for j in range(30)]} for i in range(60)]}), "", "large"),
        (json.dumps({"properties": {"p" * 9000: {"not": {}}}}), ".properties.", "not"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(schema: str, place: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "schema")
    assert (refused.value.param or "").startswith(f"schema{place}")
    assert words in refused.value.message
    assert len(refused.value.message) < 1000


def test_the_engine_refuses_what_nobody_checked_before(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="objekt"):
        engine.generate(constrained_request({"type": "objekt"}, 0))
    assert engine.generate(greedy(IDS, 2))
    with pytest.raises(InvalidRequest, match="json_schema has 70"):
        SamplingParams(json_schema="x" * 70_000)
    assert (
        check_follows(engine.generate(constrained_request(json.loads(ANY_OBJECT), 1))[0].results[0], {"type": "object"})
        is not None
    )


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_schema_whose_texts_never_end_is_its_askers_mistake(num_draft_tokens: int, make_engine: MakeEngine) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
    later = {**endless, "properties": {"n": {"enum": [1, 2]}, "a": {"$ref": "#/$defs/b"}}, "required": ["n", "a"]}
    engine = make_engine(num_draft_tokens=num_draft_tokens)
    for schema in ({**endless, "$defs": {"b": endless}}, {**later, "$defs": {"b": endless}}):
        check_schema(json.dumps(schema), "schema")
        with pytest.raises(InvalidRequest, match="cannot continue to match the schema"):
            engine.generate(constrained_request(schema, 0))
    assert check_follows(engine.generate(constrained_request(PERSON, 1))[0].results[0], PERSON)
