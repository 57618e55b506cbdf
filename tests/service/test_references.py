"""Reference images over HTTP: OpenAI's and A1111's API, the command line, and their record in answers and files."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest
import webuiapi
from PIL import Image

from diffserve.client import Client
from diffserve.media.images import decode_image, encode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.media.infotext_recipe import request_of
from diffserve.models.controlnets import digest_of
from diffserve.models.references import Reference
from diffserve.service.a1111.controlnets import ignored_in_units, references_of
from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from tests.engine.controlnets import control_map
from tests.engine.references import BASE, PLUS, write_folder
from tests.service.server import RunningServer, running_server
from tests.service.test_a1111_controlnets import DEFAULT_UNIT, body_of, in_base64
from tests.test_cli_mcp import run_session

FIELDS: Final[dict[str, Any]] = {"seed": 3, "num_inference_steps": 2, "size": "64x64", "sampler": "ddim"}
PICTURE = control_map(5, 96, 64)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("references"), tiny_model("sd15"))


@pytest.fixture(scope="module")
def referenced(
    tiny_model: Callable[[str], Path], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    config = f'[model]\ndtype = "float32"\nreference_dir = {json.dumps(str(folder))}\n'
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("referenced"), config=config) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.slow
def test_references_are_read_from_json_and_forms_and_recorded(referenced: RunningServer) -> None:
    url = f"{referenced.url}/v1/images"
    plain = in_base64(PICTURE)
    reference = Reference(PLUS, 0.8, 0.0, 0.5, digest_of(96, 64, PICTURE.data))
    entry = {"name": PLUS, "scale": 0.8, "end": 0.5}

    def painted(**fields: object) -> bytes:
        answer = httpx.post(f"{url}/generations", json=FIELDS | {"prompt": "a cat"} | fields, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["references"] == ([msgspec.to_builtins(reference)] if fields else [])
        return base64.b64decode(answer.json()["data"][0]["b64_json"])

    first = painted(references=[entry | {"image": plain}])
    assert painted(references=[entry | {"image": f"data:image/png;base64,{plain}"}]) == first != painted()
    infotext = parse_infotext(read_infotext(first) or "")
    value = infotext.fields["Reference 0"]
    assert value.startswith("Model: plus, Hash: ")
    assert value.endswith(f"Weight: 0.8, Guidance Start: 0, Guidance End: 0.5, Image: {reference.image}")
    assert any("with a reference image, which is not in its" in warning for warning in request_of(infotext).warnings)
    start = encode_image(control_map(8, 64, 64))
    body = FIELDS | {"prompt": "a cat", "strength": 0.5}
    form = {name: str(content) for name, content in body.items()}
    form["references"] = json.dumps([entry | {"image": plain}])
    by_form = httpx.post(f"{url}/edits", data=form, files={"image": ("a.png", start, "image/png")}, timeout=60)
    assert by_form.status_code == 200, by_form.text
    assert by_form.json()["references"] == [msgspec.to_builtins(reference)]
    images = {"image": {"image_url": f"data:image/png;base64,{base64.b64encode(start).decode()}"}}
    by_json = httpx.post(f"{url}/edits", json=body | images | {"references": [entry | {"image": plain}]}, timeout=60)
    files = [answer.json()["data"][0]["b64_json"] for answer in (by_json, by_form)]
    assert files[0] == files[1]
    with Client(referenced.url) as client:
        [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
        assert image is not None
        assert image.references == (BASE, "diffusers/base", "diffusers/plus", PLUS)
        assert image.refused_references == {}
        file = encode_image(PICTURE)
        images_of_client = client.generate(
            "a cat", references=[{"name": PLUS, "image": file, "scale": 0.8, "end": 0.5}], **FIELDS
        )
        assert [(read.name, read.scale, read.end, read.image) for read in images_of_client.references] == [
            (PLUS, 0.8, 0.5, reference.image)
        ]
        assert images_of_client.images[0].file == first
    assert referenced.num_stalls() == 0


@pytest.mark.slow
def test_the_tools_of_assistants_take_references(referenced: RunningServer) -> None:
    encoded = in_base64(PICTURE)
    settings = {"seed": 3, "steps": 2, "prompt": "a cat", "reference_adapter": PLUS}

    async def session(client: Any) -> None:
        async def call(tool: str, **arguments: Any) -> Any:
            answer = await client.call_tool(tool, settings | arguments)
            assert not answer.is_error, answer.content
            return answer.structured_content

        plain = await call("generate_image", size="64x64")
        name = plain["images"][0]["name"]
        both = await call("generate_image", size="64x64", references=[name, encoded], reference_scale=0.5)
        read = both["recipe"]["references"]
        assert [(reference["name"], reference["scale"]) for reference in read] == [(PLUS, 0.5)] * 2
        assert read[1]["image"] == digest_of(96, 64, PICTURE.data)
        edited = await call("edit_image", image=name, references=[encoded])
        assert [reference["scale"] for reference in edited["recipe"]["references"]] == [1.0]
        refused = await client.call_tool("generate_image", settings | {"references": ["no image"]})
        assert refused.is_error
        assert "neither a known image name" in refused.content[0].text

    run_session(referenced.url, session)


@pytest.mark.slow
def test_units_of_webuiapi_become_references(referenced: RunningServer) -> None:
    port = int(referenced.url.rpartition(":")[2])
    api = webuiapi.WebUIApi(host="127.0.0.1", port=port, sampler="DDIM", steps=2)
    assert {BASE, PLUS} <= set(api.controlnet_model_list())
    assert "ip-adapter-auto" in api.controlnet_module_list()
    types = httpx.get(f"{referenced.url}/controlnet/control_types").json()["control_types"]
    assert types["IP-Adapter"]["model_list"][:2] == ["None", BASE]
    unit = webuiapi.ControlNetUnit(
        image=Image.fromarray(PICTURE.array), module="ip-adapter-auto", model=PLUS, weight=0.8, guidance_end=0.5
    )
    answer = api.txt2img(prompt="a cat", seed=3, width=64, height=64, cfg_scale=7.5, controlnet_units=[unit])
    assert answer.info["warnings"] == []
    assert "Reference 0: " in answer.info["infotexts"][0]
    fields = FIELDS | {"guidance_scale": 7.5, "prompt": "a cat", "eta": 1.0}
    entry = {"name": PLUS, "scale": 0.8, "end": 0.5, "image": in_base64(PICTURE)}
    by_openai = httpx.post(
        f"{referenced.url}/v1/images/generations", json=fields | {"references": [entry]}, timeout=60
    ).json()
    expected = decode_image(base64.b64decode(by_openai["data"][0]["b64_json"])).array
    file = BytesIO()
    answer.image.save(file, "PNG")
    assert (decode_image(file.getvalue()).array == expected).all()
    large = api.txt2img(
        prompt="a cat", seed=3, width=64, height=64, controlnet_units=[unit], enable_hr=True, hr_scale=1.5,
        denoising_strength=0.5, hr_upscaler="Latent",
    )  # fmt: skip
    assert large.image.size == (96, 96)
    assert "Reference 0: " in large.info["infotexts"][0]


@pytest.mark.slow
def test_the_command_line_takes_references_from_files_on_this_machine_and_on_a_server(
    referenced: RunningServer, folder: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(encode_image(PICTURE))
    options = ["a cat", "--reference", f"{file}:{PLUS}:0.8:0-0.5", "--seed", "3", "--steps", "2", "--sampler", "ddim"]
    options += ["--guidance", "7.5", "--size", "64x64"]
    here = tmp_path / "here.png"
    model = ["--model", str(tiny_model("sd15")), "--dtype", "float32", "--reference-dir", str(folder)]
    result = run_cli("generate", *options, *model, "-o", str(here))
    assert result.returncode == 0, result.stderr
    there = tmp_path / "there.png"
    result = run_cli("generate", *options, "--server", referenced.url, "-o", str(there))
    assert result.returncode == 0, result.stderr
    arrays = [decode_image(image.read_bytes()).array.astype(int) for image in (here, there)]
    assert abs(arrays[0] - arrays[1]).max() <= 1, "two processes may round differently, with references or without"
    assert "Reference 0: " in (read_infotext(here.read_bytes()) or "")
    result = run_cli("list", "references", "--server", referenced.url)
    assert result.stdout.split() == [BASE, "diffusers/base", "diffusers/plus", PLUS]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``diffserve`` with these arguments."""
    return subprocess.run([sys.executable, "-m", "diffserve", *arguments], capture_output=True, text=True, check=False)


