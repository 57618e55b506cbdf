"""The GPU suite without a GPU: the dry run of every row, deadlines, rows that hang or crash, the table, the bundle."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

from benchmarks import gpu_bundle, gpu_suite
from benchmarks.device_timing import call_seconds, copy_bytes_per_s, launch_seconds, peak_flops
from benchmarks.gpu import embedded_row
from benchmarks.gpu.drawn_models import draw_tensor
from benchmarks.gpu.report import MOST_ERROR_CHARS, Report, shorten_output
from benchmarks.gpu.run import FIRST_ROW_FAILED, NO_GPU, run_rows
from benchmarks.gpu.schedule import (
    JOBS,
    LENGTH_S,
    SCHEDULE,
    START,
    Row,
    choose_jobs,
    choose_rows,
    next_row,
    planned_starts,
    seconds_of,
)
from benchmarks.gpu.table import MOST_CHARS, goals, table
from benchmarks.gpu.tests_row import OPTIONS, count_outcomes
from benchmarks.gpu.worker import Bench
from diffserve.settings.layers import load_settings

HERE = __name__
ROOT = Path(__file__).resolve().parent.parent
POINTS = {
    "start": ["packages", "doctor", "image", "machine"],
    "tests": ["engine tests"],
    "embedded": ["reference", "exactness-float32", "invariance", "graphs by kind", "out of memory", "rewriter"],
    "sdxl-compiled": ["load", "calls-2", "images", "latency"],
    "sd15": ["load", "calls-2", "compiled", "graphs", "profile", "eager", "layouts", "deterministic", "invariance"],
    "sdxl-images": ["load", "graphs", "vae", "deterministic", "eager", "vae-tiles"],
    "sdxl": ["load", "places", "profile", "layouts", "curve"],
    "diffusers": ["serial", "batch-8", "parity-float32"],
    "server": ["ready", "clients", "cancel", "engine killed", "stop"],
}


@pytest.mark.slow
def test_the_dry_run_measures_every_point_and_leaves_few_files(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_suite.py", "--out", str(tmp_path), "--device", "cpu", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    document = json.loads((tmp_path / "suite.json").read_text(encoding="utf-8"))
    rows = document["rows"]
    assert done.returncode == 0, done.stdout[-6000:]
    assert {name: list(row["points"]) for name, row in rows.items()} == POINTS
    assert {row["state"] for row in rows.values()} == {"done"}
    assert document["num_problems"] == 0
    assert document["jobs"]["sdxl-2"]["exit_code"] == 0
    calls = rows["sdxl-compiled"]["points"]["calls-2"]["result"]
    assert set(calls["row_ms"]) == {"plain", "recorded", "compiled", "compiled and recorded"}
    assert max(calls["difference"].values()) < 1e-3
    assert rows["diffusers"]["points"]["parity-float32"]["result"]["difference"] < 1e-4, (
        "both compute with the same weights"
    )
    assert [row["from_s"] for row in document["schedule"]] == list(planned_starts(SCHEDULE).values())
    files = list(tmp_path.rglob("*"))
    assert len(files) <= 8
    assert all(file.parent == tmp_path and file.stat().st_size < 16 << 20 for file in files)
    assert len(done.stdout) < 12_000


def test_the_schedule_fits_in_ten_minutes_and_rows_that_need_a_quiet_machine_come_last() -> None:
    starts = list(planned_starts(SCHEDULE).values())
    assert starts == [0, 35, 105, 165, 205, 265, 330, 405, 430]
    assert 400 < seconds_of(SCHEDULE) < LENGTH_S < 600
    names = {job.name for job in JOBS}
    assert all(set(row.needs) <= names for row in SCHEDULE)
    assert [row.quiet for row in SCHEDULE] == sorted(row.quiet for row in SCHEDULE)


def test_rows_are_chosen_by_name_and_the_first_always_runs() -> None:
    assert [row.name for row in choose_rows("server,sdxl")] == [START, "server", "sdxl"]
    assert [row.name for row in choose_rows("large")] == [START, "large"]
    assert choose_rows("") == SCHEDULE
    with pytest.raises(ValueError, match=r"no row sdxx; choose from start, tests"):
        choose_rows("sdxl,sdxx")


def test_jobs_are_chosen_by_name() -> None:
    assert [job.name for job in choose_jobs("sd15-16,sdxl-16")] == ["sdxl-16", "sd15-16"]
    assert choose_jobs("") == JOBS
    with pytest.raises(ValueError, match=r"no job sd15; choose from sdxl-16, "):
        choose_jobs("sd15")


def test_a_row_that_waits_for_compile_jobs_lets_others_go_first() -> None:
    row = row_of("plain", "finish")
    quiet, compiled = row._replace(name="quiet", quiet=True), row._replace(name="compiled", needs=("job",), quiet=True)
    assert next_row([compiled, quiet, row], {"job"}) == row
    assert next_row([compiled, quiet], {"job"}) is None, "there is time to wait"
    assert next_row([compiled, quiet], {"job"}, is_patient=False) == quiet
    assert next_row([compiled, quiet], {"another job"}, is_patient=False) == compiled
    assert next_row([compiled, quiet], set()) == compiled


# Rows for the tests below, which a worker imports from this file -------------------------------------------------


def finish(bench: Bench) -> None:
    bench.point("first", lambda: {"pid": os.getpid()})


def fail_in_a_point(bench: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("nothing works")

    bench.point("broken", fail)
    bench.point("after", lambda: {"value": 1})


def hang(bench: Bench) -> None:
    bench.point("before", lambda: {"value": 2})
    time.sleep(600.0)


def crash(bench: Bench) -> None:
    bench.point("before", lambda: {"value": 3})
    os._exit(9)


def crash_by_a_signal(bench: Bench) -> None:
    bench.point("before", lambda: {"value": 6})
    ctypes.string_at(0)


def lose_the_device(bench: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.point("broken", fail)
    bench.point("after", lambda: {"value": 4})


def run_out_of_time(bench: Bench) -> None:
    bench.quick = False
    bench.point("too long", lambda: {"value": 5}, needs_s=1e6)
    bench.point("problem", lambda: {"problems": ["an image is black"]})


def have_no_gpu(bench: Bench) -> None:
    bench.no_gpu("there is no CUDA GPU on this machine.")


def row_of(name: str, function: str, seconds: float = 10.0) -> Row:
    return Row(name, seconds, "for a test", f"{HERE}:{function}")


def run_for_test(rows: list[Row], folder: Path) -> tuple[int, Report]:
    report = Report(folder / "out", {})
    options = {
        "device": "cpu",
        "quick": True,
        "out": str(folder / "out"),
        "work": str(folder),
        "length_s": LENGTH_S,
    }
    return run_rows(rows, (), options, report), report


@pytest.mark.slow
def test_a_row_that_hangs_or_crashes_costs_no_later_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.QUICK_PATIENCE", 1.0)
    rows = [
        row_of(START, "finish", 0.5)._replace(most_s=60.0),
        row_of("hangs", "hang", 0.5)._replace(most_s=5.0),
        row_of("crashes", "crash", 90.0),
        row_of("is killed by a signal", "crash_by_a_signal", 90.0),
        row_of("loses the device", "lose_the_device", 90.0),
        row_of("late", "run_out_of_time", 90.0),
        row_of("last", "finish", 90.0),
    ]
    code, report = run_for_test(rows, tmp_path)
    result = report.document["rows"]
    assert code == 0
    assert {name: row["state"] for name, row in result.items()} == {
        START: "done",
        "hangs": "abandoned",
        "crashes": "abandoned",
        "is killed by a signal": "abandoned",
        "loses the device": "abandoned",
        "late": "done",
        "last": "done",
    }
    assert result["hangs"]["points"]["before"]["result"] == {"value": 2}
    assert result["crashes"]["error"].endswith("the worker ended with 9")
    assert "in crash_by_a_signal" in result["is killed by a signal"]["error"], "a traceback says where it was"
    assert result["is killed by a signal"]["error"].endswith("the worker ended with -11")
    assert "illegal memory access" in result["loses the device"]["points"]["broken"]["error"]
    assert list(result["loses the device"]["points"]) == ["broken"], "nothing can be measured in that process any more"
    assert "left_out" in result["late"]["points"]["too long"]
    assert result["last"]["points"]["first"]["result"]["pid"] != result[START]["points"]["first"]["result"]["pid"]
    assert report.num_errors == 6, "four abandoned rows, an error, a problem"
    written = json.loads((tmp_path / "out" / "suite.json").read_text(encoding="utf-8"))
    assert written["rows"] == result


@pytest.mark.slow
def test_an_error_in_the_first_row_ends_the_run_at_once(tmp_path: Path) -> None:
    code, report = run_for_test([row_of(START, "fail_in_a_point"), row_of("next", "finish")], tmp_path)
    assert code == FIRST_ROW_FAILED
    assert list(report.document["rows"]) == [START]
    points = report.document["rows"][START]["points"]
    assert "nothing works" in points["broken"]["error"]
    assert points["after"]["result"] == {"value": 1}
    assert "ERROR RuntimeError: nothing works" in table(report.document)


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    code, report = run_for_test([row_of(START, "have_no_gpu"), row_of("next", "finish")], tmp_path)
    assert code == NO_GPU
    assert "no CUDA GPU" in report.document["rows"][START]["error"]


def document_of(**rows: Any) -> dict[str, Any]:
    entries = {
        name.replace("_", "-"): {
            "state": "done",
            "started_s": 0.0,
            "wall_s": 1.0,
            "points": {point: {"result": result} for point, result in points.items()},
        }
        for name, points in rows.items()
    }
    return {"rows": entries, "jobs": {}}


def test_goals_are_met_missed_or_not_measured() -> None:
    document = document_of(
        sdxl_images={
            "eager": {"images_per_s": 1.2},
            "graphs": {"images_per_s": 1.5, "row_ms": 16.0},
            "deterministic": {"images_per_s": 1.2, "row_ms": 20.0},
            "latency": {"p99_s": 5.0},
        },
        sdxl_compiled={"images": {"images_per_s": 1.7}},
        diffusers={"serial": {"images_per_s": 0.8}},
    )
    result = {goal.name: (goal.measured, goal.verdict) for goal in goals(document)}
    assert result["SDXL bf16, images/s"] == (1.7, "met")
    assert result["SDXL over diffusers behind a lock"] == (2.125, "met")
    assert result["SDXL over diffusers compiled, by 8"] == (None, "not measured")
    assert result["deterministic mode, time over free"] == (1.25, "missed")
    assert result["SDXL at 0.9 load, p99 s"] == (5.0, "met")
    text = table(document)
    assert text.splitlines()[1].split() == ["SDXL", "bf16,", "images/s", ">=", "1.6", "1.7", "met"]
    assert "graphs: images_per_s 1.5" in text


def test_the_table_stays_short_and_shows_problems_first() -> None:
    many = {f"point {number}": {"ms": 1.0, "words": "x" * 400} for number in range(300)}
    document = document_of(sdxl=many | {"point 0": {"ms": 1.0, "problems": ["an image is black"]}})
    text = table(document)
    assert len(text) < MOST_CHARS + 100
    assert "point 0: PROBLEM an image is black, ms 1" in text


def test_outcomes_of_pytest_are_counted_while_it_runs() -> None:
    parallel = (
        "[gw0] [ 10%] PASSED tests/engine/test_a.py::test_one \n"
        "[gw1] [ 20%] FAILED tests/engine/test_a.py::test_two[cpu] \n"
        "[gw1] [ 30%] SKIPPED tests/engine/test_b.py::test_three \n"
        "FAILED tests/engine/test_a.py::test_two[cpu] - AssertionError\n"
    )
    result = count_outcomes(parallel, None, is_cut=True)
    assert result == {
        "failed": 1,
        "passed": 1,
        "skipped": 1,
        "is_cut": True,
        "num_problems": 1,
        "problems": ["tests/engine/test_a.py::test_two[cpu]"],
    }
    alone = "tests/a.py::test_one PASSED [ 50%]\ntests/a.py::test_two ERROR [100%]\n"
    assert count_outcomes(alone, 1, is_cut=False)["problems"] == ["tests/a.py::test_two"]
    assert "ended with 4" in count_outcomes("ERROR: unknown option --device\n", 4, is_cut=False)["problems"][0]


def bench_on_cpu(tmp_path: Path) -> Bench:
    return Bench({"device": "cpu", "quick": True, "out": tmp_path, "work": tmp_path}, io.StringIO())


@pytest.mark.slow
def test_it_is_a_problem_if_memory_never_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_on_cpu(tmp_path)
    profile = load_settings(model="embedded", env={}).model
    monkeypatch.setattr(embedded_row, "scarce_memory", lambda *_: contextlib.nullcontext(lambda: 0))
    figures = embedded_row._out_of_memory(bench, profile)
    assert figures["painted_with_little"] == figures["images"]
    assert [problem.partition(" with")[0] for problem in figures["problems"]] == ["memory never ran out"]


@pytest.mark.parametrize(("reserved", "allowed"), [(60, 74), (100, 100)])
def test_scarce_memory_counts_what_is_reserved_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: int, allowed: int
) -> None:
    fractions: list[float] = []
    nums_ooms = iter((5, 7))
    for name, value in {
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=1000),
        "memory_allocated": lambda _: 50,
        "memory_reserved": lambda _: reserved,
        "memory_stats": lambda _: {"num_ooms": next(nums_ooms)},
        "set_per_process_memory_fraction": lambda fraction, _: fractions.append(fraction),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    bench = bench_on_cpu(tmp_path)
    bench.device = torch.device("cuda", 0)
    with embedded_row.scarce_memory(bench, None, 24) as num_ooms:  # type: ignore[arg-type]
        assert num_ooms() == 2
    assert fractions == [allowed / 1000, 1.0]


def test_only_inpainting_in_16_bits_may_begin_from_other_noise() -> None:
    def result_of(values: Any) -> Any:
        picture = SimpleNamespace(array=np.zeros((2, 2, 3)))
        return SimpleNamespace(latents=SimpleNamespace(array=np.array(values)), picture=picture)

    expected = {name: result_of([1.0, 0.0]) for name in ("img2img", "inpaint")}
    results = {name: result_of([1.0, 0.047]) for name in ("img2img", "inpaint")}
    problems = {dtype: embedded_row.compare(expected, results, dtype)["problems"] for dtype in embedded_row.TOLERANCES}
    assert [len(some) for some in problems.values()] == [2, 1, 0]
    assert problems["float16"] == ["img2img in float16 is 0.047 away, more than 0.03"]


KILLED_RUN = """
import os, pathlib, time

