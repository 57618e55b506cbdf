"""``diffserve calibrate``: which points are chosen from measurements, small runs, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.cli import main
from diffserve.engine import Engine
from diffserve.experiments.calibrate import CANDIDATES, calibrate, candidates
from diffserve.experiments.calibration import Calibration, MeasuredCell, choose, front
from diffserve.experiments.estimates import Estimate
from diffserve.experiments.plan import Cell
from diffserve.experiments.prompts import held_out_prompts
from diffserve.experiments.verdicts import BETTER, EQUIVALENT, NOT_DISTINGUISHABLE, WORSE
from diffserve.settings.quality import QUALITIES
from diffserve.settings.quality_profile import read_profile


def cell(sampler: str, steps: int, seconds: float, psnr_db: float, verdict: str = "") -> MeasuredCell:
    exact = Estimate(0.9, 0.8, 1.0) if verdict else None
    each = Cell(sampler, steps, 3.0)
    return MeasuredCell(cell=each, seconds=seconds, psnr_db=psnr_db, exact=exact, verdict=verdict)


LINE = [
    cell("learned:a", 4, 0.1, 20.0, WORSE),
    cell("ddim", 4, 0.11, 16.0, WORSE),
    cell("learned:b", 5, 0.2, 25.0, NOT_DISTINGUISHABLE),
    cell("unipc", 8, 0.4, 30.0, EQUIVALENT),
    cell("unipc", 9, 0.45, 31.0, EQUIVALENT),
    cell("unipc", 12, 0.8, 40.0, BETTER),
    cell("ddim", 20, 1.0, 33.0, EQUIVALENT),
    cell("unipc", 18, 1.6, 45.0, EQUIVALENT),
    cell("unipc", 40, 3.2, 50.0),
]


def steps_of(points: dict[str, MeasuredCell]) -> dict[str, int]:
    return {name: points[name].cell.num_steps for name in ("draft", "auto", "standard", "fine", "max")}


def test_the_front_leaves_out_cells_that_are_slower_without_being_closer() -> None:
    assert [each.cell.num_steps for each in front(LINE)] == [4, 5, 8, 12, 18, 40]


def test_auto_is_the_fastest_equivalent_point_and_the_others_lie_around_it() -> None:
    assert steps_of(choose(LINE)) == {"draft": 5, "auto": 8, "standard": 12, "fine": 18, "max": 40}


def test_auto_is_max_if_no_faster_point_is_equivalent() -> None:
    line = [msgspec.structs.replace(each, verdict=WORSE if each.verdict else "") for each in LINE]
    points = choose(line)
    assert points["auto"] == points["standard"] == points["fine"] == points["max"] == LINE[-1]
    assert points["draft"].cell.num_steps == 18


def test_without_verdicts_auto_is_the_knee_of_the_front() -> None:
    line = [msgspec.structs.replace(each, verdict="", exact=None) for each in LINE]
    assert choose(line)["auto"].cell.num_steps == 12


def test_a_single_point_is_every_quality() -> None:
    assert {each.cell.num_steps for each in choose(LINE[:1]).values()} == {4}


@pytest.mark.slow
def test_a_small_calibration_of_a_checked_model(tmp_path: Path) -> None:
    engine = Engine.from_pretrained("embedded")
    cells = [Cell("learned:embedded-4", 4, 3.0), Cell("ddim", 4, 3.0), Cell("unipc", 20, 3.0)]
    notes: list[str] = []
    calibration = calibrate(
        engine, held_out_prompts(8), minutes=0.01, cells=cells, reference_steps=40, on_note=notes.append
    )
    assert (calibration.num_screened, calibration.num_prompts, calibration.num_seeds) == (4, 4, 3)
    assert [each.cell for each in calibration.screened] == sorted(
        (each.cell for each in calibration.screened), key=lambda each: each.num_steps
    )
    best = max(calibration.cells, key=lambda each: each.psnr_db)
    assert best.cell == cells[-1]
    assert (best.exact is not None, best.difference, best.verdict) == (True, None, "")
    compared = [each for each in calibration.cells if each is not best and each.exact is not None]
    assert compared, "4 steps take less than half of the time of 20"
    assert all(each.verdict and each.difference is not None for each in compared)
    assert all(each.seconds <= best.seconds / 2 for each in compared)
    profile = calibration.profile()
    assert profile.points.max.sampler == "unipc"
    has_learned = any(each.cell.sampler.startswith("learned:") for each in calibration.cells)
    assert (profile.built_in is not None) == has_learned
    (tmp_path / "p.toml").write_text(profile.to_toml(), encoding="utf-8")
    assert read_profile(tmp_path / "p.toml") == profile
    copy = msgspec.json.decode(msgspec.json.encode(calibration), type=Calibration)
    assert copy.profile() == profile
    assert len(notes) == 2


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command_writes_a_profile_of_a_model_without_a_checker(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("diffserve.experiments.calibrate.CANDIDATES", ("ddim", "unipc"))
    monkeypatch.setattr("diffserve.experiments.calibrate.STEPS", (2, 8))
    file = tmp_path / "made" / "tiny.toml"
    assert run("--model", tiny_model("sd15"), "--minutes", "0.01", "--prompts", "2", "-o", file) == 0
    text = capsys.readouterr().out
    profile = read_profile(file)
    assert "exact match was not measured: only images of the embedded model can be checked" in profile.measure
    assert profile.measure in text
    assert f'quality_profile = "{file}"' in text
    calibration = msgspec.json.decode(file.with_suffix(".json").read_bytes(), type=Calibration)
    assert calibration.profile() == profile
    assert calibration.num_prompts == 0
    assert profile.points.max.exact is None
    assert profile.points.max.psnr_db >= profile.points.draft.psnr_db
    assert {each.cell.sampler for each in calibration.screened} >= {"ddim", "unipc"}
    assert run("--model", tiny_model("sd15"), "-o", file) == 2
    assert "exists; add --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes is 0; it must be above 0 and at most 10000."),
        (["--minutes", "nan"], "--minutes is nan; it must be above 0"),
        (["--seeds", "2"], "--seeds is 2; verdicts need at least 3 per prompt."),
        (["--prompts", "0"], "--prompts is '0'; give 1 to 2000 prompts."),
        (["--prompts", "9999"], "--prompts is '9999'; give 1 to 2000 prompts."),
        (["--prompts", "none.txt"], "cannot read prompts from 'none.txt'"),
        (["-o", "profile.json"], "--output is 'profile.json'; give a name that ends in .toml."),
        (["-o", "/proc/none/p.toml"], "/proc/none"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_few_step_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="embedded-turbo uses 4 steps by default; a few-step model has no conv"):
        candidates(Engine.from_pretrained("embedded-turbo"), "a fox")


def test_candidates_have_all_savings_and_learned_samplers_of_the_model() -> None:
    cells = candidates(Engine.from_pretrained("embedded"), "a fox")
    assert {each.sampler for each in cells} == {*CANDIDATES, *(f"learned:embedded-{n}" for n in (4, 5, 6, 8))}
    assert {each.settings for each in cells} == {(), (("cache_interval", 2),), (("guidance_interval", "0-0.7"),)}
    assert len(set(cells)) == len(cells)
    assert QUALITIES == ("draft", "standard", "fine", "max", "auto")
