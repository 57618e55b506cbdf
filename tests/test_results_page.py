"""The page of results: as committed, and what it says of what was not measured or misses its goal."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results_page import DESIGNS, PAGE, RESULTS, follow, newest, page


def test_the_page_is_what_the_committed_figures_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(newest(RESULTS)), "run: python benchmarks/results_page.py"


def test_what_was_not_measured_is_owed_and_its_command_is_told() -> None:
    empty = page({})
    for design in DESIGNS:
        assert f"Owed: `python benchmarks/{design.command}`" in empty
        assert (PAGE.parent / design.command.split()[0]).is_file()
    assert "No GPU has been at hand" in empty
    assert "yes" not in empty.split("\n## ", 1)[1]


def test_the_newest_counts_and_a_missed_goal_is_told(tmp_path: Path) -> None:
    for day, ratio in (("2026-11-20", 0.5), ("2026-11-21", 1.5)):
        arms = {
            name: {"row_ms": {"median": 4.0, "min": 3.0, "max": 5.0}, "relative_error": 0.01}
            for name in ("ours", "openvino-bf16")
        }
        arms["openvino-bf16"]["ours_over_it"] = {"median": ratio, "min": ratio, "max": ratio}
        points = [{"rows": 2, "arms": arms, "left_out": {"torch.compile": "why"}}]
        document = {"benchmark": "unet", "date": day, "points": points, "command": "c"}
        (tmp_path / f"{9 - int(day[-1])}.json").write_text(json.dumps(document), encoding="utf-8")
    found = page(newest(tmp_path))
    assert "| ours over OpenVINO bf16, 2 rows | at most 1 | 1.5 (1.5 to 1.5) | no |" in found
    assert "| torch.compile | left out |" in found


def test_results_of_a_gpu_are_shown_as_goals_and_rows(tmp_path: Path) -> None:
    points = {"eager": {"result": {"images_per_s": 1.25}}, "latency": {"result": {"p99_s": 7.5}}}
    rows = {
        "sdxl-images": {"state": "done", "wall_s": 70.5, "points": points},
        "sd15": {"state": "abandoned", "points": {}},
    }
    document = {"benchmark": "gpu_suite", "date": "2026-12-01", "rows": rows, "command": "c"}
    (tmp_path / "gpu-suite-h100.json").write_text(json.dumps(document), encoding="utf-8")
    found = page(newest(tmp_path))
    assert "| SDXL bf16, images/s | at least 1.6 | 1.25 | no |" in found
    assert "| SDXL at 0.9 load, p99 s | at most 6 | 7.5 | no |" in found
    assert "| SD 1.5 bf16, images/s | at least 12 | owed |  |" in found
    assert "| sdxl-images | done | 70.5 |" in found
    assert "| sd15 | abandoned | 0 |" in found
    assert "No GPU has been at hand" not in found


def test_a_path_finds_elements_by_what_they_hold() -> None:
    document = {"points": [{"load": 0.3, "of": {"a": 1}}, {"load": 0.95, "of": {"a": 2}}]}
    assert follow(document, "points/load=0.95/of/a") == 2
    assert follow(document, "points/load=0.5/of/a") is None
    assert follow(document, "nowhere/of") is None