def test_first():
    assert "what was" == "what is"

def test_second():
    while "-- call of" not in pathlib.Path(os.environ["LOG"]).read_text():
        time.sleep(0.05)
    os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_failure_is_printed_although_pytest_is_killed_later(tmp_path: Path, workers: str) -> None:
    file, log = tmp_path / "test_killed.py", tmp_path / "log"
    file.write_text(KILLED_RUN, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-n", workers, "--rootdir", str(tmp_path), "-c", os.devnull]
    with log.open("wb") as output:
        done = subprocess.run(
            [*command, str(file)],
            cwd=ROOT,
            env=environment | {"LOG": str(log), "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=120,
        )
    text = log.read_text(encoding="utf-8")
    assert done.returncode == -9
    assert "E   AssertionError: assert 'what was' == 'what is'" in text
    assert " FAILURES " not in text


def test_of_a_crash_the_traceback_of_its_thread_is_reported() -> None:
    modules = "Extension modules: " + "numpy.random, " * MOST_ERROR_CHARS
    crash = f"a warning\nFatal Python error: Segmentation fault\n\nCurrent thread 0x0f:\n  File x\n\n{modules}"
    assert shorten_output(crash).startswith("Current thread 0x0f:\n  File x\n")
    assert len(shorten_output(crash)) == MOST_ERROR_CHARS
    assert shorten_output("first\n" * MOST_ERROR_CHARS + "last").endswith("first\nlast")


def test_the_device_is_initialized_before_a_row_reads_its_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    bench = bench_on_cpu(tmp_path)
    bench.device = torch.device("cuda", 0)
    bench.begin(60.0)
    bench.point("first", lambda: 1)
    assert calls == ["init", "reset"]


def test_drawn_weights_are_a_function_of_name_shape_and_seed() -> None:
    device = torch.device("cpu")
    first, again, other, seeded = (
        draw_tensor(name, (8, 16, 3, 3), device, seed) for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)
    assert float(first.abs().max()) <= (16 * 9) ** -0.5
    assert draw_tensor("norm.weight", (4,), device).tolist() == [1.0] * 4
    assert draw_tensor("norm.bias", (4,), device).tolist() == [0.0] * 4


def test_rates_of_the_device_are_positive_and_of_the_right_size() -> None:
    device = torch.device("cpu")
    assert 1e8 < peak_flops(device, torch.float32, size=128) < 1e14
    assert 1e7 < copy_bytes_per_s(device, num_bytes=1 << 20) < 1e13
    assert 1e-8 < launch_seconds(device, launches=50) < 1e-2
    slept = call_seconds(lambda: time.sleep(0.01), device, 3)
    assert len(slept) == 3
    assert min(slept) >= 0.01


def test_the_bundle_counts_what_travels_and_prints_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundle, "LIMIT_MIB", gpu_bundle.tracked_bytes() / 2**20 + 1.0)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "msgspec-1-py3.whl").write_bytes(bytes(1 << 19))
    gpu_bundle.main(wheels=wheels, results="results", download=False)
    counted, command = capsys.readouterr().out.splitlines()
    assert "1 wheels 0.5 MiB" in counted
    assert "--no-index --no-deps" in command
    assert "wheels/msgspec-1-py3.whl && PYTHONPATH=" in command
    assert command.endswith("python3 benchmarks/gpu_suite.py --out results")
    assert len(command) < 2000
    (wheels / "diffusers-1-py3.whl").write_bytes(bytes(1 << 20))
    with pytest.raises(typer.Exit):
        gpu_bundle.main(wheels=wheels, results="results", download=False)
    assert "have to travel" in capsys.readouterr().err


