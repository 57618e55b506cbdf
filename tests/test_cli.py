"""Tests of the command line: image files, error messages, ``verify`` and ``doctor``."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.cli import main
from diffserve.cli.outputs import name_after, plan_outputs, write_output
from diffserve.media.images import decode_image, read_infotext
from tests.engine.references import BASE, write_folder
from tests.upscalers import write_upscaler

LAST_LINE = r"(\S+)  seed (\d+)  (\d+) steps? of (\w+)(?: \w+)?, [\d.]+ ms per step, [\d.]+ s in total"


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``diffserve`` with these arguments in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: object) -> Outcome:
        capsys.readouterr()  # drop the output of fixtures
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)

    return run_main


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("sd15")


def test_help_lists_commands_and_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom diffserve.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print([name for name in ('torch', 'numpy', 'fastapi', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for command in ("generate", "serve", "doctor"):
        assert f"  {command} " in done.stdout
    assert done.stdout.endswith("[]\n")


def test_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, "diffserve 0.2.0\n", "")


def test_no_command_prints_the_help(run: Run) -> None:
    outcome = run()
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("Usage: diffserve ")
    assert "\n  generate " in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty; describe the image."),
        (["generate", "  "], "the prompt is empty; describe the image."),
        (["generate", "a fox", "--steps", "0"], "--steps: num_steps is 0; ask for at least 1 step."),
        (["generate", "a fox", "--steps", "many"], "'--steps'"),
        (["generate", "a fox", "--steps", "9" * 4000], "--steps: num_steps is 99999999999999999999"),
        (["generate", "a fox", "--steps", "9" * 5000], "'--steps'"),
        (["generate", "a fox", "--sampler", "eular"], "'eular'"),
        (["generate", "a fox", "--sampler", "eular"], "dpmpp_2m, "),
        (["generate", "a fox", "--guidance", "99"], "guidance_scale is 99.0; it must lie between 0 and 30."),
        (["generate", "a fox", "--eta", "2"], "eta is 2.0; it must lie between 0 and 1."),
        (["generate", "a fox", "--similarity-threshold", "2"], "similarity_threshold is 2.0; it must be above 0 and"),
        (["generate", "a fox", "--lora", "ink:x"], "a LoRA is given as 'ink:x'; write NAME or NAME:SCALE"),
        (
            ["generate", "a fox", "--lora-dir", "/no/such"],
            "--lora-dir: lora_dir is '/no/such'; there is no such folder",
        ),
        (["generate", "a fox", "--controlnet", "edges"], "a ControlNet is given as 'edges'; write NAME:IMAGE"),
        (
            ["generate", "a fox", "--controlnet", "edges:a.png:1:canny:0.8-0.2"],
            "has start 0.8 and end 0.2; give two fractions",
        ),
        (["generate", "a fox", "--controlnet", "edges:/no/such.png"], "cannot read --controlnet edges '/no/such.png'"),
        (["generate", "a fox", "--noise-source", "gpu"], "noise_source is 'gpu'; give cpu or device"),
        (["generate", "a fox", "--strength", "0.5"], "--strength is 0.5 without --init"),
        (["generate", "a fox", "-o", f"{300 * 'x'}.png"], "File name too long"),
        (["generate", "a fox", "--model", 300 * "x"], "File name too long"),
        (["generate", "a fox", "--seed", "-2"], "seed is -2; it must lie between 0"),
        (["generate", "a fox", "-n", "0"], "n is 0; ask for 1 to 10 images"),
        (["generate", "a fox", "-n", "0", "--server", "http://127.0.0.1:9"], "n is 0; ask for 1 to 10 images"),
        (["generate", "a fox", "--size", "big"], "size is 'big'; write it as WIDTHxHEIGHT"),
        (["generate", "a fox", "--model", "/no/such/model"], "/no/such/model"),
        (["generate", "a fox", "--config", "/no/such.toml"], "cannot read the configuration '/no/such.toml'"),
        (["generate", "a fox", "--device", "toaster"], "'toaster'"),
        (["generate", "a fox", "--dtype", "float6"], "--dtype: dtype is 'float6'; choose one of auto, float32,"),
        (["generate", "a fox", "-o", "fox.gif"], "'fox.gif' has no known file extension"),
        (["generate", "a fox", "-o", "no/folder/fox.png"], "the folder 'no/folder' does not exist"),
        (["generate", "a fox", "-o", "/proc/fox.png"], "the folder '/proc'"),
        (["generate", "a fox", "--init", "no.png"], "cannot read --init 'no.png'"),
        (["generate", "a fox", "--mask", "."], "cannot read --mask '.'"),
        (["generate", "a fox", "-o", "new/"], "or name an existing folder."),
        (["generate", "a fox", "-n", "2", "-o", "-"], "-o - writes a single image, but -n is 2;"),
        (
            ["generate", "a fox", "--quality", "ultra"],
            "--quality is 'ultra'; choose one of draft, standard, fine, max, auto.",
        ),
        (
            ["generate", "a fox", "--quality", "fine", "--steps", "3"],
            "--quality is fine and --steps 3; both set the steps",
        ),
        (["generate", "a", "fox", "on", "it's", "beach"], "the prompt must be one argument, got 5; put it in quotes"),
        (
            ["rewrite", "two", "doggos"],
            "the wish must be one argument, got 2; put it in quotes: diffserve rewrite 'two doggos'",
        ),
        (["generate", "\udcff\udcfe fox"], "prompt has a lone surrogate"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "a fox", "--stpes", "3"], "No such option"),
        (["paint", "a fox"], "No such command 'paint'"),
        (["serve", "--port", "70000"], "--port: port is 70000; it must lie between 0"),
        (["doctor", "--config", "/no/such.toml"], "cannot read the configuration"),
        (["doctor", "--gpu", "h1000"], "gpu is 'h1000'; choose one of h200, h100,"),
    ],
)
def test_user_error_is_one_line_and_writes_no_file(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("diffserve: ")
    assert outcome.err.count("\n") == 1
    assert (outcome.out, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.parametrize("size", ["0x512", "100000x8"])
def test_impossible_size_is_one_line(run: Run, model: Path, tmp_path: Path, size: str) -> None:
    outcome = run("generate", "a fox", "--model", model, "--size", size)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"size is {size}; each side must lie between" in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_pickle_weights_are_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model.ckpt"
    weights.write_bytes(b"\x80\x02}q\x00.")
    outcome = run("generate", "a fox", "--model", weights)
    assert outcome.code == 2
    assert str(weights) in outcome.err
    assert outcome.err.count("\n") == 1


def test_generated_image_contains_its_parameters(run: Run, model: Path, tmp_path: Path) -> None:
    ways = ("--sampler", "Euler a", "--noise-source", "device")
    outcome = run("generate", "a fox", "--model", model, "--steps", 2, "--seed", 7, *ways, "-o", "fox.png")
    assert (outcome.code, outcome.err) == (0, "")
    match = re.fullmatch(LAST_LINE, outcome.out.strip())
    assert match is not None
    assert match.groups() == ("fox.png", "7", "2", "euler_a")
    infotext = read_infotext((tmp_path / "fox.png").read_bytes())
    assert infotext is not None
    assert infotext.startswith("a fox\n")
    assert "Seed: 7" in infotext
    assert "RNG: NV" in infotext


def pixels_of(file: str) -> NDArray[np.uint8]:
    return decode_image(Path(file).read_bytes()).array


def test_enlarged_and_extended_images_repeat_from_their_files(run: Run, model: Path) -> None:
    few = ("--model", model, "--steps", 2, "--seed", 7, "--no-watermark")
    hires = ("--size", "64x64", "--hires-scale", 1.5, "--hires-strength", 0.5)
    assert run("generate", "a fox", *hires, *few, "-o", "large.png").code == 0
    assert pixels_of("large.png").shape == (96, 96, 3)
    assert run("generate", "--infotext", "large.png", "--model", model, "--no-watermark", "-o", "again.png").code == 0
    assert Path("large.png").read_bytes() == Path("again.png").read_bytes()
    tiled = ("--size", "128x96", "--tile-size", 64)
    assert run("generate", "a fox", *tiled, *few, "-o", "tiled.png").code == 0
    assert pixels_of("tiled.png").shape == (96, 128, 3)
    extended = run("generate", "a fox", "--init", "large.png", "--outpaint", "0,0,32,0", *few, "-o", "wide.png")
    assert (extended.code, pixels_of("wide.png").shape) == (0, (96, 128, 3))
    assert np.array_equal(pixels_of("wide.png")[:, :88], pixels_of("large.png")[:, :88])
    refused = run("generate", "a fox", "--outpaint", "0,0,32,0", *few)
    assert refused.code == 2
    assert "without a start image" in refused.err


class Stdin(io.TextIOWrapper):
    """Standard input with the content ``data``."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


