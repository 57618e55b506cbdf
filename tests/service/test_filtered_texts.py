"""Every text of an image passes the safety filter, for all entry points and all their text fields.

Entry points and fields come from the code. A new text field fails here until the filter judges it, or until it is
listed below as a field that reaches no text encoder.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from gradio_client import Client
from openai import OpenAI

from diffserve.api.fields import REQUEST_FIELDS
from diffserve.api.types import GenerationRequest
from diffserve.cli import main
from diffserve.cli.commands.paint import generate
from diffserve.cli.mcp import Tools
from diffserve.client import AsyncClient
from diffserve.media.safety import SafetyQuestion
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.responses.response_plan import FROM_ELSEWHERE
from diffserve.service.safety import Safety
from tests.conftest import SERVER_CONFIG
from tests.service.server import ROOT, SOON_S, START_S, RunningServer, running_server, wait_for
from tests.service.test_batches import begin, lines_of, send, until_over
from tests.service.test_edits import file_of, in_base64, picture

FOX: Final = "a red fox"
BAD: Final = "a forbidden fox"
SMALL: Final = in_base64(picture(64, 64))
FILTER: Final = """
class Words:
    def blocks_prompt(self, prompt):
        return "forbidden" in prompt

class Separate(Words):
    def blocks_negative_prompt(self, prompt):
        return "unwanted" in prompt
