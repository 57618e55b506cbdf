"""Tests of ``--server``: commands that run on a server, and options that only its operator can set."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffserve.cli import main
from diffserve.cli.app import app
from diffserve.media.images import decode_image, read_infotext
from diffserve.settings.config import Settings
from tests.service.server import RunningServer, files_of

UNREACHABLE = "http://127.0.0.1:9"
WITHOUT_TORCH = """
import sys
from diffserve.cli import main
try:
    main(sys.argv[1:])
finally:
    print([name for name in ("torch", "diffserve.engine") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("option", "value"),
    [("--device", "cpu"), ("--config", "embedded"), ("--lora-dir", "."), ("--refiner", "sdxl"), ("--offload", "cpu")],
)
def test_model_loading_options_are_refused_before_connecting(
    option: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFSERVE_SERVER", UNREACHABLE)
    with pytest.raises(SystemExit) as caught:
        main(["generate", "a fox", option, value])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"diffserve: {option} is given")
    assert "DIFFSERVE_SERVER" in error


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("option", "field"),
    [("--guidance", "guidance_scale"), ("--eta", "eta"), ("--variation-strength", "variation_strength")],
)
def test_numbers_that_are_not_finite_are_refused_before_connecting(
    option: str, field: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "a fox", "--server", UNREACHABLE, f"{option}={value}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"diffserve: {field} must be a finite number, got {value}.\n"


def test_cluster_up_has_every_option_of_serve_except_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command: Any = typer.main.get_command(app)
    serve_options = {option.name: option for option in command.commands["serve"].params}
    cluster_options = {option.name: option for option in command.commands["cluster"].commands["up"].params}
    assert set(serve_options) - set(cluster_options) == {"devices"}
    for name in set(serve_options) & set(cluster_options):
        assert serve_options[name].opts == cluster_options[name].opts, name
    received = list[Settings]()

    def up(settings: Settings, *_: object, **__: object) -> int:
        received.append(settings)
        return 0

    monkeypatch.setattr("diffserve.cluster.run.up", up)
    options = [
        "--model",
        "embedded",
        "--model",
        "small=embedded-turbo",
        "--lora-dir",
        str(tmp_path),
        "--unload-after",
        "5",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", *options, "--offload", "disk", "--no-page"])
    [settings] = received
    assert ended.value.code == 0
    assert settings.model.lora_dir == str(tmp_path)
    assert [model.model_id for model in settings.models] == ["small"]
    assert (settings.serve.unload_after_s, settings.engine.offload, settings.serve.page) == (5.0, "disk", False)


def test_unreachable_server_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["generate", "a fox"], ["rewrite", "a fox"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--server", UNREACHABLE])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error == f"diffserve: no server answers at {UNREACHABLE}; start one with: diffserve serve\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_server_images_match_the_api_and_need_no_torch(text_server: RunningServer, tmp_path: Path) -> None:
    words = ["generate", "A red fox!", "-n", "2", "--seed", "3", "--steps", "2", "--sampler", "ddim"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words, "--server", text_server.url],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"
    names = ["a-red-fox-1.png", "a-red-fox-2.png"]
    assert [line.split("  ")[:2] for line in done.stdout.splitlines()[:2]] == [
        [name, f"seed {seed}"] for name, seed in zip(names, (3, 4), strict=True)
    ]
    plain = files_of(text_server.paint("A red fox!", num_steps=2, seed=3, n=2, sampler="ddim"))
    assert [(tmp_path / name).read_bytes() for name in names] == plain


@pytest.mark.slow
def test_edit_keeps_unmasked_pixels_and_refusals_name_the_value(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, mask, output = tmp_path / "start.png", tmp_path / "mask.png", tmp_path / "out.webp"
    pixels = np.full((64, 64, 3), 90, np.uint8)
    Image.fromarray(pixels).save(start)
    marked = np.zeros((64, 64), np.uint8)
    marked[32:] = 255
    Image.fromarray(marked).save(mask)
    common = ["generate", "a fox", "--steps", "2", "--server", server.url]
    with pytest.raises(SystemExit) as caught:
        main([*common, "--init", str(start), "--mask", str(mask), "-o", str(tmp_path / "out.png")])
    assert caught.value.code == 0
    painted = decode_image((tmp_path / "out.png").read_bytes()).array
    assert np.array_equal(painted[:32], pixels[:32])
    assert "Denoising strength: 1" in str(read_infotext((tmp_path / "out.png").read_bytes()))
    for options, message in ((["--sampler", "nope"], "sampler is 'nope'"), (["--lora", "nobody"], "nobody")):
        with pytest.raises(SystemExit) as caught:
            main([*common, *options, "-o", str(output)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["a fox", "[1]"])
def test_large_images_are_sent_unchanged(words: str, server: RunningServer, tmp_path: Path) -> None:
    """Images of 8 MB are uploaded as files; a prompt that a form cannot represent is sent as JSON."""
    start, mask = tmp_path / "start.png", tmp_path / "mask.png"
    pixels = np.full((64, 64, 3), 90, np.uint8)
    for file, content in ((start, pixels), (mask, np.full((64, 64), 255, np.uint8))):
        metadata = PngInfo()
        metadata.add(b"junk", bytes(8_000_000 if words == "a fox" else 10))
        Image.fromarray(content).save(file, pnginfo=metadata)
    output = tmp_path / "out.png"
    arguments = ["generate", words, "--steps", "2", "--seed", "3", "--init", str(start), "--mask", str(mask)]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--server", server.url, "-o", str(output)])
    assert caught.value.code == 0
    assert str(read_infotext(output.read_bytes())).startswith(words)
    lines = tmp_path / "lines.jsonl"
    line = {"prompt": words, "image": start.name, "mask": mask.name, "num_inference_steps": 2, "seed": 3, "id": "b"}
    lines.write_text(json.dumps(line))
    with pytest.raises(SystemExit) as caught:
        main(["batch", str(lines), "-o", str(tmp_path / "many"), "--server", server.url])
    assert caught.value.code == 0
    assert (tmp_path / "many" / "b.png").read_bytes() == output.read_bytes()


@pytest.mark.slow
def test_ctrl_c_cancels_the_request_on_the_server(server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diffserve", "generate", "a fox", "--steps", "1000", "-n", "8"]
    command += ["--server", server.url]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        server.wait_for_requests(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    server.wait_until_idle()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rewrite_runs_on_a_server(text_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    outputs: list[str] = []
    for further in ([], ["--json"]):
        with pytest.raises(SystemExit) as caught:
            main(["rewrite", "fox", "--server", text_server.url, *further])
        assert caught.value.code == 0
        outputs.append(capsys.readouterr().out)
    assert json.loads(outputs[1])["data"][0]["revised_prompt"].split() == outputs[0].split()