def test_the_wheel_of_diffusers_loses_the_pipelines_of_other_families(tmp_path: Path) -> None:
    kept_names = (
        "diffusers/__init__.py",
        "diffusers/pipelines/__init__.py",
        "diffusers/pipelines/stable_diffusion/pipeline_stable_diffusion.py",
    )
    dropped_names = ("diffusers/pipelines/flux/pipeline_flux.py", "diffusers/modular_pipelines/flux/inputs.py")
    wheel, record = tmp_path / "diffusers-1-py3-none-any.whl", "diffusers-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in (*kept_names, *dropped_names):
            file.writestr(name, "x")
        file.writestr(record, "".join(f"{name},sha256=0,1\n" for name in (*kept_names, *dropped_names, record)))
    for _ in range(2):  # the second time changes nothing
        gpu_bundle.slim_wheel(wheel)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == [*kept_names, record]
        assert [line.partition(",")[0] for line in file.read(record).decode().split()] == [*kept_names, record]
    assert list(tmp_path.iterdir()) == [wheel]


def test_the_wheel_of_sqlalchemy_loses_compiled_modules_and_other_dialects() -> None:
    needed_files = ("sqlalchemy/__init__.py", "sqlalchemy/dialects/__init__.py", "sqlalchemy/dialects/sqlite/base.py")
    extra_files = ("sqlalchemy/cyextension/util.so", "sqlalchemy/testing/util.py", "sqlalchemy/dialects/oracle/base.py")
    assert [name for name in (*needed_files, *extra_files) if gpu_bundle.is_imported(name)] == list(needed_files)


def test_the_small_tree_lacks_what_no_row_reads(tmp_path: Path) -> None:
    size = gpu_bundle.write_tree(tmp_path / "tree")
    assert size < gpu_bundle.tracked_bytes()
    assert not any((tmp_path / "tree" / name).exists() for name in gpu_bundle.NOT_NEEDED)
    assert (tmp_path / "tree" / "benchmarks" / "random_models.py").is_file()
    assert (tmp_path / "tree" / "tests" / "service" / "server.py").is_file()


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no row everything"):
        gpu_suite.main(out=tmp_path, rows="everything")
