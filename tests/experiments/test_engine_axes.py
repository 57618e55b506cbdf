"""Sweeps over precisions, models and the switch to a refiner: one engine at a time, and resumed to the same numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.cli import main
from diffserve.engine import Engine
from diffserve.experiments.engines import OpenEngine
from diffserve.experiments.plan import EngineKey, SweepPlan
from diffserve.experiments.run import SweepProgress, run_plan, sweep
from diffserve.experiments.store import PARTS
from diffserve.settings.config import EngineConfig
from tests.tiny_models import ONE_LEVEL, REFINER

PLAN = SweepPlan(
    samplers=("ddim",),
    steps=(2,),
    guidance=(3.0,),
    prompts=("a fox", "an owl"),
    num_seeds=3,
    reference_steps=4,
    axes={"precision": ("float32", "bfloat16")},
)
CELLS = ("ddim 2, precision float32", "ddim 2, precision bfloat16", "ddim 4 (converged)")


@pytest.fixture(scope="module")
def open_tiny(tiny_model: Callable[[str], Path]) -> OpenEngine:
    """Return a function that opens the tiny model of a name in a precision, and checks that no other is open."""
    path, alive = tiny_model(ONE_LEVEL), WeakSet[Engine]()

    def open_engine(key: EngineKey) -> Engine:
        assert not alive, "two engines are open"
        values = dict(key)
        kind = str(values.get("model", ""))
        engine = Engine.from_pretrained(
            tiny_model(kind) if kind else path,
            dtype=str(values.get("precision", "float32")),
            device="cpu",
            config=EngineConfig(max_rows=8),
        )
        alive.add(engine)
        return engine

    return open_engine


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """Return the cells of a report without measured times."""
    cells = json.loads((folder / "report.json").read_bytes())["cells"]
    return [{name: cell[name] for name in cell if not name.endswith(("_s", "_ms"))} for cell in cells]


def notes_of(folder: Path) -> list[str]:
    notes: list[str] = json.loads((folder / "report.json").read_bytes())["notes"]
    return notes


@pytest.fixture(scope="module")
def precisions(open_tiny: OpenEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SweepProgress]]:
    """Run a sweep over two precisions; return its folder and its progress events."""
    folder, events = tmp_path_factory.mktemp("precisions"), list[SweepProgress]()
    run_plan(open_tiny, PLAN, folder, events.append)
    return folder, events


def test_precisions_are_compared_with_the_converged_images_of_the_first(
    precisions: tuple[Path, list[SweepProgress]],
) -> None:
    folder, events = precisions
    document = json.loads((folder / "report.json").read_bytes())
    assert {name: model["dtype"] for name, model in document["models"].items()} == {
        "precision float32": "float32", "precision bfloat16": "bfloat16"
    }  # fmt: skip
    full_precision, half, converged = document["cells"]
    assert 0 < half["measures"]["latent_rmse"]["value"] != full_precision["measures"]["latent_rmse"]["value"]
    assert "psnr_db" not in converged["measures"]
    pairs = [(each["cell"]["settings"], each["baseline"]["settings"]) for each in document["comparisons"]]
    assert [[["precision", "bfloat16"]], [["precision", "float32"]]] in [list(pair) for pair in pairs]
    assert "Converged images were generated in float32." in document["notes"]
    rows = list(csv.DictReader((folder / "cells.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["precision"] for row in rows] == ["float32", "bfloat16", ""]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(label.removesuffix(" (converged)") in page for label in CELLS)
    phases = ["painting, precision float32", "painting, precision bfloat16", "timing", "reporting"]
    assert list(dict.fromkeys(event.phase for event in events)) == phases
    assert events[-1].rows_done == events[-1].num_rows == PLAN.num_rows


@pytest.mark.slow
def test_a_sweep_of_precisions_is_resumed_and_extended_and_ends_in_the_same_numbers(
    open_tiny: OpenEngine, precisions: tuple[Path, list[SweepProgress]], tmp_path: Path
) -> None:
    few = msgspec.structs.replace(PLAN, axes={"precision": ("float32",)})
    run_plan(open_tiny, few, tmp_path)

    def interrupt(now: SweepProgress) -> None:
        if now.phase.endswith("bfloat16"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(open_tiny, PLAN, tmp_path, interrupt)
    events: list[SweepProgress] = []
    run_plan(open_tiny, PLAN, tmp_path, events.append)
    assert not any(event.phase == "painting, precision float32" for event in events)
    assert numbers_of(tmp_path) == numbers_of(precisions[0])
    other = msgspec.structs.replace(PLAN, axes={"precision": ("bfloat16", "float32")})
    run_plan(open_tiny, other, tmp_path)
    reversed_cells = numbers_of(tmp_path)
    assert reversed_cells[1]["measures"]["psnr_db"] != numbers_of(precisions[0])[0]["measures"]["psnr_db"], (
        "float32 is now compared with the converged images of bfloat16"
    )


@pytest.mark.slow
def test_models_have_converged_images_of_their_own_and_are_not_compared_by_distances_to_them(
    open_tiny: OpenEngine, tmp_path: Path
) -> None:
    plan = msgspec.structs.replace(
        PLAN, axes={"model": (ONE_LEVEL, "sd2")}, model_guidance={ONE_LEVEL: 3.0, "sd2": 1.0}
    )
    report = run_plan(open_tiny, plan, tmp_path)
    labels = [(each.cell.label, each.cell.guidance_scale) for each in report.cells]
    assert labels == [
        (f"ddim 2, model {ONE_LEVEL}", 3.0),
        ("ddim 2, model sd2", 1.0),
        (f"ddim 4, model {ONE_LEVEL} (converged)", 3.0),
        ("ddim 4, model sd2 (converged)", 1.0),
    ]
    assert all("psnr_db" in each.measures for each in report.cells[:2])
    assert report.comparisons == ()
    assert any("PSNR, SSIM and other distances to them are not compared" in note for note in notes_of(tmp_path))
    assert any(f"were not measured for model {ONE_LEVEL}: only images of" in note for note in notes_of(tmp_path))
    assert f"Sampler sweep of {ONE_LEVEL}, sd2" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_an_engine_that_refuses_the_plan_is_found_before_another_one_generates(
    open_tiny: OpenEngine, tmp_path: Path
) -> None:
    plan = msgspec.structs.replace(PLAN, axes={"model": ("sdxl", ONE_LEVEL), "micro_conditioning": ("crop 0x0",)})
    with pytest.raises(InvalidRequest, match="micro_conditioning"):
        run_plan(open_tiny, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_open_engine_has_one_precision(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    engine = Engine.from_pretrained(tiny_model(ONE_LEVEL), dtype="float32", device="cpu")
    with pytest.raises(InvalidRequest, match="cannot be axes of an open engine; give the name of a model"):
        sweep(engine, folder=tmp_path, axes={"precision": ["int8"]}, prompts=["a fox"])


def run_main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file with two prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("a fox\nan owl\n", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axis", "precision=fp33"], "precision has 'fp33'; choose from float32"),
        (["--axis", "precision=fp32,int8", "--dtype", "int8"], "--dtype and --axis precision both set precisions"),
        (["--axis", "precision=fp32,int8", "--offload", "cpu"], "--axis precision: offload is 'cpu' with dtype int8"),
        (["--axis", "model=embedded,nowhere"], "--axis model: there is no model at 'nowhere'; give a directory"),
        (["--axis", "model=embedded,a=embedded,a=edge"], "two models of the axis are called 'a'"),
        (["--axis", "model=embedded", "--model", "embedded"], "--model and --axis model both set models"),
    ],
)
def test_a_mistake_in_an_engine_axis_is_one_sentence_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_main("sweep", *arguments, "-o", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_learned_sampler_of_another_model_is_refused_before_anything_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["--axis", "model=embedded,embedded-turbo", "--samplers", "learned:embedded-5"]
    assert run_main("sweep", *axes, "--steps", 5, "--prompts", 1, "-o", tmp_path / "out") == 2
    message = "sampler is 'learned:embedded-5'; it was learned for embedded ["
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"diffserve: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_compares_models_in_precisions(
    tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["--axis", f"model=one={tiny_model(ONE_LEVEL)},{tiny_model('sd2')}", "--axis", "precision=fp32,int8"]
    counts = ["--samplers", "ddim", "--steps", 2, "--prompts", prompts, "--seeds", 1, "--reference-steps", 3]
    assert run_main("sweep", *axes, *counts, "--device", "cpu", "-o", tmp_path / "out") == 0
    output, error = capsys.readouterr()
    labels = [f"ddim 2, model {model}, precision {name}" for model in ("one", "sd2") for name in ("float32", "int8")]
    assert [line.strip().partition("  ")[0] for line in output.splitlines()[1:5]] == labels
    assert "4 cells of 2 images plus the converged images: 12 images" in error
    document = (tmp_path / "out" / "report.json").read_text(encoding="utf-8")
    assert str(tiny_model("sd2").parent) not in document, "paths of this machine are not written"
    assert len(list((tmp_path / "out" / PARTS).glob("*.jsonl"))) == 6


@pytest.mark.slow
def test_the_switch_to_a_refiner_is_an_axis(tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    counts = ["--samplers", "euler", "--steps", 5, "--prompts", prompts, "--seeds", 1, "--reference-steps", 10]
    arguments = ["--model", tiny_model("sdxl"), "--refiner", tiny_model(REFINER), "--axis", "switch_at=0.4,0.8"]
    assert run_main("sweep", *arguments, *counts, "--device", "cpu", "-o", tmp_path / "out") == 0
    cells = numbers_of(tmp_path / "out")
    assert [cell["cell"]["settings"] for cell in cells] == [[["switch_at", 0.4]], [["switch_at", 0.8]]] * 2
    early, late = (cell["measures"]["psnr_db"]["value"] for cell in cells[:2])
    assert early != late


def test_a_switch_without_a_refiner_is_refused_before_anything_is_generated(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", tiny_model(ONE_LEVEL), "--axis", "switch_at=0.8", "-o", tmp_path / "out"]
    assert run_main("sweep", *arguments) == 2
    assert "has no refiner to switch to" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