def unit_of(**fields: Any) -> dict[str, Any]:
    return DEFAULT_UNIT | {"module": "ip-adapter_clip_sd15", "model": "ip-adapter_sd15 [6a3f]"} | fields


def test_units_are_recognized_by_module_or_model_and_cause_no_warning() -> None:
    for fields in ({}, {"module": "none"}, {"model": "own", "module": "ip-adapter-auto"}, {"model": "xl/IP_Adapter-a"}):
        body = Txt2ImgBody.model_validate(body_of(unit_of(**fields, processor_res=512, threshold_a=64)))
        [choice] = references_of(body)
        assert choice.name == unit_of(**fields)["model"].partition(" [")[0]
        assert ignored_in_units(body) == []
    body = Txt2ImgBody.model_validate(body_of(DEFAULT_UNIT))
    assert references_of(body) == []


def test_a_unit_without_an_image_takes_the_start_image_and_one_without_any_is_refused() -> None:
    unit = unit_of(image=None)
    [choice] = references_of(Img2ImgBody.model_validate(body_of(unit, init_images=["c3RhcnQ="])))
    assert choice.image == "c3RhcnQ="
    for wrong in ({"image": None}, {"weight": 3}, {"guidance_end": 2}):
        with pytest.raises(
            Exception, match="unit 0 of controlnet has a value that cannot be used; an IP-Adapter needs"
        ):
            references_of(Txt2ImgBody.model_validate(body_of(unit_of(**wrong))))
