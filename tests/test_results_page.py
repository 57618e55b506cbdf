"""The page of results: as committed, and what it says of what was not measured or misses its goal."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.results_page import DESIGNS, PAGE, RESULTS, follow, gpu_runs, newest, page


def test_the_page_is_what_the_committed_figures_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(newest(RESULTS), gpu_runs(RESULTS)), (
        "run: python benchmarks/results_page.py"
    )


def test_missing_measurements_are_listed_with_their_commands() -> None:
    empty = page({}, [])
    for design in DESIGNS:
        assert f"Owed: `python benchmarks/{design.command}`" in empty
        assert (PAGE.parent / design.command.split()[0]).is_file()
    assert "No GPU has been measured" in empty
    assert "yes" not in empty.split("\n## ", 1)[1]


def test_the_newest_result_counts_and_a_missed_goal_is_reported(tmp_path: Path) -> None:
    for day, ratio in (("2026-11-20", 0.5), ("2026-11-21", 1.5)):
        arms = {
            name: {"row_ms": {"median": 4.0, "min": 3.0, "max": 5.0}, "relative_error": 0.01}
            for name in ("ours", "openvino-bf16")
        }
        arms["openvino-bf16"]["ours_over_it"] = {"median": ratio, "min": ratio, "max": ratio}
        points = [{"rows": 2, "arms": arms, "left_out": {"torch.compile": "why"}}]
        document = {"benchmark": "unet", "date": day, "points": points, "command": "c"}
        (tmp_path / f"{9 - int(day[-1])}.json").write_text(json.dumps(document), encoding="utf-8")
    text = page(newest(tmp_path), [])
    assert "| diffserve over OpenVINO bf16, 2 rows | at most 1 | 1.5 (1.5 to 1.5) | no |" in text
    assert "| torch.compile | left out |" in text


def test_each_run_of_the_gpu_suite_is_a_column_of_the_goals_in_order_of_time(tmp_path: Path) -> None:
    def save(name: str, date: str, rows: dict[str, object], note: str = "") -> None:
        document = {"benchmark": "gpu_suite", "date": date, "rows": rows, "command": "c", "note": note}
        (tmp_path / f"gpu-suite-{name}.json").write_text(json.dumps(document), encoding="utf-8")

    eager = {"eager": {"result": {"images_per_s": 1.25}}}
    latency = {"latency": {"result": {"p99_s": 5.5}}, "eager": {"result": {"images_per_s": 1.7}}}
    save("b", "2026-12-01T10:00", {"sdxl-images": {"state": "done", "wall_s": 70.5, "points": eager}}, note="all rows")
    save("a", "2026-12-01T11:00", {"sdxl-images": {"state": "running", "points": latency}})
    (tmp_path / "gpu-suite-b.md").write_text("The next change.\n", encoding="utf-8")
    text = page(newest(tmp_path), gpu_runs(tmp_path))
    assert "| what | goal | run 1 | run 2 | verdict |" in text
    assert "| SDXL bf16, images/s | at least 1.6 | 1.25 | 1.7 | met |" in text
    assert "| SDXL at 0.9 load, p99 s | at most 6 | owed | 5.5 | met |" in text
    assert "| SD 1.5 bf16, images/s | at least 12 | owed | owed | not measured |" in text
    assert "| sdxl-images | done, 70.5 s | cut |" in text
    assert "All rows." in text
    assert text.endswith("The next change.\n")
    assert "No GPU has been measured" not in text


def test_a_path_finds_elements_by_what_they_hold() -> None:
    document = {"points": [{"load": 0.3, "of": {"a": 1}}, {"load": 0.95, "of": {"a": 2}}]}
    assert follow(document, "points/load=0.95/of/a") == 2
    assert follow(document, "points/load=0.5/of/a") is None
    assert follow(document, "nowhere/of") is None
