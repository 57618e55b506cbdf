"""The quality profile that ships for the embedded model: it follows from its measurements, and its model runs it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from diffserve.engine import Engine
from diffserve.experiments.calibrate import is_accepted
from diffserve.experiments.calibration import Calibration, choose, front
from diffserve.experiments.verdicts import BETTER, EQUIVALENT
from diffserve.settings.layers import configs_dir
from diffserve.settings.quality_profile import read_profile


def shipped() -> tuple[Path, Calibration]:
    file = configs_dir() / "quality" / "embedded.toml"
    return file, msgspec.json.decode(file.with_suffix(".json").read_bytes(), type=Calibration)


def test_the_shipped_profile_is_what_its_data_say() -> None:
    file, calibration = shipped()
    assert read_profile(file) == calibration.profile()
    assert file.read_text(encoding="utf-8") == calibration.profile().to_toml()


def test_auto_of_the_shipped_profile_matches_as_often_as_max_at_a_third_of_its_time() -> None:
    _, calibration = shipped()
    points = choose(calibration.cells)
    auto, best = points["auto"], points["max"]
    assert auto.cell.rows <= best.cell.rows / 3
    assert auto.seconds <= 0.35 * best.seconds  # decoding takes the same time in both
    assert auto.verdict in (EQUIVALENT, BETTER)
    assert auto.difference is not None
    assert auto.difference.low is not None
    assert auto.difference.high is not None
    assert auto.difference.low > -calibration.margin
    assert auto.difference.high >= 0.0
    faster = [each for each in front(calibration.cells) if each.seconds < auto.seconds]
    assert not any(each.verdict in (EQUIVALENT, BETTER) for each in faster)
    assert calibration.num_prompts * calibration.num_seeds >= 128


def test_every_point_of_the_shipped_profile_runs_on_the_shipped_model() -> None:
    engine = Engine.from_pretrained("embedded")
    file, calibration = shipped()
    assert calibration.digest == engine.info.digest
    assert engine.info.quality_profile == "auto"
    assert all(is_accepted(engine, each.cell, "a fox") for each in calibration.cells)
    assert read_profile(file).built_in is not None
