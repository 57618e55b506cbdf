"""Whole sweeps on real engines: paired, batched together, interrupted anywhere, and the same numbers in the end."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.cli import main
from diffserve.cli.sweep import lasting_interrupt
from diffserve.engine import Engine
from diffserve.experiments import run
from diffserve.experiments.engine_generator import EngineGenerator, request_for
from diffserve.experiments.generation import complete
from diffserve.experiments.metrics.fidelity import latent_rmse, psnr_db, ssim
from diffserve.experiments.metrics.set_distance import FeatureNetwork
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.prompts import match_prompts
from diffserve.experiments.records import FinishedImage, ImageRecord, RowsDone
from diffserve.experiments.report import RESULTS
from diffserve.experiments.run import SweepProgress, run_plan, state_power, sweep
from diffserve.experiments.store import PARTS
from diffserve.settings.config import EngineConfig
from diffserve.world.checker import EDITION
from tests.tiny_models import ONE_LEVEL

PLAN = SweepPlan(
    samplers=("ddpm", "ddim", "dpmpp_2m"),
    steps=(2, 4),
    guidance=(3.0,),
    prompts=("a fox on red", "two <b>apples</b>"),
    num_seeds=2,
    reference_steps=6,
)
AXES = ("--samplers", "ddpm,ddim", "--steps", "3,8,12", "--guidance", "3", "--seeds", "2", "--reference-steps", "8")
AS_PLAN = SweepPlan(
    samplers=("ddpm", "ddim"),
    steps=(3, 8, 12),
    guidance=(3.0,),
    prompts=("a fox", "an owl"),
    num_seeds=2,
    reference_steps=8,
)

SMALL: dict[str, Any] = {
    "samplers": ["ddim"], "steps": [2], "prompts": ["a fox"], "seeds": 1, "guidance": 3.0, "reference_steps": 4
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    config = EngineConfig(max_rows=8)
    engine = Engine.from_pretrained(tiny_model(ONE_LEVEL), dtype="float32", device="cpu", config=config)
    yield engine
    engine.check_integrity()
    assert not engine.num_live


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """Return the cells of a report without measured times."""
    cells = json.loads((folder / "report.json").read_bytes())["cells"]
    return [{name: cell[name] for name in cell if not name.endswith(("_s", "_ms"))} for cell in cells]


def journals(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / PARTS).glob("*.jsonl")}


@pytest.fixture(scope="module")
def sweep_folder(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep without interruption; return its folder."""
    folder = tmp_path_factory.mktemp("sweep") / "new" / "folder"
    run_plan(tiny, PLAN, folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the numbers of the command line's sweep without interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_plan(tiny, AS_PLAN, folder)
    return numbers_of(folder)


@pytest.fixture(scope="module")
def small(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep of two images; return its folder."""
    folder = tmp_path_factory.mktemp("small")
    assert sweep(tiny, folder=folder, **SMALL).cells[0].num_images == 1
    return folder


def test_a_report_as_a_table_has_a_row_for_each_cell(tiny: Engine, small: Path) -> None:
    report = sweep(tiny, folder=small, **SMALL)
    table = report.to_frame()
    assert table["sampler"].tolist() == ["ddim", "ddim"]
    assert table["converged"].tolist() == [0, 1]
    assert table["psnr_db"][0] == pytest.approx(report.cells[0].measures["psnr_db"].value, rel=1e-5)


def test_a_sweep_leaves_a_table_a_document_plots_and_a_page(sweep_folder: Path) -> None:
    names = {file.name for file in sweep_folder.iterdir()}
    assert names == {*RESULTS, "strip-1.png", "strip-2.png", PARTS}
    document = json.loads((sweep_folder / "report.json").read_bytes())
    assert document["model"]["dtype"] == "float32"
    assert len(document["model"]["digest"]) == 12
    assert {"torch", "torchmetrics", "diffserve", "python"} <= set(document["versions"])
    assert document["plan"]["steps"] == [2, 4]
    assert {cell["spacing"] for cell in document["cells"]} == {document["model"]["default_spacing"]}
    page = (sweep_folder / "report.html").read_text(encoding="utf-8")
    assert "two &lt;b&gt;apples&lt;/b&gt;" in page
    assert "<b>apples" not in page
    rows = list(csv.DictReader(io.StringIO((sweep_folder / "cells.csv").read_text(encoding="utf-8"))))
    assert [row["sampler"] for row in rows] == ["ddpm", "ddim", "dpmpp_2m"] * 2 + ["ddim"]
    assert {row["images"] for row in rows} == {"4"}


def test_power_uses_the_deviations_of_an_earlier_report(sweep_folder: Path, tmp_path: Path) -> None:
    document = json.loads((sweep_folder / "report.json").read_text(encoding="utf-8"))
    plan = msgspec.convert(document["plan"], SweepPlan)
    assert state_power(plan, sweep_folder)[:-1] == state_power(plan, None), "two prompts have no deviation"
    assert state_power(plan, sweep_folder)[-1].endswith("has none of these comparisons, so deviations are assumed.")
    for comparison in document["comparisons"]:
        comparison["deviation"] = 0.25
    (tmp_path / "report.json").write_text(json.dumps(document), encoding="utf-8")
    sentences = state_power(plan, tmp_path)
    assert any("deviation 0.2 dB)" in sentence for sentence in sentences)
    assert not any("none of these" in sentence for sentence in sentences)


def test_prompts_of_no_picture_world_are_not_matched_and_the_report_says_why(sweep_folder: Path) -> None:
    document = json.loads((sweep_folder / "report.json").read_bytes())
    assert any("only images of the embedded model can be checked" in note for note in document["notes"])
    assert set(document["cells"][0]["measures"]) == {
        "latent_rmse", "psnr_db", "ssim", "frechet_converged", "kid_converged"
    }  # fmt: skip


def test_records_hold_what_the_engine_paints_for_the_same_request(tiny: Engine, sweep_folder: Path) -> None:
    place, cell = (1, 1), PLAN.cells[4]
    painted, converged = tiny.generate(
        [request_for(PLAN, each_cell, place, return_latents=True) for each_cell in (cell, PLAN.references[0])]
    )
    lines = next(data for name, data in journals(sweep_folder).items() if name.startswith(f"{cell.slug}-")).splitlines()
    (record,) = [line_record for line in lines if (line_record := decode(line)).place == place]
    assert painted.latents is not None
    assert converged.latents is not None
    assert record.distance is not None
    assert record.distance.latent_rmse == latent_rmse(painted.latents.array, converged.latents.array)
    assert record.distance.psnr_db == psnr_db(painted.pixels, converged.pixels)
    assert record.distance.ssim == ssim(painted.pixels, converged.pixels)
    assert record.features == pytest.approx(FeatureNetwork().features(painted.pixels).tolist())
    assert (record.seed, record.evaluations, record.spacing) == (3, 8, painted.spacing)


def decode(line: bytes) -> ImageRecord:
    return msgspec.json.decode(line, type=ImageRecord)


def test_cells_share_calls_and_their_engine_time_adds_up(tiny: Engine) -> None:
    generator = EngineGenerator(tiny, PLAN)
    mixed, num_rows, charged_s = 0, 0.0, 0.0
    started_s = time.perf_counter()

    async def paint() -> None:
        nonlocal mixed, num_rows, charged_s
        async for event in generator.generate([image for image in PLAN.images() if not image.cell.is_reference]):
            if isinstance(event, FinishedImage):
                charged_s += event.engine_s
            elif isinstance(event, RowsDone):
                num_rows += sum(event.rows.values())
                mixed += len({image.cell for image in event.rows}) > 1

    complete(paint())
    assert mixed > 0
    assert num_rows == sum(cell.rows for cell in PLAN.cells) * 4
    assert 0 < charged_s <= time.perf_counter() - started_s
    assert any(len(set(call_requests)) > 1 for call_requests in (tick.request_ids for tick in tiny.trace))


def test_a_finished_sweep_paints_nothing_again(tiny: Engine, sweep_folder: Path) -> None:
    before, numbers = journals(sweep_folder), numbers_of(sweep_folder)
    events: list[SweepProgress] = []
    run_plan(tiny, PLAN, sweep_folder, events.append)
    assert [(event.phase, event.num_rows) for event in events] == [("reporting", 0)]
    assert journals(sweep_folder) == before
    assert numbers_of(sweep_folder) == numbers


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_and_then_given_more_steps_redoes_no_picture_and_ends_in_the_same_numbers(
    tiny: Engine, sweep_folder: Path, tmp_path: Path
) -> None:
    few = msgspec.structs.replace(PLAN, steps=(2,))
    report, before = tmp_path / "report.html", dict[str, bytes]()
    for plan, num_finished in ((few, 1), (few, None), (PLAN, 2), (PLAN, None)):
        page = report.read_bytes() if plan is PLAN else None
        events = run_until(num_finished, tiny, plan, tmp_path)
        after = journals(tmp_path)
        assert all(after[name].startswith(data) for name, data in before.items())
        if num_finished is None:
            assert events[0].num_rows < plan.num_rows
            assert events[-2].rows_done == events[0].num_rows
            assert [len(data.splitlines()) for data in after.values()] == [4] * len(plan.all_cells)
        else:
            assert not tiny.num_live
            assert (report.read_bytes() if report.exists() else None) == page
        before = after
    assert numbers_of(tmp_path) == numbers_of(sweep_folder)


def run_until(num_finished: int | None, engine: Engine, plan: SweepPlan, folder: Path) -> list[SweepProgress]:
    """Return the events of a sweep until its end, or until it is interrupted after ``num_finished`` cells."""
    events: list[SweepProgress] = []

    def look(now: SweepProgress) -> None:
        events.append(now)
        if len([event for event in events if event.finished is not None]) == num_finished:
            raise KeyboardInterrupt

    with contextlib.nullcontext() if num_finished is None else pytest.raises(KeyboardInterrupt):
        run_plan(engine, plan, folder, look)
    return events


LOOKING = SweepPlan(
    samplers=("ddpm", "pc", "dpmpp_2m"),
    steps=(2,),
    guidance=(3.0,),
    prompts=("a fox", "an owl", "a cat", "a dog"),
    num_seeds=6,
    reference_steps=6,
    looks=(3, 6),
    detect={"psnr_db": 1e-6},
)
"""ddpm and pc are about as far from the converged images, so their verdict stays open; that on dpmpp_2m is clear."""


def num_lines(folder: Path) -> dict[str, int]:
    return {name.rsplit("-", 1)[0]: len(data.splitlines()) for name, data in journals(folder).items()}


def test_cells_with_open_verdicts_get_more_images_and_a_resumed_sweep_decides_the_same(
    tiny: Engine, tmp_path: Path
) -> None:
    notes: list[str] = []
    complete, stopped = tmp_path / "whole", tmp_path / "stopped"
    report = run_plan(tiny, LOOKING, complete, on_note=notes.append)
    counts = {"converged-ddim-6-g3": 24, "ddpm-2-g3": 24, "pc-2-g3": 24, "dpmpp_2m-2-g3": 12}
    assert num_lines(complete) == counts
    assert notes[0] == "after 3 seeds per prompt, 1 verdicts are open"
    assert notes[1].startswith("pc 2 against ddpm 2: 4 prompts detect a difference of")
    verdicts = {(each.cell.sampler, each.measure): each.verdict for each in report.comparisons}
    assert verdicts["dpmpp_2m", "psnr_db"] == "better"
    run_until(2, tiny, LOOKING, stopped)
    run_until(5, tiny, LOOKING, stopped)
    run_plan(tiny, LOOKING, stopped)
    assert num_lines(stopped) == counts
    assert numbers_of(stopped) == numbers_of(complete)


def test_no_images_are_added_after_the_time_is_up(tiny: Engine, tmp_path: Path) -> None:
    report = run_plan(tiny, LOOKING, tmp_path, max_minutes=0)
    assert {summary.num_images for summary in report.cells} == {12}
    assert any("Verdicts were looked at after 3 and 6 seeds" in note for note in notes_of(tmp_path))


def notes_of(folder: Path) -> list[str]:
    notes: list[str] = json.loads((folder / "report.json").read_bytes())["notes"]
    return notes


def test_a_sweep_with_other_axes_is_resumed_and_reports_every_value(tiny: Engine, tmp_path: Path) -> None:
    plan = msgspec.structs.replace(
        PLAN, samplers=("ddim",), steps=(2,), axes={"eta": (0.0, 1.0), "guidance_rescale": (0.0, 0.7)}
    )
    few = msgspec.structs.replace(plan, axes={"eta": (0.0,), "guidance_rescale": (0.0, 0.7)})
    complete, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_plan(tiny, plan, complete)
    run_until(1, tiny, few, stopped)
    run_until(2, tiny, plan, stopped)
    report = run_plan(tiny, plan, stopped)
    assert numbers_of(stopped) == numbers_of(complete)
    assert set(num_lines(complete).values()) == {4}
    assert len(num_lines(complete)) == 4 + 2, "guidance_rescale changes the converged images, eta does not"
    rows = list(csv.DictReader(io.StringIO((complete / "cells.csv").read_text(encoding="utf-8"))))
    settings = [(row["eta"], row["guidance_rescale"]) for row in rows]
    assert settings == [("0.0", "0.0"), ("0.0", "0.7"), ("1.0", "0.0"), ("1.0", "0.7"), ("", "0.0"), ("", "0.7")]
    pairs = {(each.cell.label, each.baseline.label) for each in report.comparisons}
    assert ("ddim 2, eta 1, guidance_rescale 0.7", "ddim 2, eta 0, guidance_rescale 0.7") in pairs
    assert "eta 1" in (complete / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_seed": 9}, "other first seed (0, now 9)"),
        ({"prompts": ["an owl"]}, "other prompts; choose"),
        ({"reference_steps": 5}, "other reference steps (4, now 5)"),
    ],
)
def test_a_folder_with_a_sweep_of_another_plan_is_refused_and_left_as_it_is(
    small: Path, tiny: Engine, change: dict[str, Any], message: str
) -> None:
    before = {file: file.read_bytes() for file in small.rglob("*") if file.is_file()}
    with pytest.raises(InvalidRequest, match=re.escape(f"has a sweep with {message}")):
        sweep(tiny, folder=small, **{**SMALL, **change})
    assert {file: file.read_bytes() for file in small.rglob("*") if file.is_file()} == before


def test_a_folder_with_a_sweep_of_another_model_is_refused(
    small: Path, tiny: Engine, tiny_model: Callable[[str], Path]
) -> None:
    other = Engine.from_pretrained(tiny_model("sd2"), dtype="float32", device="cpu")
    with pytest.raises(InvalidRequest, match=f"other weights .{tiny.info.digest}, now {other.info.digest}."):
        sweep(other, folder=small, **SMALL)
    assert sweep(tiny, folder=small, **SMALL).page == small / "report.html"


def test_starting_latents_are_the_same_in_every_cell(tiny: Engine) -> None:
    """One DDIM step and one Euler step of the same seed both end in the network's first denoised estimate."""
    plan = SweepPlan(samplers=("ddim", "euler"), steps=(1,), guidance=(3.0,), prompts=("a fox",), num_seeds=2)
    results = tiny.generate([request_for(plan, cell, place) for place in plan.places for cell in plan.cells])
    assert [result.seed for result in results] == [0, 0, 1, 1]
    pictures = [result.pixels.astype(int) for result in results]
    assert np.abs(pictures[0] - pictures[2]).mean() > 5 * max(1.0, float(np.abs(pictures[0] - pictures[1]).mean()))


def run_main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samplers", "ddim,eular"], "sampler is 'eular', which is unknown. Did you mean 'euler'"),
        (["--samplers", ""], "--samplers is empty; write values with commas between them."),
        (["--steps", ""], "--steps is empty"),
        (["--steps", "5,x"], "--steps has 'x', which is not a whole number."),
        (["--steps", "0"], "num_steps is 0; ask for at least 1 step."),
        (["--guidance", "lots"], "--guidance has 'lots', which is not a number."),
        (["--prompts", "0"], "prompts is empty"),
        (["--prompts", "-3"], "prompts is empty"),
        (["--prompts", "no-such-file.txt"], "cannot read prompts from 'no-such-file.txt': No such file or directory."),
        (["--seeds", "0"], "seeds is 0"),
        (["--steps", "5,1001"], "steps has 1001"),
        (["--steps", "9" * 5000], "of 5000 digits; at most 18 are allowed"),
        (["--guidance", "9" * 5000], "guidance_scale is inf"),
        (["--prompts", "9" * 5000], "of 5000 digits; at most 18 are allowed"),
        (["--prompts", "999999999"], "--prompts is 999999999; at most 2000 are allowed"),
        (["--reference-steps", "4000"], "reference_steps has 4000"),
        (["--prompts", "."], "'.' has no prompts; it needs .txt files with one prompt each."),
        (["--prompts", "empty"], "'empty' has no prompts; write one per line."),
        (["--guidance", ""], "--guidance is empty"),
        (["--seeds", "some"], "Invalid value for '--seeds'"),
        (["-o", "file"], "cannot write to 'file': Not a directory."),
        (["-o", "other"], "'other' has a sweep with other first seed (7, now 0); choose another folder."),
        (["-o", "mine"], "'mine' has a report.html that was not written by a sweep; choose another folder."),
        (["--axis", "beauty=1"], "'beauty' is not an axis; the axes are"),
        (["--axis", "eta=0-3"], "eta is 2.0; it must lie between 0 and 1."),
        (["--axis", "steps=50-10"], "'50-10', which is an empty range"),
        (["--axis", "steps=5", "--steps", "5"], "the axis steps is given twice"),
        (["--axis", "spacing=wide"], "'wide'"),
        (["--axis", "lora:none=1"], "none"),
        (["--axis", "prompt=a fox", "--export-layout", "geneval"], "needs the same prompts in every cell"),
        (["--detect", "beauty=1"], "detect has 'beauty'; the measures are exact"),
        (["--until-decided", "--max-images", "9"], "--max-images is 9; 64 prompts with 4 seeds start with 256 images"),
        (["--max-minutes", "5"], "--max-minutes needs --until-decided"),
        (["--previous", "none"], "cannot read 'none': No such file or directory."),
        (["--measures", "fid=x"], "--measures has 'fid'; the measures are clip_score, pick_score"),
        (["--measures", "clip_score"], "needs weights: pass --measures clip_score=FOLDER with a CLIP model in transf"),
        (["--measures", "lpips=."], "lpips cannot use '.'; it needs a backbone in transformers' format"),
        (["--detect", "pick_score=1"], "pick_score needs weights: pass --measures pick_score=FOLDER"),
        (["--export-layout", "coco"], "export-layout is 'coco'; choose one of geneval, dpg-bench, t2i-compbench."),
        (["--export-layout", "geneval"], "pass --prompts evaluation_metadata.jsonl."),
        (["--search", "--measures", "lpips=."], "--measures and --export-layout are for sweeps; leave them out"),
        (["-o", "file/deeper"], "cannot write to 'file/deeper': Not a directory."),
        (["-o", "/proc/sweep"], "cannot write to '/proc/sweep': "),
        (["--prompts", "wide"], "'wide' is not UTF-8 text; save it as UTF-8 with one prompt per line."),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    model = tiny_model("sd15")
    monkeypatch.chdir(tmp_path)
    files = {"file": "mine", "empty": "\n", "other/parts/setup.json": '{"first_seed": 7}', "mine/report.html": "mine"}
    files["wide"] = "a\0 \0f\0o\0x\0"  # English text in UTF-16
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert run_main("sweep", "--model", model, "-o", "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("diffserve: ")
    assert "Traceback" not in error
    left = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert left == files


def test_a_sweep_that_another_edition_of_the_checker_read_is_not_gone_on_with(
    tiny: Engine, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "EDITION", EDITION + 1)
    with pytest.raises(InvalidRequest, match="has a sweep with other versions"):
        sweep(tiny, folder=small, **SMALL)


@pytest.mark.slow
def test_the_command_line_paints_and_ends_with_the_page(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a fox\nan owl\n", encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["--model", tiny_model(ONE_LEVEL), "--samplers", "ddim", "--steps", "2,3", "--prompts"]
    assert run_main("sweep", *arguments, tmp_path / "prompts.txt", "--seeds", 1, "--reference-steps", 4, "-o", out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(out / "report.html")
    assert [line.split()[:2] for line in lines[1:4]] == [["ddim", "2"], ["ddim", "3"], ["ddim", "4"]]


def test_an_engine_refuses_a_plan_that_it_cannot_paint_and_nothing_is_made(tiny: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="steps has 1001"):
        sweep(tiny, folder=tmp_path / "out", samplers=["ddim"], steps=[1001], prompts=["a fox"], seeds=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.chaos
def test_a_sweep_that_was_stopped_and_then_killed_goes_on_where_it_was(
    tiny_model: Callable[[str], Path],
    undisturbed: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(AS_PLAN.prompts), encoding="utf-8")
    model, stopped, prompts = tiny_model(ONE_LEVEL), tmp_path / "stopped", tmp_path / "prompts.txt"
    arguments = ["sweep", "--model", model, "--dtype", "float32", *AXES, "--prompts", prompts, "-o", stopped]
    command = [sys.executable, "-m", "diffserve", *map(str, arguments)]
    contents: dict[str, bytes] = {}
    for how in (signal.SIGINT, signal.SIGKILL):
        code, error = stop_when_a_cell_is_finished(command, stopped, how)
        if how == signal.SIGINT:
            message = f"stopped; finished images are kept in {stopped}; run the same command again to continue"
            assert (code, error.splitlines()[-1]) == (130, message)
        else:
            assert "of the work is already done and is not repeated" in error
        before = journals(stopped)
        assert {name: before[name] for name in contents} == contents
        contents = {name: data for name, data in before.items() if is_whole(data)}
        assert contents
    assert run_main(*arguments) == 0
    assert "of the work is already done and is not repeated" in capsys.readouterr().err
    after = journals(stopped)
    assert {name: after[name] for name in contents} == contents
    assert all(len(data.splitlines()) == 4 for data in after.values())
    assert numbers_of(stopped) == undisturbed


def is_whole(journal: bytes) -> bool:
    """Whether it holds all four pictures of a cell."""
    return len(journal.splitlines()) == 4 and journal.endswith(b"\n")


def test_an_interrupt_that_was_lost_on_the_way_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with lasting_interrupt() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def stop_when_a_cell_is_finished(command: list[str], folder: Path, how: signal.Signals) -> tuple[int, str]:
    """Send a signal to a real process once it has finished another cell.

    Returns:
        Its exit code and its standard error.
    """
    num_cells = num_finished(folder) + 1
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + 240
        while num_finished(folder) < num_cells:
            assert process.poll() is None, "the sweep ended before it could be stopped"
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.kill(process.pid, how)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert not (folder / "report.html").exists(), error
    return process.returncode, error


def num_finished(folder: Path) -> int:
    """How many cells are whole, the converged pictures aside."""
    return sum(is_whole(data) for name, data in journals(folder).items() if not name.startswith("converged"))


@pytest.mark.slow
def test_the_embedded_model_is_matched_against_its_prompts_and_against_drawn_scenes(tmp_path: Path) -> None:
    how: dict[str, Any] = {"samplers": ["ddim"], "steps": [2, 4], "guidance": 1.0, "seeds": 1, "reference_steps": 6}
    engine = Engine.from_pretrained("embedded", config=EngineConfig(max_rows=4))
    report = sweep(engine, folder=tmp_path, prompts=2, **how)
    few, many, converged = report.cells
    for each_report in (few, many, converged):
        assert {"exact", "frechet", "kid"} <= set(each_report.measures)
        assert set(each_report.parts) == {"background", "objects", "relation", "size"}
    assert many.measures["latent_rmse"].value < few.measures["latent_rmse"].value
    assert many.measures["psnr_db"].value > few.measures["psnr_db"].value
    document = json.loads((tmp_path / "report.json").read_bytes())
    assert any(note.startswith("Rendered scenes: 32 per prompt") for note in document["notes"])
    assert (tmp_path / "strip-2.png").is_file()


@pytest.mark.slow
def test_a_prompt_matrix_is_judged_prompt_by_prompt(tmp_path: Path) -> None:
    how: dict[str, Any] = {"samplers": ["ddim"], "steps": [4], "guidance": 1.0, "seeds": 3, "reference_steps": 6}
    engine = Engine.from_pretrained("embedded", config=EngineConfig(max_rows=8))
    report = sweep(engine, folder=tmp_path, axes={"prompt": ["a {fox|castle}"]}, **how)
    fox, castle, *_ = report.cells
    for cell, prompt in ((fox, "a fox"), (castle, "a castle")):
        assert cell.cell.prompt == prompt
        verdicts = match_prompts(pictures_of(engine, prompt), [prompt] * 3).verdicts
        assert cell.measures["exact"].value == pytest.approx(sum(verdict.exact for verdict in verdicts) / 3)
    assert {comparison.measure for comparison in report.comparisons} == {"exact"}
    assert not {"frechet", "kid"} & set(fox.measures)
    assert "a castle" in (tmp_path / "report.html").read_text()


def pictures_of(engine: Engine, prompt: str) -> list[Any]:
    """Return three images of a prompt with the settings of the sweep above."""
    diffusion = DiffusionParams(sampler="ddim", num_steps=4, guidance_scale=1.0)
    request = GenerationRequest(prompt=prompt, seed=0, num_images=3, diffusion=diffusion)
    return [result.pixels for result in engine.generate(request)]
