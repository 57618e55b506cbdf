"""Invalid requests get OpenAI's error object with the value, and the server keeps running."""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

import httpx
import pytest

from diffserve.api.types import Picture
from diffserve.media.images import encode_image
from diffserve.service.http.middleware import TEXT_BODY_BYTES
from diffserve.settings.layers import load_settings
from tests.service.server import GENERATIONS, RunningServer, error_of, files_of, wait_for

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
PIXEL = base64.b64encode(encode_image(Picture(width_px=64, height_px=64, data=bytes(3 * 64 * 64)))).decode()
BAD_CONTROLS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"image": "!!"}, "controlnets[0].image", "invalid_image", "is not base64"),
    ({"image": "AAAA"}, "controlnets[0].image", "invalid_image", "not a PNG, JPEG or WebP"),
    ({"scale": 2.5}, "controlnets[0].scale", "invalid_value", "2.5"),
    ({"start": 0.5, "end": 0.5}, "controlnets", "invalid_value", "start < end"),
    ({"name": "../a"}, "controlnets", "invalid_value", "give a path below the folder"),
    ({"size": 1}, "controlnets[0].size", "invalid_value", "unknown field"),
    ({"resize": 1}, "controlnets[0].resize", "invalid_value", "1"),
    ({}, "controlnets", "unknown_controlnet", "start it with --controlnet-dir"),
]
BAD_REFERENCES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"image": "!!"}, "references[0].image", "invalid_image", "is not base64"),
    ({"image": "AAAA"}, "references[0].image", "invalid_image", "not a PNG, JPEG or WebP"),
    ({"scale": -0.5}, "references[0].scale", "invalid_value", "-0.5"),
    ({"start": 0.5, "end": 0.5}, "references", "invalid_value", "start < end"),
    ({"name": "../a"}, "references", "invalid_value", "give a path below the folder"),
    ({"preprocessor": "canny"}, "references[0].preprocessor", "invalid_value", "unknown field"),
    ({}, "references", "unknown_reference", "start it with --reference-dir"),
    ({"name": "a"}, "references", "unknown_reference", "start it with --reference-dir"),
]
MAX_BODY_BYTES = load_settings(env={}).serve.max_body_bytes


@pytest.fixture(scope="module", autouse=True)
def log_start(shared_server: RunningServer) -> int:
    """Return the offset in the log at which the first of these tests began."""
    return shared_server.errors.stat().st_size


