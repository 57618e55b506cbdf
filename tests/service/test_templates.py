"""Templates and changing prompts over HTTP, on A1111's routes and on the command line; their PNGs repeat the image."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.cli import main
from diffserve.client import Client
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.service.a1111.schemas import Txt2ImgBody, ignored, template_of
from tests.service.server import RunningServer, error_of, files_of, running_server

FIELDS: dict[str, Any] = {"num_inference_steps": 2, "size": "64x64", "sampler": "ddim"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wildcards")
    (folder / "colors.txt").write_text("red\nblue\nforbidden\n")
    return folder


@pytest.fixture(scope="module")
def server(
    folder: Path, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("server")
    (path / "words.py").write_text(
        'class Words:\n    def blocks_prompt(self, prompt):\n        return "forbidden" in prompt\n'
    )
    config = (
        f'[model]\ndtype = "float32"\nwildcard_dir = {json.dumps(str(folder))}\n'
        f'[serve]\nsafety_filter = "words:Words"\n'
    )
    with running_server(tiny_model("sd15"), path / "server", config=config, env={"PYTHONPATH": str(path)}) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.slow
def test_images_of_a_template_have_their_prompts_in_the_answer_and_repeat_from_their_parameters(
    server: RunningServer,
) -> None:
    template = "a {cat|dog} [on|in] __colors__ {sea|sand}"
    answer = server.paint(template, seed=5, n=3, template="combinatorial", **FIELDS)
    images = answer.json()["data"]
    prompts = [f"a cat [on|in] {ending}" for ending in ("red sea", "red sand", "blue sea")]
    assert [image["revised_prompt"] for image in images] == prompts
    assert "the template has 12 combinations; 3 of them" in " ".join(answer.json()["warnings"])
    for index, file in enumerate(files_of(answer)):
        text = read_infotext(file) or ""
        read = parse_infotext(text)
        assert (read.prompt, read.fields["Template"]) == (prompts[index], template)
        body = {"infotext": text, "size": "64x64"}
        again = server.client.post("/v1/images/generations", json=body).raise_for_status()
        assert files_of(again)[0] != b""
        [repeated] = files_of(again)
        assert _pixels(repeated) == _pixels(file)
        assert "Template" not in parse_infotext(read_infotext(repeated) or "").fields
    ordinary = server.paint(template, seed=5, **FIELDS)
    assert parse_infotext(read_infotext(files_of(ordinary)[0]) or "").prompt == template
    with Client(server.url) as client:
        [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
        assert image is not None
        assert image.wildcards == ("colors",)
        random = client.generate("a {cat|dog}", template="random", seed=3, **FIELDS)
        assert random.images[0].revised_prompt in ("a cat", "a dog")


@pytest.mark.slow
def test_the_filter_judges_resolved_prompts_and_wrong_templates_are_refused(server: RunningServer) -> None:
    for prompt, fields in (
        ("a __colors__ cat", {"template": "combinatorial", "n": 3}),
        ("a for{bid|bid}den cat", {"template": "random"}),
        ("a for[|bidden] cat", {}),
    ):
        refused = error_of(server.paint(prompt, **FIELDS, **fields))
        assert (refused["code"], refused["param"]) == ("moderation_blocked", "prompt"), prompt
    for prompt, param, message in (
        ("a {cat", "prompt", "opens a brace that it does not close"),
        ("__../a__", "prompt", "give a path below the folder"),
        ("__fur__", "prompt", "there is no fur.txt (wildcards: colors)"),
    ):
        error = error_of(server.paint(prompt, template="random", **FIELDS))
        assert (error["param"], message in error["message"]) == (param, True), error
    assert error_of(server.paint("a", template="all", **FIELDS))["param"] == "template"
    both = error_of(server.paint("a {b|c}", template="random", prompt_rewriter="auto", **FIELDS))
    assert "cannot be combined with prompt_rewriter" in both["message"]
    parts = error_of(server.paint(" AND ".join("abcdefghi"), **FIELDS))
    assert "the prompt has 9 parts joined by AND" in parts["message"]


@pytest.mark.slow
def test_a1111_clients_use_the_field_or_the_script_of_the_extension(server: RunningServer) -> None:
    body = {"prompt": "a {cat|dog} AND a [red|blue] sea :0.5", "steps": 2, "width": 64, "height": 64, "seed": 1}
    for extra in (
        {"template": "combinatorial"}, {"alwayson_scripts": {"Dynamic Prompts v2.17.1": {"args": [True, True]}}},
    ):  # fmt: skip
        sent = body | extra | {"batch_size": 2, "enable_hr": True, "hr_scale": 1.5}
        answer = server.client.post("/sdapi/v1/txt2img", json=sent).raise_for_status().json()
        info = json.loads(answer["info"])
        prompts = [f"a {animal} AND a [red|blue] sea :0.5" for animal in ("cat", "dog")]
        assert info["all_prompts"] == prompts
        assert [parse_infotext(text).prompt for text in info["infotexts"]] == prompts
        assert [parse_infotext(text).fields["Template"] for text in info["infotexts"]] == [body["prompt"]] * 2
        assert not any("script" in sentence for sentence in info["warnings"])
    plain = server.client.post("/sdapi/v1/txt2img", json=body).raise_for_status().json()
    assert json.loads(plain["info"])["prompt"] == body["prompt"]


@pytest.mark.parametrize(
    ("scripts", "mode"),
    [
        ({"Dynamic Prompts v2.17.1": {"args": [True, True, 1]}}, "combinatorial"),
        ({"dynamic prompts": {"args": [True, False]}}, "random"),
        ({"Dynamic Prompts v2.17.1": {"args": [False, True]}}, None),
        ({"Dynamic Prompts v2.17.1": {"args": []}}, None),
        ({"Dynamic Prompts v2.17.1": 3}, None),
        ({}, None),
    ],
)
def test_arguments_of_the_script_select_the_mode(scripts: dict[str, Any], mode: str | None) -> None:
    body = Txt2ImgBody(prompt="a", alwayson_scripts=scripts)
    assert template_of(body) == mode
    assert ignored(body) == []
    assert template_of(Txt2ImgBody(prompt="a", alwayson_scripts=scripts, template="off")) == "off"


@pytest.mark.slow
def test_the_command_line_resolves_templates_and_lists_wildcards(
    folder: Path, tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--wildcard-dir", str(folder), "--model", str(tiny_model("sd15"))]
    options = ["--template", "combinatorial", "-n", "2", "--steps", "1", "--seed", "1", "-o", str(tmp_path / "a.png")]
    with pytest.raises(SystemExit) as caught:
        main(["generate", "a __colors__ [cat]", *options, *words])
    assert caught.value.code == 0
    files = sorted(tmp_path.glob("*.png"))
    assert [parse_infotext(read_infotext(file.read_bytes()) or "").prompt for file in files] == [
        "a red [cat]", "a blue [cat]",
    ]  # fmt: skip
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["list", "wildcards", *words])
    assert capsys.readouterr().out.split() == ["colors"]
    with pytest.raises(SystemExit):
        main(["generate", "a {cat", *options, *words])
    assert "opens a brace that it does not close" in capsys.readouterr().err


def _pixels(file: bytes) -> bytes:
    from diffserve.media.images import decode_image

    return decode_image(file, name="image").data
