"""``diffserve generate|rewrite --server``: the same command, done by a server; and what only its owner can choose."""

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

NOBODY = "http://127.0.0.1:9"
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
def test_what_the_server_has_decided_is_refused_before_anybody_is_asked(
    option: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFSERVE_SERVER", NOBODY)
    with pytest.raises(SystemExit) as caught:
        main(["generate", "a fox", option, value])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"diffserve: {option} is given")
    assert "DIFFSERVE_SERVER" in said


def test_a_cluster_takes_every_option_of_a_server_but_devices_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = typer.main.get_command(app)
    own = {option.name: option for option in command.commands["serve"].params}
    other = {option.name: option for option in command.commands["cluster"].commands["up"].params}
    assert set(own) - set(other) == {"devices"}
    for name in set(own) & set(other):
        assert own[name].opts == other[name].opts, name
    told = list[Settings]()

    def up(settings: Settings, *_: object, **__: object) -> int:
        told.append(settings)
        return 0

    monkeypatch.setattr("diffserve.cluster.run.up", up)
    given = [
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
        main(["cluster", "up", *given, "--offload", "disk", "--no-page"])
    [settings] = told
    assert ended.value.code == 0
    assert settings.model.lora_dir == str(tmp_path)
    assert [one.model_id for one in settings.models] == ["small"]
    assert (settings.serve.unload_after_s, settings.engine.offload, settings.serve.page) == (5.0, "disk", False)


def test_a_server_that_is_away_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["generate", "a fox"], ["rewrite", "a fox"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--server", NOBODY])
        assert caught.value.code == 2
        assert capsys.readouterr().err == f"diffserve: no server answers at {NOBODY}; start one with: diffserve serve\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_server_paints_what_the_api_does_into_the_files_of_a_local_run_without_torch(
    text_server: RunningServer, tmp_path: Path
) -> None:
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
def test_an_edit_keeps_what_is_not_marked_and_a_refusal_names_the_way_out(
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
    for odd, said in ((["--sampler", "nope"], "sampler is 'nope'"), (["--lora", "nobody"], "nobody")):
        with pytest.raises(SystemExit) as caught:
            main([*common, *odd, "-o", str(output)])
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["a fox", "[1]"])
def test_long_pictures_are_sent_as_they_are(words: str, server: RunningServer, tmp_path: Path) -> None:
    """Of 8 MB each; what only JSON can say is said in it, and is as well understood."""
    start, mask = tmp_path / "start.png", tmp_path / "mask.png"
    pixels = np.full((64, 64, 3), 90, np.uint8)
    for file, shown in ((start, pixels), (mask, np.full((64, 64), 255, np.uint8))):
        about = PngInfo()
        about.add(b"junk", bytes(8_000_000 if words == "a fox" else 10))
        Image.fromarray(shown).save(file, pnginfo=about)
    output = tmp_path / "out.png"
    asked = ["generate", words, "--steps", "2", "--seed", "3", "--init", str(start), "--mask", str(mask)]
    with pytest.raises(SystemExit) as caught:
        main([*asked, "--server", server.url, "-o", str(output)])
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
def test_ctrl_c_ends_the_work_on_the_server(server: RunningServer, tmp_path: Path) -> None:
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
def test_a_server_rewrites(text_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    for further in ([], ["--json"]):
        with pytest.raises(SystemExit) as caught:
            main(["rewrite", "fox", "--server", text_server.url, *further])
        assert caught.value.code == 0
        told.append(capsys.readouterr().out)
    assert json.loads(told[1])["data"][0]["revised_prompt"].split() == told[0].split()