def test_prompt_from_standard_input_and_image_to_standard_output(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diffserve", "generate", "-", "--model", str(model), "--steps", "1", "--seed", "7"]
    done = subprocess.run(
        [*command, "-o", "-"], input="\ufeffa fox,\nat night\n".encode(), capture_output=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    infotext = read_infotext(done.stdout)
    assert infotext is not None
    assert infotext.startswith("a fox,\nat night\n")
    assert re.fullmatch(LAST_LINE.replace(r"(\S+)", "-"), done.stderr.decode().strip().splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "message"), [(b" \n", "standard input has no prompt"), (b"\xff\xfe", "is not UTF-8 text")]
)
def test_invalid_standard_input_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    outcome = run("generate", "-")
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_image_is_not_written_to_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(InvalidRequest, match="standard output is a terminal"):
        plan_outputs(Path("-"), "a fox", 1, overwrite=False)


def test_quality_sets_the_number_of_steps(run: Run, model: Path) -> None:
    config = Path("two.toml")
    config.write_text("[model]\nnum_steps = 2\n", encoding="utf-8")
    for quality, steps in (("draft", "1 step"), ("fine", "4 steps")):
        outcome = run("generate", "a fox", "--model", model, "--config", config, "--quality", quality, "-o", "fox.png")
        assert f" {steps} of " in outcome.out, outcome.err


def test_verify_reports_the_marks_of_generated_files(run: Run, model: Path, tmp_path: Path) -> None:
    few = ("--model", model, "--steps", "1", "--size", "64x64", "--seed", "1")
    run("generate", "a red fox", "-o", "bare.png", "--no-watermark", *few)
    edited = run("generate", "a red fox", "-o", "edited.webp", "--init", "bare.png", "--strength", "1", *few)
    assert edited.code == 0, edited.err
    Image.open("bare.png").save("copy.jpg", quality=90)
    marked = run("verify", "bare.png", "edited.webp")
    assert marked.code == 0
    assert marked.out.splitlines()[0] == "bare.png  AI-generated: XMP: trainedAlgorithmicMedia"
    expected = r"edited\.webp  .*: XMP: compositeWithTrainedAlgorithmicMedia; watermark: composite \(\d+ %\)"
    assert re.fullmatch(expected, marked.out.splitlines()[1])
    unmarked = run("verify", "copy.jpg", "--json")
    assert (unmarked.code, json.loads(unmarked.out)["is_generated"]) == (1, False)
    assert run("verify", "nowhere.png").err == "diffserve: cannot read 'nowhere.png': No such file or directory.\n"
    mixed = run("verify", _write_file("serve.toml"), "bare.png", "nowhere.png")
    assert (mixed.code, mixed.out) == (2, marked.out.splitlines()[0] + "\n"), "readable files are reported"
    assert "'serve.toml' is not a PNG, JPEG or WebP file" in mixed.err
    assert "cannot read 'nowhere.png'" in mixed.err


def _write_file(name: str) -> str:
    Path(name).write_text("[serve]")
    return name


@pytest.mark.slow
def test_unknown_words_are_listed_with_a_rewrite_command(run: Run) -> None:
    wish = ("generate", "an astronaut riding a horse", "--negative", "a 🦊 and a wolf")
    outcome = run(*wish, "--model", "embedded-turbo", "--guidance", 2, "--steps", 1, "-o", "a.png")
    assert outcome.code == 0
    assert "does not know '🦊', 'wolf' of the negative prompt" in outcome.err
    assert "does not know 'astronaut', 'riding', 'horse'" in outcome.err
    assert "to rewrite the prompt in known words, run: diffserve rewrite 'an astronaut riding a horse'\n" in outcome.err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("gen", "generate"), ("generate x --sampler dpm", "dpmpp_2m"), ("generate x --quality d", "draft")],
)
def test_shell_completes_commands_and_values(typed: str, offered: str) -> None:
    words = f"diffserve {typed}"
    env = os.environ | {
        "_DIFFSERVE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run([sys.executable, "-m", "diffserve"], env=env, capture_output=True, text=True, timeout=60)
    assert offered in done.stdout.split(), done.stderr


def test_progress_bar_moves_on_a_terminal(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    outcome = run("generate", "a fox", "--model", model, "--steps", 40, "-o", "fox.png")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.err)
    assert f"loading {model}" in shown
    assert re.search(r"generating +\S+ +\d+/40 steps [\d.]+/s", shown)
    assert outcome.out.startswith("fox.png  seed ")


def test_same_seed_gives_the_same_bytes_and_files_are_not_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("generate", "a fox", "--model", model, "--steps", 1, "--seed", 3, "-o", "a.png").code == 0
    first, second = (tmp_path / "a.png").read_bytes(), (tmp_path / "a-2.png").read_bytes()
    assert first == second
    outcome = run("generate", "a dog", "--model", model, "--steps", 1, "--seed", 4, "-o", "a.png", "--overwrite")
    assert outcome.out.startswith("a.png  seed 4  ")
    assert (tmp_path / "a.png").read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-2.png", "a.png"]


def test_several_images_are_numbered_and_use_consecutive_seeds(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("generate", "two dogs", "--model", model, "--steps", 1, "--seed", 5, "-n", 2, "-o", "dog.webp")
    assert [line.split("  ")[:2] for line in sorted(outcome.out.splitlines())] == [
        ["dog-1.webp", "seed 5"],
        ["dog-2.webp", "seed 6"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dog-1.webp", "dog-2.webp"]


def test_image_has_exactly_the_requested_size(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run("generate", "a fox", "--model", model, "--steps", 1, "--size", "300x201", "-o", "fox.jpg")
    assert outcome.code == 0
    assert re.search(
        r"^note: the image was generated at \d+x\d+.* resized to 300x201\.$", outcome.err, flags=re.MULTILINE
    )
    with Image.open(tmp_path / "fox.jpg") as image:
        assert (image.format, image.size) == ("JPEG", (300, 201))


def test_image_can_start_from_an_image_and_a_mask(run: Run, model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), "red").save(tmp_path / "red.png")
    Image.new("L", (96, 64), 255).save(tmp_path / "all.png")
    for extra in ([], ["--mask", "all.png"]):
        outcome = run(
            "generate", "a dog", "--model", model, "--steps", 2, "--init", "red.png", "--strength", 0.5, *extra,
            "-o", "dog.png", "--overwrite",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        with Image.open(tmp_path / "dog.png") as image:
            assert image.size == (96, 64)


def test_mask_of_another_size_is_refused(run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (96, 64)).save(tmp_path / "init.png")
    Image.new("L", (64, 64)).save(tmp_path / "mask.png")
    outcome = run("generate", "a dog", "--init", "init.png", "--mask", "mask.png")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "diffserve: --mask is 64x64 and --init 96x64; they must have the same size.\n"
    (tmp_path / "text.png").write_text("no picture")
    outcome = run("generate", "a dog", "--init", "text.png")
    assert outcome.err.startswith("diffserve: --init 'text.png' is not a PNG, JPEG or WebP file; ")
    outcome = run("generate", "a dog", "--mask", "mask.png")
    assert outcome.err == "diffserve: --mask is given without --init; give the image to change with --init.\n"


def test_prompt_that_is_too_long_is_one_line(run: Run, model: Path) -> None:
    outcome = run("generate", "a very nice dog and " * 400, "--model", model, "--steps", 1)
    assert (outcome.code, outcome.out) == (2, "")
    expected = r"diffserve: the prompt needs more than \d+ chunks of \d+ tokens; shorten it\.\n"
    assert re.fullmatch(expected, outcome.err)


def test_large_init_image_is_refused_with_a_hint(run: Run, model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (4000, 30)).save(tmp_path / "wide.png")
    outcome = run("generate", "a dog", "--model", model, "--init", "wide.png")
    assert (outcome.code, outcome.out) == (2, "")
    assert "of --init, the size is 4000x30; " in outcome.err
    assert outcome.err.endswith(" Give another size.\n")


def test_doctor_reports_device_model_memory_and_origins(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[serve]\nport = 9999\n", encoding="utf-8")
    few_step = tmp_path / "fox-lightning-2step"
    few_step.symlink_to(model)
    outcome = run("doctor", "--model", few_step, "--config", "my.toml", "--device", "cpu", "--gpu", "L4")
    assert (outcome.code, outcome.err) == (0, "")
    squeezed = re.sub(r" +", " ", outcome.out)
    assert "serve.port 9999 my.toml\n" in squeezed
    assert "model.device cpu --device\n" in squeezed
    assert re.search(r"^device cpu$", squeezed, flags=re.MULTILINE)
    assert "few steps lightning, recognized by the name 'fox-lightning-2step': sampler euler, steps 2" in squeezed
    assert re.search(r"^unet [\d,]+ [\d.]+ MiB$", squeezed, flags=re.MULTILINE)
    assert re.search(r"^DeepCache features per row [\d.]+ MiB$", squeezed, flags=re.MULTILINE)
    assert re.search(r"^free on cpu [\d.]+ MiB$", squeezed, flags=re.MULTILINE)
    assert re.search(r"^peak, 8 rows [\d.]+ MiB$", squeezed, flags=re.MULTILINE)
    assert re.search(r"^ ?2 0\.\d+ \d+ [\d.]+ MiB [\d.]+ ms on l4$", squeezed, flags=re.MULTILINE)
    assert outcome.out.endswith("all is well.\n")


def test_doctor_lists_the_files_that_requests_can_name_and_why_some_are_refused(
    run: Run, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "references").mkdir()
    write_folder(tmp_path / "references", model)
    write_upscaler(tmp_path / "upscalers" / "own.safetensors")
    (tmp_path / "upscalers" / "old.pth").write_bytes(b"anything")
    (tmp_path / "controlnets").mkdir()
    (tmp_path / "controlnets" / "single.safetensors").write_bytes(b"anything")
    for name, lines in (("color", "red\nblue\n"), ("empty", "\n"), ("fox", "a __animal__"), ("animal", "cat\n__fox__")):
        (tmp_path / "wildcards").mkdir(exist_ok=True)
        (tmp_path / "wildcards" / f"{name}.txt").write_text(lines)
    kinds = ("reference", "upscaler", "controlnet", "wildcard")
    folders = [text for kind in kinds for text in (f"--{kind}-dir", tmp_path / f"{kind}s")]
    outcome = run("doctor", "--model", model, "--device", "cpu", *folders)
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split(maxsplit=2) for line in outcome.out.splitlines()]
    listed = {(row[0], row[1]): row[2] for row in rows if len(row) == 3}
    assert listed["references", BASE] == listed["upscalers", "own"] == listed["upscalers", "embedded-4x"] == "usable"
    assert listed["wildcards", "color"] == "usable"
    assert listed["upscalers", "old"].startswith("refused: is a pickle")
    assert listed["controlnets", "single"].startswith("refused: ")
    assert listed["wildcards", "empty"].startswith("refused: the template names __empty__; its file has no lines")
    assert listed["wildcards", "fox"].startswith("refused: __fox__ includes itself (fox.txt -> animal.txt -> fox.txt)")


def test_doctor_reports_folders_that_cannot_be_written(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFSERVE_ENGINE_CACHE_DIR", "/proc/cache")
    outcome = run("doctor", "--model", model, "--device", "cpu")
    assert "all is well" not in outcome.out
    assert outcome.out.rstrip().splitlines()[-1].startswith("cache: /proc/cache cannot be written: ")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ('[text]\nmodel = "/nope"\n', "text.model: no language model at '/nope'"),
        ('[text]\nmodel = "embedded"\ndraft_model = "/nope"\n', "text.draft_model: no language model at '/nope'"),
        ('[text]\nmodel = "embedded"\nrewriter_style = "nope"\n', "text.rewriter_style: "),
        ('[serve]\nhost = "0.0.0.0"\n', "serve.host: host is '0.0.0.0', and without API keys"),
        ('[serve]\nsafety_filter = "nope:nope"\n', "serve.safety_filter: safety_filter 'nope:nope'"),
        ('[serve]\ndevices = ["cuda:77"]\n', "serve.devices: "),
    ],
)
def test_doctor_reports_why_the_server_would_not_start(
    run: Run, model: Path, tmp_path: Path, config: str, problem: str
) -> None:
    (tmp_path / "my.toml").write_text(config, encoding="utf-8")
    outcome = run("doctor", "--model", model, "--config", "my.toml", "--device", "cpu", "--data-dir", tmp_path / "data")
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1].startswith(problem)
    assert not (tmp_path / "data").exists()


def test_doctor_reports_everything_else_before_a_load_error(run: Run) -> None:
    outcome = run("doctor", "--model", "/no/such/model")
    assert outcome.code == 2
    assert "/no/such/model" in outcome.err
    assert outcome.err.count("\n") == 1
    assert "precision" in outcome.out


def test_python_m_diffserve_is_the_same_command() -> None:
    command = [sys.executable, "-m", "diffserve", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "diffserve 0.2.0\n"


def test_file_is_named_after_the_prompt_by_default(tmp_path: Path) -> None:
    assert name_after("A fox, next to: a cactus!") == "a-fox-next-to-a-cactus.png"
    assert name_after("***") == "image.png"
    assert len(name_after("very " * 100)) <= 52
    assert plan_outputs(tmp_path, "a fox", 1, overwrite=False) == [tmp_path / "a-fox.png"]


def test_threads_write_files_without_conflicts(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        for again in range(50):
            write_output(tmp_path / f"{number}-{again}.png", bytes([number]) * 4096)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(list(tmp_path.iterdir())) == 400
    assert all(set(path.read_bytes()) == {int(path.name[0])} for path in tmp_path.glob("*.png"))


def test_output_files_use_the_next_free_numbers(tmp_path: Path) -> None:
    for name in ("a.png", "a-2.png", "b-1.png"):
        (tmp_path / name).touch()
    assert plan_outputs(tmp_path / "a.png", "", 1, overwrite=False) == [tmp_path / "a-3.png"]
    assert plan_outputs(tmp_path / "b.png", "", 2, overwrite=False) == [tmp_path / "b-2.png", tmp_path / "b-3.png"]
    assert plan_outputs(tmp_path / "b.png", "", 2, overwrite=True) == [tmp_path / "b-1.png", tmp_path / "b-2.png"]
    with pytest.raises(InvalidRequest, match=r"use \.png, \.jpg, \.jpeg, \.webp"):
        plan_outputs(tmp_path / "a.bmp", "", 1, overwrite=False)
