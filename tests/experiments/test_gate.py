"""The gate for precisions: a good one passes, a bad one fails, with the exit code that says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.cli import main
from diffserve.cli.gate import EXIT_GATE_FAILED
from diffserve.engine import Engine
from diffserve.experiments.engines import OpenEngine
from diffserve.experiments.estimates import Estimate
from diffserve.experiments.gate import (
    JSON,
    RESULTS,
    GateLimits,
    GateReport,
    GateRow,
    PrecisionGate,
    broken,
    run_gate,
)
from diffserve.experiments.plan import Cell, EngineKey, SweepPlan
from diffserve.experiments.run import SweepProgress
from diffserve.runtime.precision import cpu_int8_unit
from diffserve.settings.config import EngineConfig
from tests.tiny_models import ONE_LEVEL

PLAN = SweepPlan(
    samplers=("ddim",), steps=(3,), guidance=(3.0,), prompts=("a fox", "an owl"), num_seeds=2, reference_steps=None
)
GATE = PrecisionGate("float32", ("bfloat16",))
ROW = GateRow(precision="int8", cell=PLAN.cells[0], num_images=4, unet_bytes=1, engine_s=0.1)

Passed = tuple[GateReport, Path, list[SweepProgress]]


def coarse(layer: torch.nn.Module, levels: int = 3) -> None:
    """Weights rounded to so few levels for each output row: what a broken quantiser does."""
    weight = layer.get_parameter("weight").data
    scale = weight.abs().amax(1, keepdim=True) / levels
    weight.copy_((weight / scale).round() * scale)


def opener(path: Path, damaged: str | None = None) -> OpenEngine:
    """Return a function that opens the model in a precision, ``damaged`` with coarse weights."""

    def open_engine(key: EngineKey) -> Engine:
        precision = str(dict(key)["precision"])
        engine = Engine.from_pretrained(path, dtype=precision, device="cpu", config=EngineConfig(max_rows=4))
        if precision == damaged:
            for part in engine.model.unet.network.modules():
                if isinstance(part, torch.nn.Linear):
                    coarse(part, levels=1)
        return engine

    return open_engine


@pytest.fixture(scope="module")
def passed(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Passed:
    """Run a gate that all candidates pass; return its report, its folder and its progress events."""
    folder, events = tmp_path_factory.mktemp("gate"), list[SweepProgress]()
    return run_gate(GATE, PLAN, GateLimits(), folder, opener(tiny_model(ONE_LEVEL)), events.append), folder, events


@pytest.mark.slow
def test_the_same_pictures_pass_and_coarse_weights_fail(
    passed: Passed, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    good, *_ = passed
    assert good.failed == ()
    assert [row.precision for row in good.rows] == ["float32", "bfloat16"]
    psnr = good.rows[1].psnr_db
    assert psnr is not None
    assert good.rows[1].worst_psnr_db is not None
    assert 20 < good.rows[1].worst_psnr_db <= psnr.value < 99
    assert good.rows[1].unet_bytes == good.rows[0].unet_bytes / 2
    limits = GateLimits(psnr_db=psnr.value - 3)
    bad = run_gate(GATE, PLAN, limits, tmp_path, opener(tiny_model(ONE_LEVEL), "bfloat16"))
    assert bad.failed == ("bfloat16",)
    assert any(line.startswith("PSNR is") for line in bad.rows[1].failures)


@pytest.mark.slow
def test_a_gate_leaves_a_document_a_page_and_pictures_and_paints_nothing_twice(
    passed: Passed, tiny_model: Callable[[str], Path]
) -> None:
    first, folder, events = passed
    phases = tuple(f"painting, precision {name}" for name in GATE.names)
    assert tuple(dict.fromkeys(event.phase for event in events)) == phases
    for number, phase in enumerate(phases, start=1):
        last = [event for event in events if event.phase == phase][-1]
        assert (last.rows_done, last.num_rows) == (number * PLAN.num_painted_rows, 2 * PLAN.num_painted_rows)
        assert last.finished is not None
    assert {file.name for file in folder.iterdir()} == {*RESULTS, "parts"}
    document = json.loads((folder / JSON).read_bytes())
    assert document["reference"] == "float32"
    assert document["failed"] == []
    assert document["models"]["bfloat16"]["dtype"] == "bfloat16"
    assert msgspec.convert(document["rows"], tuple[GateRow, ...]) == first.rows
    assert any("only images of the embedded model can be checked" in note for note in document["notes"])
    with Image.open(folder / "gate.png") as sheet:
        assert sheet.size == (2 * 64 + 2, 2 * 64 + 2)  # two prompts, two precisions
    later_events = list[SweepProgress]()
    again = run_gate(GATE, PLAN, GateLimits(), folder, opener(tiny_model(ONE_LEVEL)), later_events.append)
    assert later_events == []
    assert again.rows == first.rows


@pytest.mark.parametrize(
    ("row", "failures"),
    [
        ({"exact_change": Estimate(-0.04), "psnr_db": Estimate(30.0), "frechet": 0.1}, []),
        ({"exact_change": Estimate(-0.2)}, ["exact prompt match is 20.0 points lower, at most 5 are allowed"]),
        ({"exact_change": Estimate(0.2)}, []),
        ({"psnr_db": Estimate(9.0), "frechet": 3.0}, ["PSNR is 9.0 dB, at", "the Frechet distance is 3, at most 1"]),
    ],
)
def test_every_violated_limit_has_a_message(row: dict[str, object], failures: list[str]) -> None:
    limits = GateLimits(exact_points=5, psnr_db=20, frechet=1)
    violations = list(broken(msgspec.structs.replace(ROW, **row), limits))
    assert [line[: len(start)] for line, start in zip(violations, failures, strict=True)] == failures


def test_short_names_are_known() -> None:
    assert PrecisionGate.parse("fp32: bf16,int8") == PrecisionGate("float32", ("bfloat16", "int8"))


def test_the_removed_precision_float8_is_judged_as_bfloat16() -> None:
    assert PrecisionGate.parse("fp32:fp8") == PrecisionGate("float32", ("bfloat16",))


@pytest.mark.parametrize("text", ["", "fp32", ":bf16", "fp32:", "fp32:bf16,", "fp32:bf16,fp32", "bf16:int8,int8"])
def test_a_gate_that_is_not_written_as_one_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--gate"):
        PrecisionGate.parse(text)


@pytest.mark.parametrize(("name", "value"), [("psnr_db", -1), ("exact_points", 101), ("frechet", float("nan"))])
def test_a_limit_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is .*; it must lie between 0 and"):
        GateLimits(**{name: value})


def run_main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gate", "fp32"], "--gate is 'fp32'; write it as REFERENCE:CANDIDATE"),
        (["--gate", "fp32:fp33"], "--gate: dtype is 'fp33'; choose one of auto, float32"),
        (["--gate", "fp32:bf16", "--dtype", "int8"], "--dtype and --gate both set precisions; give only --gate."),
        (["--gate", "fp32:bf16", "--gate-psnr", "200"], "psnr_db is 200; it must lie between 0 and 99."),
        (["--gate-psnr", "20"], "add --gate REFERENCE:CANDIDATES."),
        (["--gate", "fp32:int8", "--offload", "cpu"], "--gate: offload is 'cpu' with dtype int8"),
        (["--gate", "fp32:int8", "--axis", "precision=int8"], "--gate compares precisions of one model; leave --axis"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_painted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_main("sweep", "-o", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file with two prompts."""
    file = tmp_path / "prompts.txt"
    file.write_text("a fox\nan owl\n", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gate-exact", 5], "--gate-exact: exact prompt match cannot be measured: only images of the embedded model"),
        (["--gate-frechet", 1, "--prompts", "{one}"], "--gate-frechet needs at least 2 images of each precision"),
    ],
)
def test_a_named_measure_that_cannot_be_computed_is_refused_before_anything_is_generated(
    tiny_model: Callable[[str], Path],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    (tmp_path / "one.txt").write_text("a fox\n", encoding="utf-8")
    options = [tmp_path / "one.txt" if argument == "{one}" else argument for argument in arguments]
    gate = ["--gate", "float32:bfloat16", "--model", tiny_model(ONE_LEVEL), "--device", "cpu", "--prompts", prompts]
    assert run_main("sweep", *gate, "--steps", 2, *options, "-o", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_precision_of_a_random_sdxl_is_judged_by_named_measures(
    tiny_model: Callable[[str], Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limits allow the numerical error of random weights; int8 arithmetic needs a CPU with an int8 unit."""
    quantized = ["int8", *(["int8_dynamic", "int8_static"] if cpu_int8_unit() else [])]
    gate = ["--gate", f"float32:bfloat16,{','.join(quantized)}", "--gate-psnr", 25, "--gate-frechet", 0.5]
    counts = ["--prompts", prompts, "--samplers", "ddim", "--steps", 10, "--device", "cpu"]
    code = run_main("sweep", *gate, "--model", tiny_model("sdxl"), *counts, "-o", tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    rows = json.loads((tmp_path / "out" / JSON).read_bytes())["rows"]
    assert [row["precision"] for row in rows] == ["float32", "bfloat16", *quantized]
    assert all(20 < row["worst_psnr_db"] < 99 and row["exact"] is None for row in rows[1:])
    assert rows[0]["unet_bytes"] > rows[1]["unet_bytes"] > rows[2]["unet_bytes"]


@pytest.mark.slow
def test_int8_of_a_pruned_embedded_model_passes_and_a_broken_quantiser_ends_with_the_exit_code_of_a_failed_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFSERVE_ENGINE_MAX_ROWS", "2")
    assert run_main("prune", "--channels", 0.25, "-o", tmp_path / "pruned") == 0
    arguments = ["sweep", "--gate", "float32:int8", "--model", tmp_path / "pruned", "--prompts", 2, "--steps", 10, "-o"]
    assert run_main(*arguments, tmp_path / "good") == 0
    assert ", guidance 3: passes." in capsys.readouterr().out
    document = json.loads((tmp_path / "good" / JSON).read_bytes())
    assert [row["exact"] >= 0.75 for row in document["rows"]] == [True, True]
    (tmp_path / "bad" / "parts").mkdir(parents=True)
    for part in (tmp_path / "good" / "parts").glob("*float32*"):  # which is not painted twice
        (shutil.copytree if part.is_dir() else shutil.copy)(part, tmp_path / "bad" / "parts" / part.name)
    shutil.copy(tmp_path / "good" / "parts" / "setup.json", tmp_path / "bad" / "parts")
    monkeypatch.setattr("diffserve.runtime.quantization.hold_int8_weight", coarse)
    assert run_main(*arguments, tmp_path / "bad") == EXIT_GATE_FAILED
    output = capsys.readouterr().out
    assert ", guidance 3: fails: " in output
    document = json.loads((tmp_path / "bad" / JSON).read_bytes())
    assert document["failed"] == ["int8"]
    assert msgspec.convert(document["rows"][0]["cell"], Cell) == Cell("dpmpp_2m_sde", 10, 3.0)