"""
STYLES: Final = f"name,prompt,negative_prompt\nworded,{BAD},\nunworded,,{BAD}\n"
WORDS: Final[list[Any]] = [{"type": "text", "text": FOX}]
IMAGES: Final = "/v1/images"
PAINTING: Final[dict[str, dict[str, Any]]] = {
    f"{IMAGES}/generations": {"prompt": FOX},
    f"{IMAGES}/edits": {"prompt": FOX, "image": SMALL},
    f"{IMAGES}/variations": {"prompt": FOX, "image": SMALL},
    "/v1/experiments": {"prompts": [FOX], "samplers": "ddim", "steps": [2], "num_seeds": 1, "reference_steps": 2},
    "/sdapi/v1/txt2img": {"prompt": FOX, "width": 64, "height": 64, "enable_hr": True},
    "/sdapi/v1/img2img": {"prompt": FOX, "init_images": [SMALL]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "modalities": ["image"]},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": FOX}]}],
        "tools": [{"type": "image_generation"}],
    },
}
NOT_PAINTING: Final = {
    *("/v1/images/upscale", "/sdapi/v1/extra-single-image", "/sdapi/v1/extra-batch-images"),
    "/v1/history/{history_id}/favorite",
    *(f"{IMAGES}/generations/{{request_id}}/cancel", f"{IMAGES}/generations/{{request_id}}/interrupt"),
    *("/sdapi/v1/options", "/internal/progress", "/sdapi/v1/interrupt", "/sdapi/v1/skip", "/sdapi/v1/png-info"),
    *("/sdapi/v1/refresh-checkpoints", "/sdapi/v1/refresh-loras", "/sdapi/v1/refresh-vae"),
    *("/sdapi/v1/unload-checkpoint", "/sdapi/v1/reload-checkpoint", "/v1/provenance/verify"),
    *("/v1/completions", "/v1/conversations", "/v1/prompts/rewrite", "/v1/embeddings"),
    *("/v1/responses/{response_id}/cancel", "/v1/conversations/{conversation_id}"),
    "/v1/conversations/{conversation_id}/items",
    *(
        "/v1/batches",
        "/v1/batches/{batch_id}/cancel",
        "/v1/jobs",
        "/v1/jobs/cancel",
        *(f"/v1/jobs/{{job_id}}/{action}" for action in ("cancel", "pause", "resume", "retry")),
        "/v1/webhook_endpoints",
        "/v1/webhook_endpoints/{webhook_endpoint_id}",
        "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret",
        "/v1/webhook_endpoints/{webhook_endpoint_id}/test",
        "/v1/files",
        "/v1/experiments/{experiment_id}/cancel",
        "/login",
        "/logout",
    ),
    "/controlnet/detect",
}
"""Batches and jobs paint through the paths above. The vectors of ``/v1/embeddings`` cannot be painted from."""

NO_TEXTS: Final = {
    *("model", "size", "quality", "user", "safety_identifier", "service_tier", "moderation", "style"),
    *("sampler", "sampler_name", "sampler_index", "scheduler", "sigma_schedule", "spacing", "prompt_syntax"),
    *("hr_sampler_name", "hr_scheduler", "hr_upscaler", "force_task_id", "refiner_checkpoint", "script_name"),
    *("loras", "controlnets", "prompt_rewriter", "image", "images", "init_images", "mask"),
    *("output", "init", "scorer", "seed", "lora", "controlnet", "server", "vae"),
    *("device", "dtype", "config", "refiner", "lora_dir", "controlnet_dir", "embeddings_dir", "offload", "sampler_dir"),
    *("device_map", "text_encoder", "noise_source", "variation_seed", "template", "outpaint", "sizes"),
    *("hires_size", "hires_upscaler", "hires_sampler", "hires_schedule", "upscaler", "reference", "references"),
    *("reference_adapter", "reference_dir", "wildcard_dir", "upscaler_dir"),
}
"""Names, files and choices. What a language model writes for ``prompt_rewriter`` is judged with the picture."""

NOT_READ: Final = {
    "/v1/experiments": {"samplers", "steps", "guidance", "axes", "detect"},
    "/sdapi/v1/img2img": {"hr_prompt", "hr_negative_prompt"},
    "/v1/chat/completions": {
        *("cache_salt", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "stop"),
        *("verbosity", "tool_choice", "function_call"),
    },
    "/v1/responses": {
        *("conversation", "include", "instructions", "metadata", "previous_response_id", "prompt_cache_key"),
        *("prompt_cache_retention", "text", "tool_choice", "id", "result", "revised_prompt", "refusal", "file_id"),
        *("image_url", "input_image_mask", "type"),
    },
}
"""Fields of which the entry point paints nothing."""

Leaf = tuple[str | int, ...]


def leaves(schema: dict[str, Any], parts: dict[str, Any], visited: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the path of each free text in a body of ``schema``."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in visited:
            yield from leaves(parts[name], parts, (*visited, name))
        return
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from leaves(other, parts, visited)
    if schema.get("type") == "string" and not {"enum", "const"} & schema.keys() and schema.get("format") != "binary":
        yield ()
    items = {0: schema["items"]} if "items" in schema else {}
    for place, below in (items | schema.get("properties", {})).items():
        yield from ((place, *leaf) for leaf in leaves(below, parts, visited))


def texts_in(path: str, schema: dict[str, Any], parts: dict[str, Any]) -> list[Leaf]:
    """Return the paths of the texts in a body that may reach a text encoder."""
    paths = set(leaves(schema, parts))
    image_schema = GenerateBody.model_json_schema()
    fields = [leaf for leaf in leaves(image_schema, image_schema["$defs"]) if leaf[0] not in FROM_ELSEWHERE]
    if path == "/v1/responses":
        paths |= {("tools", 0, *leaf) for leaf in fields}
    if path == "/v1/chat/completions":
        paths |= set(fields)
    left_out = NO_TEXTS | NOT_READ.get(path, set())
    return sorted((leaf for leaf in paths if not left_out & set(leaf)), key=str)


def values_of(path: str, leaf: Leaf) -> list[str]:
    """Return values of the field ``leaf`` at ``path`` that make the filter refuse."""
    if leaf[0] == "styles":
        return ["worded", "unworded"]
    if leaf[0] == "infotext":
        settings = "Steps: 2, Sampler: Euler, Seed: 1, Size: 64x64, Hires upscale: 2"
        hires = [f"{FOX}\n{settings}, Hires prompt: {BAD}"] if path.endswith("txt2img") else []
        return [f"{BAD}\n{settings}", f"{FOX}\nNegative prompt: {BAD}\n{settings}", *hires]
    return [BAD]


def with_text(body: dict[str, Any], leaf: Leaf, text: str) -> dict[str, Any]:
    """Return ``body`` with ``text`` in the field ``leaf``."""
    changed = deepcopy(body)
    if leaf[0] == "infotext":
        del changed["prompt"]
    place: Any = changed
    for key, following in pairwise(leaf):
        if isinstance(place, dict) and not isinstance(place.get(key), (dict, list)):
            place[key] = {} if isinstance(following, str) else []
        place = place[key]
    if isinstance(place, list):
        place[:] = [text]
    else:
        place[leaf[-1]] = text
    return changed


@pytest.fixture(scope="module")
def filtered(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("filtered")
    (folder / "plug.py").write_text(FILTER)
    (folder / "data").mkdir()
    (folder / "data" / "styles.csv").write_text(STYLES)
    config = f'{SERVER_CONFIG}[serve]\nsafety_filter = "plug:Words"\n'
    with running_server(
        tiny_model("sd15"), folder, config=config, env={"PYTHONPATH": str(folder)}, page=True
    ) as server:
        server.wait_until_ready()
        wait_for(lambda: server.status("/config") == 200, START_S, "the page")
        yield server


@pytest.fixture(scope="module")
def described(filtered: RunningServer) -> dict[str, Any]:
    content: dict[str, Any] = filtered.client.get("/openapi.json").json()
    return content


def cases(described: dict[str, Any], media_type: str) -> Iterator[tuple[str, Leaf, str]]:
    """Yield path, field and text of each request that the filter must refuse."""
    parts = described["components"]["schemas"]
    for path in PAINTING:
        content = described["paths"][path]["post"]["requestBody"]["content"]
        if media_type in content:
            for leaf in texts_in(path, content[media_type]["schema"], parts):
                yield from ((path, leaf, text) for text in values_of(path, leaf))


def test_the_texts_of_a_request_are_all_of_its_text_fields() -> None:
    names = {"model", "client", "request_id", "priority", "template"}  # prompts are resolved from a template before
    annotations = GenerationRequest.__annotations__
    assert {name for name, kind in annotations.items() if kind == "str"} - names == {"prompt", "negative_prompt"}
    assert GenerationRequest(prompt="a fox", negative_prompt="a dog").texts == {
        "prompt": "a fox", "negative_prompt": "a dog"
    }  # fmt: skip
    resolved = GenerationRequest(prompt="a fox", num_images=2, image_prompts=("a fox", "a cat"), template="a {fox|cat}")
    assert resolved.texts == {"prompt": "a fox", "prompt#2": "a cat", "negative_prompt": ""}


@pytest.mark.slow
def test_every_post_route_is_classified_as_generating_or_not(described: dict[str, Any]) -> None:
    posts = {path for path, methods in described["paths"].items() if "post" in methods}
    assert posts - PAINTING.keys() <= NOT_PAINTING
    assert posts >= PAINTING.keys()


@pytest.mark.slow
def test_every_text_field_of_a_json_body_is_judged(filtered: RunningServer, described: dict[str, Any]) -> None:
    requests = list(cases(described, "application/json"))
    assert {leaf[0] for path, leaf, _ in requests if path == "/sdapi/v1/txt2img"} >= {
        "prompt", "negative_prompt", "hr_prompt", "hr_negative_prompt", "styles", "infotext"
    }  # fmt: skip
    passed = []
    for path, leaf, text in requests:
        answer = filtered.client.post(path, json=with_text(PAINTING[path], leaf, text))
        if answer.status_code != 400 or "moderation_blocked" not in answer.text:
            passed.append((path, leaf, text, answer.text[:200]))
    assert not passed


@pytest.mark.slow
def test_each_prompt_of_a_prompt_matrix_is_judged(filtered: RunningServer) -> None:
    fields = {"samplers": "ddim", "steps": [2], "num_seeds": 1, "axes": {"prompt": "a {red|forbidden} fox"}}
    answer = filtered.client.post("/v1/experiments", json=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "moderation_blocked")


@pytest.mark.slow
def test_the_prompt_of_a_job_is_judged(filtered: RunningServer) -> None:
    fields = {"endpoint": "/v1/images/generations", "body": {"prompt": "a forbidden fox"}}
    name = filtered.client.post("/v1/jobs", json=fields).json()["id"]
    path = f"/v1/jobs/{name}"
    wait_for(lambda: filtered.client.get(path).json()["status"] == "failed", SOON_S, "the job's end")
    assert filtered.client.get(path).json()["error"]["code"] == "moderation_blocked"


@pytest.mark.slow
def test_every_text_field_of_a_form_is_judged(filtered: RunningServer, described: dict[str, Any]) -> None:
    requests = list(cases(described, "multipart/form-data"))
    assert {path for path, _, _ in requests} == {f"{IMAGES}/edits", f"{IMAGES}/variations"}
    for path, (name,), text in requests:
        fields = {"prompt": FOX, str(name): text}
        answer = filtered.client.post(path, data=fields, files={"image": file_of(picture(64, 64))})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "moderation_blocked"), (path, name)


@pytest.mark.slow
def test_every_text_field_of_a_batch_line_is_judged(filtered: RunningServer, described: dict[str, Any]) -> None:
    by_path: dict[str, list[bytes]] = {}
    for place, (path, leaf, text) in enumerate(cases(described, "application/json")):
        line = {"custom_id": str(place), "method": "POST", "url": path, "body": with_text(PAINTING[path], leaf, text)}
        by_path.setdefault(path, []).append(json.dumps(line).encode())
    with OpenAI(base_url=f"{filtered.url}/v1", api_key="unused", max_retries=0) as client:
        for path, lines in by_path.items():
            if "sdapi" not in path and "experiments" not in path:
                batch = until_over(client, begin(client, send(client, *lines), path))
                failed = lines_of(client, batch.error_file_id)
                codes = {line["response"]["body"]["error"]["code"] for line in failed.values()}
                assert (len(failed), codes) == (len(lines), {"moderation_blocked"}), path


@pytest.mark.slow
def test_every_text_parameter_of_the_assistants_tools_is_judged(filtered: RunningServer) -> None:
    async def call(name: str, field: str) -> None:
        async with AsyncClient(filtered.url) as client:
            arguments = {"prompt": FOX} | ({"image": SMALL} if name == "edit_image" else {}) | {field: BAD}
            context: Any = None
            with pytest.raises(Exception, match="safety filter does not allow"):
                await getattr(Tools(client, reads_files=False), name)(ctx=context, **arguments)

    for name in ("generate_image", "edit_image"):
        parameters = inspect.signature(getattr(Tools, name), eval_str=True).parameters
        texts = [field for field, parameter in parameters.items() if str in _types(parameter.annotation)]
        assert {"prompt", "negative_prompt"} <= set(texts)
        for field in set(texts) - NO_TEXTS:
            asyncio.run(call(name, field))


def _types(annotation: Any) -> set[Any]:
    """Return the members of ``annotation`` if it is a union, else itself."""
    inner = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return set(getattr(inner, "__args__", ())) | {inner}


@pytest.mark.slow
def test_every_text_field_of_the_page_is_judged(filtered: RunningServer, tmp_path: Path) -> None:
    page = Client(
        filtered.url, verbose=False, analytics_enabled=False, download_files=str(tmp_path),
        httpx_kwargs={"timeout": 60.0, "trust_env": False},
    )  # fmt: skip
    described: Any = page.view_api(print_info=False, return_format="dict")
    left_out = NO_TEXTS | {
        *("rewrite_mode", "steps", "guidance", "eta", "guidance_interval", "clip_skip", "guidance_rescale"),
        *("cache_interval", "token_merging", "similarity_threshold", "variation_strength", "micro_conditioning"),
        *("switch_at", "strength", "best_of", "samplers", "marks", "aspect", "control", "preprocessor", "axis"),
        *("axis_values", "x", "x_values", "y", "y_values"),
    }
    for endpoint, arguments in (("/generate", {}), ("/experiment", {"samplers": ["ddim"], "steps": "2"})):
        parameters = described["named_endpoints"][endpoint]["parameters"]
        types = {parameter["parameter_name"]: parameter["python_type"]["type"] for parameter in parameters}
        names = {name for name, kind in types.items() if "str" in kind and not name.startswith("control_")}
        assert {"prompt", "prompts"} & names
        for name in names - left_out:
            texts = {"prompt": FOX} if endpoint == "/generate" else {"prompts": FOX}
            answer = page.predict(**(texts | arguments | {name: BAD}), api_name=endpoint)
            assert "safety filter does not allow" in str(answer), (endpoint, name)
    page.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plug.py").write_text(FILTER)
    (tmp_path / "filtered.toml").write_text('[serve]\nsafety_filter = "plug:Words"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.slow
def test_every_text_of_the_command_line_is_judged(
    folder: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(tiny_model("sd15")), "--config", str(folder / "filtered.toml")]

    def run(*words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as caught:
            main([*words, *common])
        return caught.value.code, " ".join(capsys.readouterr().err.split())

    arguments = inspect.signature(generate, eval_str=True).parameters
    options = {name: option.annotation for name, option in arguments.items() if name not in NO_TEXTS}
    texts = {name: kind for name, kind in options.items() if {str, list[str]} & _types(kind)}
    assert set(texts) >= {"prompt", "negative", "hires_prompt", "hires_negative_prompt"}
    for name, kind in texts.items():
        names = (
            kind.__metadata__[0].param_decls or () if hasattr(kind, "__metadata__") else (REQUEST_FIELDS[name].option,)
        )
        words = (FOX, names[-1], BAD) if names else (BAD,)
        code, errors = run("generate", *words, *(("--hires-scale", "1.5") if "hires" in name else ()))
        assert code, name
        assert "safety filter does not allow" in errors, name
    image_schema = GenerateBody.model_json_schema()
    lines = [
        json.dumps(with_text({"prompt": FOX, "num_inference_steps": 1}, leaf, BAD))
        for leaf in texts_in(f"{IMAGES}/generations", image_schema, image_schema["$defs"])
    ]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    assert run("batch", "lines.jsonl", "-o", "many")[0] == 1
    results = [json.loads(line) for line in (folder / "many" / "results.jsonl").read_text().splitlines()]
    assert [result["error"]["code"] for result in results] == ["moderation_blocked"] * len(lines)
    (folder / "prompts.txt").write_text(f"{FOX}\n{BAD}\n")
    for how in ((), ("--gate", "float32:bfloat16")):
        code, errors = run("sweep", "--prompts", "prompts.txt", "-o", "swept", *how)
        assert code
        assert "safety filter does not allow" in errors


@pytest.mark.slow
def test_negative_prompts_use_their_own_filter_method_if_there_is_one(folder: Path) -> None:
    def allows(safety: Safety, field: str, text: str) -> bool:
        return not safety._is_blocked(SafetyQuestion(text, is_negative=field == "negative_prompt"))

    for name, expected in (("Words", (False, True)), ("Separate", (True, False))):
        safety = Safety(f"plug:{name}", "", timeout_s=20.0, startup_s=100.0)
        safety.start()
        assert not allows(safety, "prompt", "forbidden")
        assert tuple(allows(safety, "negative_prompt", text) for text in ("forbidden", "unwanted")) == expected
        safety.stop()
