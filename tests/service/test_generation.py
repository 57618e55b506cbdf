"""Image generation over a real socket: count, size, format, seed and metadata."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from PIL import Image

from diffserve.media.images import DIGITAL_SOURCE_TYPE, read_infotext
from diffserve.media.infotext import SOFTWARE, parse_infotext
from schedulers import SAMPLERS
from tests.service.server import GENERATIONS, RunningServer, files_of

pytestmark = pytest.mark.slow


def size_of(file: bytes) -> tuple[int, int]:
    image = Image.open(BytesIO(file))
    image.load()
    return image.size


def test_a_bare_prompt_gives_one_png_of_the_native_size(server: RunningServer) -> None:
    response = server.client.post("/v1/images/generations", json={"prompt": "a red fox", "steps": 2})
    body = response.json()
    (file,) = files_of(response)
    assert (file[:4], size_of(file)) == (b"\x89PNG", (64, 64))
    assert (body["size"], body["output_format"], body["quality"]) == ("64x64", "png", "auto")
    assert (body["model"], body["num_inference_steps"], body["background"]) == ("sd15", 2, "opaque")
    assert body["data"][0]["revised_prompt"] is None
    assert body["warnings"] == []
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert response.headers["x-request-id"] == body["id"]
    assert "x-diffserve-warnings" not in response.headers


def test_an_omitted_seed_is_random_and_reported(server: RunningServer) -> None:
    first, second = (server.paint(seed=-1), server.paint(seed=-1))
    seeds = [response.json()["data"][0]["seed"] for response in (first, second)]
    assert seeds[0] != seeds[1]
    assert files_of(server.paint(seed=seeds[0])) == files_of(first)


def test_image_i_of_a_batch_is_the_image_of_seed_plus_i(server: RunningServer) -> None:
    response = server.paint(seed=40, n=3)
    assert [entry["seed"] for entry in response.json()["data"]] == [40, 41, 42]
    assert files_of(response) == [files_of(server.paint(seed=seed))[0] for seed in (40, 41, 42)]


def test_varied_images_share_a_seed_and_have_different_variation_seeds(server: RunningServer) -> None:
    response = server.paint(seed=7, variation_seed=-1, variation_strength=0.3, n=2)
    answer = response.json()
    first = answer["data"][0]["variation_seed"]
    assert [(image["seed"], image["variation_seed"]) for image in answer["data"]] == [(7, first), (7, first + 1)]
    assert answer["variation_strength"] == 0.3
    assert "variation_seed" not in answer, "each picture has its own"
    alone = server.paint(seed=7, variation_seed=first + 1, variation_strength=0.3)
    assert files_of(alone) == files_of(response)[1:]
    assert "variation_seed" not in server.paint(seed=7).json()["data"][0]
    with server.client.stream(
        "POST", GENERATIONS, json={"prompt": "a red fox", "num_inference_steps": 2, "seed": 7, "stream": True,
                                   "variation_strength": 0.3, "variation_seed": first + 1},
    ) as stream:  # fmt: skip
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {")]
    assert (events[-1]["seed"], events[-1]["variation_seed"], events[-1]["b64_json"]) == (
        7, first + 1, answer["data"][1]["b64_json"],
    )  # fmt: skip


@pytest.mark.parametrize("size", ["512x512", "1024x1024", "768x512", "64x64", "101x67", "2048x64"])
def test_any_size_is_delivered_exactly(server: RunningServer, size: str) -> None:
    response = server.paint(size=size)
    (file,) = files_of(response)
    body = response.json()
    assert f"{size_of(file)[0]}x{size_of(file)[1]}" == size == body["size"]
    painted_elsewhere = any("resized" in warning for warning in body["warnings"])
    assert painted_elsewhere is (size != "64x64")
    assert ("x-diffserve-warnings" in response.headers) is painted_elsewhere


def test_width_and_height_are_equivalent_to_size(server: RunningServer) -> None:
    assert files_of(server.paint(width=96, height=72)) == files_of(server.paint(size="96x72"))


@pytest.mark.parametrize(
    ("output_format", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")]
)
def test_every_format_records_its_parameters(server: RunningServer, output_format: str, magic: bytes) -> None:
    response = server.paint(
        "a red fox, at night",
        num_steps=3,
        seed=9,
        output_format=output_format,
        negative_prompt="rain",
        sampler="k_euler",
    )
    (file,) = files_of(response)
    assert file.startswith(magic)
    assert DIGITAL_SOURCE_TYPE.encode() in file
    assert SOFTWARE.encode() in file
    text = read_infotext(file)
    assert text is not None
    read = parse_infotext(text)
    assert (read.prompt, read.negative_prompt) == ("a red fox, at night", "rain")
    expected = {"Steps": "3", "Sampler": "Euler", "Seed": "9", "Size": "64x64", "Model": "sd15", "RNG": "CPU"}
    assert {key: read.fields[key] for key in expected} == expected


def test_compression_makes_a_smaller_file(server: RunningServer) -> None:
    sizes = [
        len(files_of(server.paint(output_format="jpeg", output_compression=quality, size="256x256"))[0])
        for quality in (10, 90)
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"sampler": "dpmpp_2m", "sigma_schedule": "karras"}, {"sampler": "DPM++ 2M Karras"}),
        ({"sampler": "DPM++ 2M Karras"}, {"sampler_name": "dpmpp_2m", "scheduler": "Karras"}),
        ({"sampler": "euler_a"}, {"scheduler": "EulerAncestralDiscreteScheduler"}),
        ({"guidance_scale": 3.0}, {"cfg_scale": 3}),
        ({"model": "sd15"}, {"model": "dall-e-2"}),
        ({}, {"model": "gpt-image-1", "style": "vivid", "moderation": "low", "user": "me", "background": "auto"}),
        ({}, {"n": None, "size": "auto", "response_format": "b64_json", "stream": False, "partial_images": 0}),
    ],
)
def test_equivalent_requests_give_the_same_image(
    server: RunningServer, fields: dict[str, object], other: dict[str, object]
) -> None:
    assert files_of(server.paint(**fields)) == files_of(server.paint(**other))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"seed": 2}, {"num_steps": 3}, {"guidance_scale": 2.0}, {"sampler": "ddim"}])
def test_every_setting_reaches_the_image(server: RunningServer, fields: dict[str, object]) -> None:
    assert files_of(server.paint()) != files_of(server.paint(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"foo": 1, "bar": {"a": [1]}}, "unknown fields were ignored: foo, bar"),
        ({"quality": "ultra"}, 'quality "ultra" is unknown'),
        ({"sampler": "euler", "eta": 0.5}, "eta"),
    ],
)
def test_ignored_fields_are_reported(server: RunningServer, fields: dict[str, object], words: str) -> None:
    response = server.paint(**fields)  # type: ignore[arg-type]
    assert any(words in warning for warning in response.json()["warnings"])
    assert words in response.headers["x-diffserve-warnings"]


@pytest.mark.parametrize(
    "prompt",
    [
        "🦊",
        "<script>alert(1)</script>",
        "{{7*7}} %s%n ${jndi:x}",
        "a\r\nb\x1b[2J",
        "\u202eabc",
        "e" + "\u0301" * 200,
        "fox " * 400,
    ],
    ids=["emoji", "html", "template", "control", "rtl", "combining", "long"],
)
def test_unusual_prompts_give_images(server: RunningServer, prompt: str) -> None:
    (file,) = files_of(server.paint(prompt))
    assert read_infotext(file) is not None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_step_of_every_sampler_gives_an_image(server: RunningServer, sampler: str) -> None:
    response = server.paint(num_steps=1, sampler=sampler)
    (file,) = files_of(response)
    assert response.json()["sampler"] == sampler
    assert len(set(Image.open(BytesIO(file)).convert("L").tobytes())) > 1  # more than one color


def test_openapi_lists_every_field(server: RunningServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/images/generations", "/v1/models", "/v1/models/{name}", "/livez", "/readyz"} <= set(paths)
    content = paths["/v1/images/generations"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert {"prompt", "n", "size", "seed", "num_inference_steps", "sampler", "eta"} <= set(schema["properties"])
    assert schema["required"] == ["prompt"]


def test_the_safety_identifier_is_echoed(server: RunningServer) -> None:
    assert server.paint(safety_identifier="abc").json()["safety_identifier"] == "abc"
    assert server.paint(user="def").json()["safety_identifier"] == "def"
