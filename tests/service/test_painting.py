"""Conversion of bodies to requests and of errors to answers, without a socket."""

from __future__ import annotations

import errno
import json
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import (
    DeadlineExceeded,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    NumericalError,
    QueueFull,
)
from diffserve.api.types import Failed, ModelInfo, RewriteOptions, ServedModel
from diffserve.service.http.addresses import is_loopback
from diffserve.service.http.bodies import parse
from diffserve.service.http.errors import HttpError, error_of, reply_to
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.lifecycle import header_text
from diffserve.service.models import ALIASES, describe_models, find_model, model_list
from diffserve.service.texts.schemas import RewriterMode
from diffserve.settings.config import ServeConfig
from diffserve.settings.layers import load_settings

CONFIG: ServeConfig = load_settings(env={}).serve
INFO = ModelInfo(
    model_id="embedded",
    family="sd15",
    digest="sha256:00",
    prediction_type="epsilon",
    vae_factor=8,
    latent_channels=4,
    size_multiple_px=8,
    good_sizes=((128, 128), (128, 192), (192, 128)),
    max_side_px=192,
    train_timesteps=1000,
    is_inpainting=False,
    default_sampler="dpmpp_2m",
    default_num_steps=25,
    default_guidance_scale=3.0,
    default_spacing="trailing",
    device="cpu",
    dtype="float32",
    choice_reason="",
    num_parameters=0,
    weights_bytes=0,
)


def plan(**fields: Any) -> ImagePlan:
    return plan_images(parse(GenerateBody, json.dumps({"prompt": "a fox", **fields}).encode()), INFO, CONFIG, "img-1")


def test_brackets_of_a_plain_prompt_have_no_weight_and_a_wish_is_unchanged() -> None:
    prompts = {"prompt": "a (red) fox", "negative_prompt": "[night]"}
    for syntax, expected in ((None, ("a (red) fox", "[night]")), ("plain", ("a \\(red\\) fox", "\\[night\\]"))):
        request = plan(**prompts, prompt_syntax=syntax).request
        assert (request.prompt, request.negative_prompt) == expected
    assert plan(**prompts, prompt_syntax="plain", prompt_rewriter="auto").request.prompt == "a (red) fox"
    with pytest.raises(InvalidRequest, match="prompt_syntax is"):
        plan(prompt_syntax="comfy")


@pytest.mark.parametrize(
    ("default", "field", "expected"),
    [
        ("off", None, None),
        ("auto", None, RewriteOptions()),
        ("force", None, RewriteOptions(force=True)),
        ("auto", "off", None),
        ("off", "force", RewriteOptions(force=True)),
        ("off", {}, RewriteOptions()),
        ("off", {"style": "prose", "seed": 3}, RewriteOptions(style="prose", seed=3)),
        ("off", {"seed": -1, "system": "be brief", "force": True}, RewriteOptions(system="be brief", force=True)),
    ],
)
def test_the_rewriter_option_comes_from_the_body_or_the_server_default(
    default: RewriterMode, field: object, expected: RewriteOptions | None
) -> None:
    body = parse(GenerateBody, json.dumps({"prompt": "a fox", "prompt_rewriter": field}).encode())
    assert plan_images(body, INFO, CONFIG, "img-1", rewriter=default).request.rewriting == expected


@pytest.mark.parametrize(
    ("num_previews", "steps", "every"), [(0, 20, 0), (1, 20, 10), (3, 20, 5), (3, 7, 2), (3, None, 7)]
)
def test_previews_are_spread_over_the_steps(num_previews: int, steps: int | None, every: int) -> None:
    fields = {"partial_images": num_previews, "steps": steps}
    assert plan(stream=True, **fields).request.preview_every == every
    assert plan(**fields).request.preview_every == 0


def test_previews_are_spread_over_the_steps_of_a_few_step_adapter() -> None:
    few = "a fox <lora:sdxl_lightning_4step_lora>"
    assert plan(stream=True, partial_images=1, prompt=few).request.preview_every == 2
    assert plan(stream=True, partial_images=1, prompt=few, steps=20).request.preview_every == 10


def test_a_bare_prompt_leaves_everything_to_the_model() -> None:
    painting = plan()
    request = painting.request
    assert (request.width_px, request.height_px, request.num_images, request.seed) == (128, 128, 1, None)
    assert (request.diffusion.sampler, request.diffusion.num_steps, request.diffusion.guidance_scale) == (None,) * 3
    assert (request.request_id, request.deadline_s) == ("img-1", CONFIG.request_timeout_s)
    assert (painting.image_format, painting.compression, painting.warnings) == ("png", 100, ())


def test_every_field_reaches_the_request() -> None:
    request = plan(
        negative_prompt="rain",
        n=3,
        size="192x128",
        steps=9,
        cfg_scale=2,
        sampler="k_euler",
        seed=5,
        eta=0.5,
        spacing="linspace",
    ).request
    assert (request.negative_prompt, request.num_images, request.seed) == ("rain", 3, 5)
    assert (request.width_px, request.height_px) == (192, 128)
    diffusion = request.diffusion
    assert (diffusion.num_steps, diffusion.guidance_scale, diffusion.sampler) == (9, 2.0, "k_euler")
    assert (diffusion.eta, diffusion.spacing) == (0.5, "linspace")


