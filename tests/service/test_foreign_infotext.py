"""Generation parameters as other tools write them, with JSON values and pairs outside the grammar, through the API."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from diffserve.media.infotext import Infotext, parse_infotext
from tests.service.server import RunningServer
from ui.create.parameters import form_of

HEAD = "a red fox, (snow:1.2)\nNegative prompt: dog\n"
PAIRS = "Steps: 2, Sampler: Euler a, CFG scale: 3, Seed: 42, Size: 64x64"
CIVITAI = '[{"type":"checkpoint","modelVersionId":128713,"modelName":"Dream, Shaper"},{"type":"lora","weight":0.8}]'
HASHES = '{"vae": "735e4c3a44", "model": "ef76aa2332", "lora:ink": "9f"}'

READABLE = {
    "Civitai resources": f"{PAIRS}, Civitai resources: {CIVITAI}, Version: v1.9.4",
    "hashes": f"{PAIRS}, Hashes: {HASHES}, Civitai metadata: {{}}",
    "JSON in the middle": f"Steps: 2, Sampler: Euler a, Tiled Diffusion: {HASHES}, CFG scale: 3, Seed: 42, Size: 64x64",
    "JSON with a key inside": PAIRS.replace("CFG", 'Extra: ["x, Seed: 7, Steps: 9"], CFG'),
    "Windows line ends": f"{PAIRS}\r\n",
}
WITH_SKIPPED = {
    "bare word": (PAIRS.replace("CFG", "sag, CFG"), "'sag'"),
    "odd key": (f"FreeU B1(0): 1.3, {PAIRS}", "'FreeU B1(0): 1.3'"),
    "cut JSON": (f'{PAIRS}, Hashes: {{"vae": "735e4c3a44", "model": ', "'\"model\":'"),
    "no key": (f"{PAIRS}, : 5, Clip skip: 1", "': 5'"),
    "lines below": (
        f"{PAIRS}, Version: v1.6.0\nTemplate: a {{red|blue}} fox\nNegative Template: dog",
        "'Template: a {",
    ),
}


def check(read: Infotext) -> None:
    assert (read.prompt, read.negative_prompt) == ("a red fox, (snow:1.2)", "dog")
    expected = {"Steps": "2", "Sampler": "Euler a", "CFG scale": "3", "Seed": "42", "Size": "64x64"}
    assert {key: read.fields.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", READABLE)
def test_json_values_are_read_completely(name: str) -> None:
    read = parse_infotext(HEAD + READABLE[name])
    check(read)
    assert read.warnings == ()


def test_json_values_keep_their_text() -> None:
    fields = parse_infotext(f"{HEAD}{PAIRS}, Civitai resources: {CIVITAI}, Hashes: {HASHES}, Version: v1").fields
    assert json.loads(fields["Civitai resources"])[0]["modelName"] == "Dream, Shaper"
    assert (json.loads(fields["Hashes"])["model"], fields["Version"]) == ("ef76aa2332", "v1")


@pytest.mark.parametrize("name", WITH_SKIPPED)
def test_pair_outside_the_grammar_is_skipped_and_reported(name: str) -> None:
    line, skipped = WITH_SKIPPED[name]
    read = parse_infotext(HEAD + line)
    check(read)
    [warning] = read.warnings
    assert skipped in warning


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters=",\n\r"), max_size=12), max_size=5),
    st.integers(0, 5),
)
def test_no_text_between_two_commas_loses_the_other_pairs(fragments: list[str], place: int) -> None:
    pairs = PAIRS.split(", ")
    keys = {pair.partition(":")[0] for pair in pairs}
    fragments = [text for text in fragments if text.partition(":")[0].strip() not in keys]
    check(parse_infotext(HEAD + ", ".join([*pairs[:place], *fragments, *pairs[place:]])))


@pytest.mark.parametrize(
    "prompt",
    [
        "portrait: a woman, hair: red, eyes: blue, smiling",
        "(masterpiece:1.2), (fox:1.1), (snow:1.3), (red:1.1)",
        'a fox, "sign: one", {a: 1}',
    ],
)
def test_prompt_with_colons_stays_a_prompt(prompt: str) -> None:
    assert (parse_infotext(prompt).prompt, parse_infotext(prompt).fields) == (prompt, {})


def test_empty_negative_prompt_line_is_no_part_of_the_prompt() -> None:
    read = parse_infotext(f"a fox\nNegative prompt:\n{PAIRS}")
    assert (read.prompt, read.negative_prompt) == ("a fox", "")


@pytest.mark.slow
def test_a1111_generates_from_foreign_infotext_and_reports_skipped_pairs(server: RunningServer) -> None:
    clean = server.client.post("/sdapi/v1/txt2img", json={"infotext": HEAD + PAIRS}).json()
    for line in [*READABLE.values(), *(line for line, _ in WITH_SKIPPED.values())]:
        answer = server.client.post("/sdapi/v1/txt2img", json={"infotext": HEAD + line})
        assert answer.json()["images"] == clean["images"], line
    line, skipped = WITH_SKIPPED["odd key"]
    warned = server.client.post("/sdapi/v1/txt2img", json={"infotext": HEAD + line})
    assert skipped in warned.headers["x-diffserve-warnings"]


@pytest.mark.slow
def test_png_info_reads_foreign_infotext_and_reports_skipped_pairs(server: RunningServer) -> None:
    for line, skipped in [*((line, "") for line in READABLE.values()), *WITH_SKIPPED.values()]:
        chunks, file = PngImagePlugin.PngInfo(), BytesIO()
        chunks.add_text("parameters", HEAD + line)
        Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=chunks)
        answer = server.client.post("/sdapi/v1/png-info", json={"image": base64.b64encode(file.getvalue()).decode()})
        parameters = answer.json()["parameters"]
        assert (parameters["Prompt"], parameters["Negative prompt"]) == ("a red fox, (snow:1.2)", "dog")
        assert (parameters["Steps"], parameters["Seed"]) == ("2", "42")
        assert skipped in answer.headers.get("x-diffserve-warnings", "")


def test_page_parses_foreign_infotext() -> None:
    form = form_of(f"{HEAD}{PAIRS}, Civitai resources: {CIVITAI}", None)
    assert (form.prompt, form.negative_prompt, form.steps, form.seed) == ("a red fox, (snow:1.2)", "dog", "2", "42")