def post(server: RunningServer, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    return server.client.post(GENERATIONS, content=content, headers=JSON if headers is None else headers)


def raw_exchange(server: RunningServer, data: bytes, *, patience_s: float = 20.0) -> bytes:
    """Send ``data`` unchanged and read until the server closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience_s) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"null", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b'{"prompt": "a"', "invalid_json"),
        (b'{"prompt": "a",}', "invalid_json"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "a", "guidance_scale": NaN}', "invalid_value"),
        (b'{"prompt": "a", "guidance_scale": Infinity}', "invalid_value"),
        (b'{"prompt": "a", "guidance_scale": 1e400}', "invalid_value"),
        (b'{"prompt": "a", "foo": NaN}', "invalid_json"),
        (b'{"prompt": "a", "foo": [-Infinity]}', "invalid_json"),
        (b'{"prompt": "a", "foo": 1e400}', "invalid_json"),
        (b"[" * 10_000 + b"]" * 10_000, "invalid_json"),
        (b'{"foo": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "foo": ' + b"[" * 40 + b"]" * 40 + b"}", "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_parameter"),
        (b'{"prompt": "a", "seed": 1, "\\u0073eed": 2}', "duplicate_parameter"),
        (b'{"prompt": "a", "foo": {"bar": 1, "bar": 1}}', "duplicate_parameter"),
    ],
    ids=[
        *("empty", "null", "list", "text", "truncated", "trailing-comma", "bom", "utf16", "bad-utf8", "lone-surrogate"),
        *("nan", "infinity", "1e400", "nan-elsewhere", "infinity-deeper", "1e400-elsewhere"),
        *("deep-list", "deep-field", "forty-levels"),
        *("twice", "twice-in-disguise", "twice-deeper"),
    ],
)
def test_invalid_json_is_refused(server: RunningServer, content: bytes, code: str) -> None:
    response = post(server, content)
    assert response.status_code == 400
    assert error_of(response)["code"] == code


WRONG_VALUES: list[tuple[str, dict[str, Any], str | None, str, str]] = [
    ("no-prompt", {"prompt": ...}, "prompt", "missing_required_parameter", "prompt"),
    ("empty-prompt", {"prompt": ""}, "prompt", "empty_prompt", "empty"),
    ("blank-prompt", {"prompt": " \n\t"}, "prompt", "empty_prompt", "empty"),
    ("long-prompt", {"prompt": "a" * 32_001}, "prompt", "string_above_max_length", "32001"),
    ("list-prompt", {"prompt": ["a"]}, "prompt", "invalid_value", '["a"]'),
    ("number-prompt", {"prompt": 7}, "prompt", "invalid_value", "7"),
    ("object-prompt", {"prompt": {"a": 1}}, "prompt", "invalid_value", '{"a": 1}'),
    ("long-negative", {"negative_prompt": "a" * 1_000_000}, "negative_prompt", "string_above_max_length", "1000000"),
    *(
        (f"n-{value}", {"n": value}, "n", "invalid_value", json.dumps(value))
        for value in (0, -1, 11, 10**9, 2**63, 1.5, 1.0, "2", True)
    ),
    *(
        (f"size-{value}", {"size": value}, "size", "invalid_size", "")
        for value in (
            "0x0",
            "0x512",
            "-8x8",
            "100000x8",
            "8x100000",
            "99999999999x1",
            "512×512",
            " 512x512",
            "512",
            "63x64",
        )
    ),
    ("size-over", {"size": "2048x2056"}, "size", "invalid_size", "2048x2056"),
    ("size-number", {"size": 512}, "size", "invalid_value", "512"),
    ("width-alone", {"width": 64}, "size", "invalid_size", "together"),
    ("width-and-size", {"width": 64, "height": 64, "size": "128x128"}, "size", "invalid_size", "128x128"),
    ("width-text", {"width": "64", "height": 64}, "width", "invalid_value", '"64"'),
    *(
        (f"steps-{value}", {"num_inference_steps": value}, "num_inference_steps", "invalid_value", json.dumps(value))
        for value in (0, -1, 1001, 10**9, 2.5, "20")
    ),
    ("steps-alias", {"steps": 0, "num_inference_steps": ...}, "steps", "invalid_value", "0"),
    ("steps-twice", {"steps": 3}, "num_inference_steps", "invalid_value", "3"),
    *(
        (f"guidance-{value}", {"guidance_scale": value}, "guidance_scale", "invalid_value", json.dumps(value))
        for value in (-1, 31, "NaN", 1e308, True)
    ),
    ("template-mode", {"template": "all"}, "template", "invalid_value", "all"),
    ("template-type", {"template": 1}, "template", "invalid_value", "1"),
    ("template-open", {"template": "random", "prompt": "a {cat"}, "prompt", "invalid_value", "does not close"),
    ("template-file", {"template": "random", "prompt": "__../a__"}, "prompt", "invalid_value", "--wildcard-dir"),
    ("template-all", {"template": "combinatorial", "prompt": "{a|b}" * 20}, "prompt", "invalid_value", "1048576"),
    ("parts-nine", {"prompt": " AND ".join("abcdefghi")}, "prompt", "invalid_value", "has 9 parts"),
    ("area-reversed", {"prompt": "a AND b MASK(0.5 0, 0 1)"}, "prompt", "invalid_value", "is not an area"),
    ("area-beyond", {"prompt": "b MASK(0 1, 0 1.5)"}, "prompt", "invalid_value", "is not an area"),
    ("area-words", {"prompt": "b MASK(left half)"}, "prompt", "invalid_value", "is not an area"),
    ("area-twice", {"prompt": "b MASK(0 1, 0 1) MASK(0 1, 0 1)"}, "prompt", "invalid_value", "has 2 areas"),
    ("part-weight", {"prompt": "a AND b :11"}, "prompt", "invalid_value", "the weight 11"),
    ("deep-brackets", {"prompt": "[a|" * 9 + "]" * 9}, "prompt", "invalid_value", "nested more than 8 deep"),
    ("threshold-zero", {"similarity_threshold": 0}, "similarity_threshold", "invalid_value", "more than 0"),
    ("merging-between", {"token_merging": 0.33}, "token_merging", "invalid_value", "multiple of 0.05"),
    ("interval-text", {"guidance_interval": "0,1"}, "guidance_interval", "invalid_value", "list"),
    (
        "sizes-none",
        {"micro_conditioning": {"crop": [0, 0]}},
        "micro_conditioning",
        "invalid_value",
        "has no size conditioning",
    ),
    ("sizes-odd", {"micro_conditioning": {"crop": [0, -1]}}, "micro_conditioning.crop[1]", "invalid_value", "-1"),
    ("lora-alone", {"loras": "ink"}, "loras", "invalid_value", "list"),
    ("lora-empty", {"loras": [{"name": ""}]}, "loras[0].name", "empty_name", "loras[0].name is empty"),
    ("lora-path", {"loras": [{"name": "../ink"}]}, "loras", "invalid_value", "give a path below the folder"),
    ("lora-scale", {"loras": [{"name": "ink", "scale": 11}]}, "loras[0].scale", "invalid_value", "11"),
    ("loras-fifty", {"loras": [{"name": "ink"}] * 50}, "loras", "array_above_max_length", "at most 8"),
    ("lora-unknown", {"loras": [{"name": "ink"}]}, "loras", "unknown_lora", "start it with --lora-dir"),
    ("lora-tag", {"prompt": "a cat <lora:ink:nan>"}, "loras", "invalid_value", "nan"),
    ("control-alone", {"controlnets": {}}, "controlnets", "invalid_value", "list"),
    ("control-bare", {"controlnets": [{"name": "a"}]}, "controlnets[0].image", "missing_required_parameter", "missing"),
    *(
        (f"control-{place}", {"controlnets": [{"name": "a", "image": PIXEL, **fields}]}, param, code, message)
        for place, (fields, param, code, message) in enumerate(BAD_CONTROLS)
    ),
    (
        "control-size",
        {"size": "128x128", "controlnets": [{"name": "a", "image": PIXEL}]},
        "controlnets",
        "invalid_image",
        "64x64 px, the generated image 128x128 px; give one of 128x128 px, or ask for size 64x64, or set resize",
    ),
    ("reference-alone", {"references": {}}, "references", "invalid_value", "list"),
    ("reference-bare", {"references": [{}]}, "references[0].image", "missing_required_parameter", "missing"),
    *(
        (f"reference-{place}", {"references": [{"image": PIXEL, **fields}]}, param, code, message)
        for place, (fields, param, code, message) in enumerate(BAD_REFERENCES)
    ),
    ("references-nine", {"references": [{}] * 9}, "references", "array_above_max_length", "at most 8"),
    ("controls-five", {"controlnets": [{}] * 5}, "controlnets", "array_above_max_length", "at most 4"),
    ("refiner-none", {"refiner": True}, "switch_at", "invalid_value", "has no refiner to switch to"),
    ("switch-twice", {"refiner": False, "switch_at": 0.5}, "switch_at", "invalid_value", "refiner is false but"),
    ("switch-over", {"switch_at": 1.2}, "switch_at", "invalid_value", "1.2"),
    ("best-none", {"best_of": 2}, "best_of", "invalid_value", "no scorer is loaded"),
    ("best-below-n", {"n": 3, "best_of": 2}, "best_of", "invalid_value", "give at least n, which is 3"),
    ("best-many", {"best_of": 11}, "best_of", "invalid_value", "at most 10"),
    ("cache-interval", {"cache_interval": 0}, "cache_interval", "invalid_value", "at least 1"),
    *(
        (f"seed-{value}", {"seed": value}, "seed", "invalid_value", json.dumps(value))
        for value in (-2, 2**63, 2**64, "42", 1.0, True)
    ),
    ("eta-high", {"eta": 1.5}, "eta", "invalid_value", "1.5"),
    ("sampler", {"sampler": "warp"}, "sampler", "unknown_sampler", "dpmpp_2m"),
    ("sampler-path", {"sampler": "../../x"}, "sampler", "unknown_sampler", "../../x"),
    ("sampler-long", {"sampler": "x" * 10_240}, "sampler", "unknown_sampler", "euler_a"),
    ("sampler-padded", {"sampler": "ddim" + " " * 70 + "x"}, "sampler", "unknown_sampler", "75 characters"),
    ("scheduler", {"scheduler": "warp"}, "scheduler", "unknown_sampler", "dpmpp_2m"),
    ("scheduler-beside", {"sampler": "ddim", "scheduler": "warp"}, "scheduler", "unknown_scheduler", "karras"),
    ("schedule-twice", {"sigma_schedule": "exponential", "scheduler": "beta"}, "scheduler", "invalid_value", "beta"),
    *(
        (f"sampler-and-{name}", {"sampler": "DPM++ 2M Karras", name: "beta"}, "sampler", "invalid_value", "karras")
        for name in ("sigma_schedule", "scheduler")
    ),
    ("seed-last", {"seed": 2**63 - 1, "n": 2}, "seed", "invalid_value", "the last of 2 images uses seed + 1"),
    ("spacing", {"spacing": "warp"}, "spacing", "invalid_value", "warp"),
    ("sigma-schedule", {"sigma_schedule": "warp"}, "sigma_schedule", "invalid_value", "warp"),
    ("response-format", {"response_format": "exe"}, "response_format", "invalid_value", '"exe"'),
    ("svg", {"output_format": "svg"}, "output_format", "invalid_value", '"svg"'),
    ("compression", {"output_compression": 101}, "output_compression", "invalid_value", "101"),
    ("transparent", {"background": "transparent"}, "background", "unsupported_value", "opaque"),
    ("stream-text", {"stream": "yes"}, "stream", "invalid_value", '"yes"'),
    ("partial-images", {"partial_images": 4}, "partial_images", "invalid_value", "4"),
    ("user-long", {"user": "a" * 10_240}, "user", "string_above_max_length", "10240"),
    ("user-control", {"user": "a\x1b"}, "user", "invalid_value", "control"),
    ("embeds", {"prompt_embeds": [[0.1]]}, "prompt_embeds", "unsupported_parameter", "tensors"),
    ("kwargs", {"extra_body": {"kwargs": {}}}, "extra_body", "unsupported_parameter", "not supported"),
    ("strength", {"strength": 0.5}, "strength", "unsupported_parameter", "takes no images"),
    ("hires-low", {"hires_scale": 0.5}, "hires_scale", "invalid_value", "0.5"),
    ("hires-size", {"hires_size": "64"}, "hires_size", "invalid_size", "write it as WIDTHxHEIGHT"),
    ("hires-twice", {"hires_scale": 2.0, "hires_size": "256x256"}, "hires_size", "invalid_value", "give one of them"),
    ("hires-huge", {"hires_size": "4096x64"}, "hires_size", "invalid_value", "each side must lie between"),
    ("hires-strength", {"hires_scale": 2.0, "hires_strength": 2}, "hires_strength", "invalid_value", "2"),
    ("hires-steps", {"hires_scale": 2.0, "hires_steps": 0}, "hires_steps", "invalid_value", "0"),
    ("hires-sampler", {"hires_scale": 1.0, "hires_sampler": "warp"}, "hires_sampler", "unknown_sampler", "warp"),
    ("hires-schedule", {"hires_scale": 1.0, "hires_schedule": "warp"}, "hires_schedule", "invalid_value", "warp"),
    ("hires-upscaler", {"hires_scale": 1.0, "hires_upscaler": "warp"}, "hires_upscaler", "unknown_upscaler", "warp"),
    ("hires-tag", {"hires_scale": 1.0, "hires_prompt": "a <lora:x:1>"}, "hires_prompt", "invalid_value", "LoRA tag"),
    ("tile-grid", {"tile_size": 13}, "tile_size", "invalid_value", "must be a multiple of"),
    ("tile-large", {"tile_size": 2048}, "tile_size", "invalid_value", "this model allows at most"),
    ("tile-overlap", {"tile_size": 64, "tile_overlap": 64}, "tile_overlap", "invalid_value", "less than tile_size"),
    ("tiles-many", {"tile_size": 8, "size": "2048x2048"}, "tile_size", "invalid_value", "at most 1024 are allowed"),
    ("outpaint-none", {"outpaint": "0,0,64,0"}, "outpaint", "invalid_value", "without a start image"),
    (
        "callback",
        {"callback_url": "http://127.0.0.1/"},
        "callback_url",
        "unsupported_parameter",
        "does not send callbacks",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"), [case[1:] for case in WRONG_VALUES], ids=[case[0] for case in WRONG_VALUES]
)
def test_an_invalid_value_is_reported(
    server: RunningServer, fields: dict[str, Any], param: str | None, code: str, words: str
) -> None:
    body = {"prompt": "a red fox", "num_inference_steps": 1} | fields
    response = post(server, json.dumps({name: value for name, value in body.items() if value is not ...}).encode())
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert words in error["message"]
    assert len(error["message"]) < 1000


UPSCALING: list[tuple[dict[str, Any], str, str, str]] = [
    ({"image": None}, "image", "missing_required_parameter", "image is missing"),
    ({"image": "!!"}, "image", "invalid_image", "is not base64"),
    ({"image": "AAAA"}, "image", "invalid_image", "not a PNG, JPEG or WebP"),
    ({"upscaler": "warp"}, "upscaler", "unknown_upscaler", "there is no upscaler 'warp'; the known ones are"),
    ({"upscaler": "../warp"}, "upscaler", "unknown_upscaler", "../warp"),
    ({"scale": 0}, "scale", "invalid_value", "more than 0"),
    ({"scale": 1e400}, "scale", "invalid_value", "finite"),
    ({"size": "512"}, "size", "invalid_size", '"512"'),
    ({"size": "64x64", "scale": 2}, "size", "invalid_value", "both given"),
    ({"size": "8192x8192"}, "size", "invalid_value", "8192x8192 pixels; at most 16,777,216"),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), UPSCALING)
def test_an_invalid_upscaling_is_reported(
    server: RunningServer, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    body = json.dumps({"image": PIXEL} | fields).replace("Infinity", "1e400")
    response = server.client.post("/v1/images/upscale", content=body.encode(), headers=JSON)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]


@pytest.mark.parametrize(
    "model", ["nope", "../../etc/passwd", "file:///etc/passwd", "org/repo", "https://x.test/y", ""]
)
def test_an_unknown_model_is_a_404(server: RunningServer, model: str) -> None:
    response = server.paint(model=model)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({}, 415, "unsupported_media_type"),
        ({**JSON, "Content-Encoding": "gzip"}, 415, "unsupported_content_encoding"),
        ({**JSON, "Origin": "null"}, 403, "origin_not_allowed"),
        ({**JSON, "Origin": "https://evil.test"}, 403, "origin_not_allowed"),
        ({**JSON, "Origin": "http://127.0.0.1:99999"}, 403, "origin_not_allowed"),
        ({**JSON, "Origin": "http://localhost.evil.test"}, 403, "origin_not_allowed"),
        ({**JSON, "Origin": "http://localhost@evil.test"}, 403, "origin_not_allowed"),
        ({**JSON, "Sec-Fetch-Site": "cross-site"}, 403, "origin_not_allowed"),
        ({**JSON, "Host": "evil.test"}, 403, "host_not_allowed"),
        ({**JSON, "Host": "127.0.0.1:99999"}, 403, "host_not_allowed"),
    ],
)
def test_a_foreign_origin_or_another_content_type_is_refused(
    server: RunningServer, headers: dict[str, str], status: int, code: str
) -> None:
    response = post(server, b'{"prompt": "a red fox"}', headers)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("origin", ["http://localhost:5173", "http://127.0.0.1:8000", "http://[::1]:3000"])
def test_a_page_on_this_machine_may_send_requests(server: RunningServer, origin: str) -> None:
    preflight = server.client.options(
        GENERATIONS, headers={"Origin": origin, "Access-Control-Request-Headers": "content-type"}
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-headers"] == "content-type"
    described = server.client.get("/openapi.json").json()["paths"]
    methods = {method.upper() for path in described.values() for method in path}
    assert {"PUT"} <= methods <= set(preflight.headers["access-control-allow-methods"].split(", "))
    answer = post(server, b'{"prompt": "a red fox", "steps": 1}', {**JSON, "Origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin


def test_options_requests_are_refused_only_for_foreign_origins(server: RunningServer) -> None:
    assert server.client.options(GENERATIONS).status_code == 204
    assert server.client.options(GENERATIONS, headers={"Origin": "https://evil.test"}).status_code == 403


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc", 404, "model_not_found"),
        ("GET", "/v1/images/files/nope", 404, "picture_not_found"),
        ("GET", "/images/generations", 405, "method_not_allowed"),
        ("GET", "/v1/images/generations/", 405, "method_not_allowed"),
        ("GET", GENERATIONS, 405, "method_not_allowed"),
        ("DELETE", GENERATIONS, 405, "method_not_allowed"),
        ("POST", f"{GENERATIONS}/img-0123/cancel", 404, "request_not_found"),
        ("GET", f"{GENERATIONS}/img-0123/cancel", 405, "method_not_allowed"),
        ("TRACE", GENERATIONS, 405, "method_not_allowed"),
        ("BREW", GENERATIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/images/upscale", 405, "method_not_allowed"),
    ],
)
def test_other_paths_and_methods_are_refused(
    server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert ("allow" in response.headers) is (status == 405)


def test_a_head_request_to_a_post_path_is_405(server: RunningServer) -> None:
    response = server.client.head(GENERATIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_long_body_is_refused_before_it_is_sent(server: RunningServer) -> None:
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    answer = raw_exchange(server, f"{head}{MAX_BODY_BYTES + 1}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


def test_a_long_body_of_unknown_length_is_refused_while_it_arrives(server: RunningServer) -> None:
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may close the connection
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_long_body_within_the_limit_is_read(server: RunningServer) -> None:
    body = {"prompt": "a red fox", "steps": 1, "foo": "x" * 1_000_000}
    assert post(server, json.dumps(body).encode()).status_code == 200


def test_paths_without_images_accept_at_most_a_megabyte(server: RunningServer) -> None:
    body = {"prompt": "a red fox", "steps": 1, "foo": "x" * TEXT_BODY_BYTES}
    response = post(server, json.dumps(body).encode())
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_a_million_unknown_keys_do_not_stall_the_server(server: RunningServer) -> None:
    many = b'{"prompt": "a red fox", ' + b", ".join(b'"k%d": 1' % number for number in range(1_600_000)) + b"}"
    assert post(server, many).status_code == 413
    fewer = many[: TEXT_BODY_BYTES - 20] + b'": 1}'
    response = post(server, fewer)
    assert (response.status_code, error_of(response)["code"]) == (400, "body_too_complex")


@pytest.mark.parametrize(
    "data",
    [
        b"HELLO\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    ],
    ids=["no-http", "megabyte-header", "negative-length", "tls"],
)
def test_invalid_http_gets_an_error_object(server: RunningServer, data: bytes) -> None:
    try:
        answer = raw_exchange(server, data)
    except (ConnectionResetError, BrokenPipeError):
        return  # closing the connection before the end is a valid answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_http"


def test_a_disconnect_within_the_body_leaves_no_trace(server: RunningServer) -> None:
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(f'{head}Content-Length: 99\r\n\r\n{{"prompt": '.encode())
    wait_for(lambda: '"status":499' in server.errors.read_text(), 60.0, "the line in the log")
    assert server.num_requests() == 0


def test_images_are_unchanged_after_all_invalid_requests(server: RunningServer) -> None:
    first = files_of(server.paint(seed=123))
    post(server, b"{")
    server.paint(sampler="warp")
    assert files_of(server.paint(seed=123)) == first


def test_the_log_is_json_lines_without_prompts(server: RunningServer, log_start: int) -> None:
    server.paint("a very secret prompt\r\nwith \x1b[2J codes")
    server.paint("a very secret prompt", sampler="warp")
    lines = server.errors.read_bytes()[log_start:].decode().splitlines()
    records = [json.loads(line) for line in lines]
    assert {"ts", "level", "event"} <= set(records[-1])
    assert not [line for line in lines if "secret" in line]
    assert not [record for record in records if record["level"] in ("error", "critical")]
