"""LoRAs over HTTP: a folder that is rescanned, the field, tags in the prompt, and a PNG that reproduces itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_models import lora_tensors
from diffserve.api.errors import InvalidRequest
from diffserve.client import Client
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.runtime import load_model
from tests.engine.loras import ATTENTION
from tests.service.server import error_of, files_of, running_server


@pytest.mark.slow
def test_an_image_with_a_lora_is_reproducible_and_an_added_lora_is_served(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_model(tiny_model("sd15"), dtype="float32", device="cpu")
    folder = tmp_path / "loras"
    folder.mkdir()
    save_file(lora_tensors(model, ATTENTION, 0, 4), folder / "ink.safetensors")
    config = f'[model]\ndtype = "float32"\nlora_dir = {json.dumps(str(folder))}\n'
    fields = {"seed": 3, "num_inference_steps": 2, "size": "64x64", "sampler": "ddim"}
    with running_server(tiny_model("sd15"), tmp_path / "server", config=config) as server:
        server.wait_until_ready()
        url = f"{server.url}/v1/images/generations"

        def painted(**more_fields: object) -> tuple[bytes, str]:
            answer = httpx.post(url, json=fields | more_fields, timeout=60).raise_for_status().json()
            assert answer["loras"] == ([] if more_fields == {"prompt": "a cat"} else [{"name": "ink", "scale": 0.8}])
            data = base64.b64decode(answer["data"][0]["b64_json"])
            return data, read_infotext(data) or ""

        first, infotext = painted(prompt="a cat", loras=[{"name": "ink", "scale": 0.8}])
        prompt = parse_infotext(infotext).prompt
        assert prompt == "a cat <lora:ink:0.8>"
        assert painted(prompt=prompt)[0] == first != painted(prompt="a cat")[0]
        with Client(server.url) as client:
            [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
            assert image is not None
            assert image.loras == ("ink",)
            with pytest.raises(InvalidRequest, match="there is no LoRA 'fur'; the known ones are ink"):
                client.generate("a cat", loras=[{"name": "fur"}])
            save_file(lora_tensors(model, ATTENTION, 1, 80), folder / "fur.safetensors")
            new_image = client.generate("a cat", loras=[{"name": "fur", "scale": -0.5}], num_inference_steps=1, seed=1)
            assert [(lora.name, lora.scale) for lora in new_image.loras] == [("fur", -0.5)]


@pytest.mark.slow
def test_an_unsuitable_lora_is_refused_without_affecting_other_requests(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, other = (load_model(tiny_model(kind), dtype="float32", device="cpu") for kind in ("sd15", "sdxl"))
    loras, words = tmp_path / "loras", tmp_path / "words"
    for folder in (loras, words):
        folder.mkdir()
    good = lora_tensors(model, ATTENTION, 0, 4)
    save_file(good, loras / "ink.safetensors")
    save_file(lora_tensors(other, ATTENTION, 0, 4), loras / "xl.safetensors")
    save_file(good | {next(iter(good)): torch.ones(3, 32)}, loras / "torn.safetensors")
    save_file({"ip_adapter.1.to_k_ip.weight": torch.ones(4, 4)}, loras / "face.safetensors")
    save_file({"emb_params": torch.zeros(2, 1024)}, words / "wide.safetensors")
    folders = f"lora_dir = {json.dumps(str(loras))}\nembeddings_dir = {json.dumps(str(words))}\n"
    config = f'[model]\ndtype = "float32"\n{folders}[engine]\nmax_rows = 4\n'
    with running_server(tiny_model("sd15"), tmp_path / "server", config=config) as server:
        server.wait_until_ready()
        neighbour: dict[str, Any] = {"prompt": "a fox <lora:ink:0.8>", "num_steps": 80, "size": "64x64"}
        alone = files_of(server.paint(**neighbour))
        server.wait_until_idle()
        with ThreadPoolExecutor(1) as pool:
            painting = pool.submit(server.paint, **neighbour)
            server.wait_for_requests(1)
            for prompt, param, message in (
                ("a cat <lora:xl>", "loras", "this adapter was made for another base"),
                ("a cat <lora:torn>", "loras", "their ranks must be equal"),
                ("a cat <lora:face>", "loras", "holds an IP-Adapter"),
                ("a wide cat", "prompt", "wide.safetensors is 1024 numbers wide, but this model reads 64"),
            ):
                answer = server.paint(prompt, size="64x64")
                error = error_of(answer)
                assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error
                assert str(tmp_path) not in error["message"]
            assert not painting.done(), "nobody was beside them"
            assert files_of(painting.result()) == alone
        assert server.num_ended("finished") == 2