@pytest.mark.parametrize(
    ("size", "painted"), [("512x512", (128, 128)), ("1024x1536", (128, 192)), ("64x64", (128, 128))]
)
def test_a_size_is_generated_at_a_resolution_that_suits_the_model(size: str, painted: tuple[int, int]) -> None:
    painting = plan(size=size)
    assert (painting.request.width_px, painting.request.height_px) == painted
    assert size in painting.warnings[0]


@pytest.mark.parametrize("seed", [None, -1])
def test_a_missing_seed_is_random(seed: int | None) -> None:
    assert plan(seed=seed).request.seed is None


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("x", param="n"), 400, "invalid_request_error", "invalid_value"),
        (ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (QueueFull("x", retry_after_s=3.2), 429, "rate_limit_error", "queue_full"),
        (EngineUnavailable("x"), 503, "server_error", "engine_unavailable"),
        (DeadlineExceeded("x"), 504, "server_error", "deadline_exceeded"),
        (NumericalError("x"), 500, "server_error", "numerical_error"),
        (HttpError(403, "x", code="origin_not_allowed"), 403, "permission_error", "origin_not_allowed"),
        (HttpError(415, "x", code="unsupported_media_type"), 415, "invalid_request_error", "unsupported_media_type"),
    ],
)
def test_every_error_has_its_status_type_and_code(error: DiffserveError, status: int, kind: str, code: str) -> None:
    reply = reply_to(error)
    body = msgspec.json.decode(reply.body)["error"]
    assert (reply.status, body["type"], body["code"], body["param"]) == (status, kind, code, error.param)
    assert ("x-should-retry" in reply.headers) is (status in (500, 504))
    assert ("Retry-After" in reply.headers) is (status in (429, 503))


@pytest.mark.parametrize(("after_s", "header"), [(0.0, "1"), (3.2, "4"), (1e9, "60"), (60.0, "60")])
def test_retry_after_is_a_whole_number_from_1_to_60(after_s: float, header: str) -> None:
    headers = reply_to(QueueFull("x", retry_after_s=after_s)).headers
    assert headers["Retry-After"] == header
    assert 0 < int(headers["retry-after-ms"]) <= 60_000


def test_an_internal_error_reveals_no_details() -> None:
    full = reply_to(OSError(errno.ENOSPC, "No space left on device", "/secret/path"))
    assert (full.status, b"disk is full" in full.body, b"secret" in full.body) == (507, True, False)
    limited = reply_to(OSError(errno.EFBIG, "File too large", "/secret/path"))
    sick = reply_to(OSError(errno.EIO, "Input/output error", "/secret/path"))
    assert (limited.status, limited.body) == (507, full.body)
    assert (sick.status, b"disk_error" in sick.body, b"secret" in sick.body) == (507, True, False)
    reply = reply_to(RuntimeError("/secret/path"))
    assert reply.status == 500
    assert b"secret" not in reply.body


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Failed(request_id="a", code="deadline_exceeded", message="x"), DeadlineExceeded),
        (Failed(request_id="a", code="invalid_value", message="x", param="size"), InvalidRequest),
        (Failed(request_id="a", code="numerical_error", message="x"), DiffserveError),
        (Failed(request_id="a", code="internal_error", message="RuntimeError: /secret/path"), DiffserveError),
    ],
)
def test_a_failed_event_is_the_error_it_stands_for(event: Failed, kind: type[DiffserveError]) -> None:
    error = error_of(event)
    assert type(error) is kind
    assert error.code == event.code
    assert "secret" not in error.message


def test_a_model_is_selected_by_its_id_and_by_every_alias() -> None:
    models = [ServedModel(name="embedded", info=INFO, is_loaded=True)]
    for name in (None, "embedded", *ALIASES):
        assert find_model(name, models) is INFO
    listed = [entry["id"] for entry in model_list(1, describe_models({}, models, None, CONFIG))["data"]]
    assert listed == ["embedded", *ALIASES]
    with pytest.raises(ModelNotFound, match='"nope"; embedded is loaded'):
        find_model("nope", models)


def test_several_models_are_selected_by_name_and_the_first_is_the_default() -> None:
    other = msgspec.structs.replace(INFO, model_id="gpt-image-1")
    models = [
        ServedModel(name="embedded", info=INFO, is_loaded=True),
        ServedModel(name="gpt-image-1", info=other, is_loaded=False),
        ServedModel(name="broken", info=None, is_loaded=False, problem="broken: its file was cut short."),
    ]
    assert [find_model(name, models) for name in (None, "embedded", "dall-e-3")] == [INFO] * 3
    assert find_model("gpt-image-1", models) is other, "a name goes before an alias"
    models_by_name = describe_models({}, models, None, CONFIG)
    assert [entry["loaded"] for entry in models_by_name.values()] == [True, False, False]
    assert models_by_name["broken"] == {
        "loaded": False,
        "problem": "broken: its file was cut short.",
        "endpoints": [],
    }
    for name in ("nope", "../embedded", "/models/embedded", ""):
        with pytest.raises(ModelNotFound, match="embedded, gpt-image-1, broken are served"):
            find_model(name, models)
    with pytest.raises(ModelLoadError, match="cut short"):
        find_model("broken", models)


def test_a_header_has_printable_ascii_of_bounded_length() -> None:
    text = header_text(["a\r\nb", "狐", "x" * 5000])
    assert text.startswith("a  b | \\u72d0 | xxx")
    assert len(text) == 1000


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("ui.localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.168.1.5", False),
        ("localhost.evil.test", False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
