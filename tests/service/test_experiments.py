"""Experiments over HTTP on real engines: streamed, restarted with equal numbers, private, not in the history."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.client import CellFinished, Client, ExperimentAdvanced, ExperimentEnded, StoredExperiment
from diffserve.store import Database, Keys
from tests.readme import ROOT
from tests.service.server import RunningServer, error_of, running_server, wait_for

pytestmark = pytest.mark.slow
PATH = "/v1/experiments"
OVER_S = 240.0
SMALL: dict[str, Any] = {
    "samplers": ["ddim", "euler"], "steps": "2-4 (+2)", "guidance": 3, "prompts": ["a red fox", "a castle"],
    "num_seeds": 2, "reference_steps": 6,
}  # fmt: skip
LONG: dict[str, Any] = SMALL | {"steps": "2,3,4,6,900", "num_seeds": 8}


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def until_over(client: Client, name: str) -> StoredExperiment:
    def look() -> StoredExperiment | None:
        experiment = client.experiment(name)
        return experiment if experiment.is_over else None

    return wait_for(look, OVER_S, "the experiment")


def numbers_of(experiment: StoredExperiment) -> list[Any]:
    """Return the results of all cells without measured times."""
    return [(cell.id, cell.num_images, cell.measures, cell.parts, cell.evaluations) for cell in experiment.cells]


def test_an_experiment_streams_its_cells_and_ends_with_a_report(client: Client, server: RunningServer) -> None:
    history = client.history(limit=100)
    planned = client.plan_experiment(**SMALL)
    assert (planned.num_cells, planned.num_images) == (4, 20)
    assert planned.power
    experiment = client.begin_experiment(**SMALL)
    assert (experiment.status, experiment.num_images, experiment.plan["steps"]) == ("validating", 20, [2, 4])
    assert experiment.estimated_seconds is not None
    assert experiment.estimated_seconds > 0
    with client.experiment_events(experiment.id) as events:
        received = list(events)
    cells = [event.cell for event in received if isinstance(event, CellFinished)]
    assert {cell.id for cell in cells} == {
        "ddim-2-g3", "ddim-4-g3", "euler-2-g3", "euler-4-g3", "converged-ddim-6-g3"
    }  # fmt: skip
    assert all(cell.num_images == 4 for cell in cells)
    assert any(event.comparisons for event in received if isinstance(event, CellFinished))
    progress = [event.progress for event in received if isinstance(event, ExperimentAdvanced) and event.progress]
    assert progress[-1].images_done <= 20
    ended = received[-1]
    assert isinstance(ended, ExperimentEnded)
    over = ended.experiment
    assert (over.status, over.error, len(over.cells)) == ("completed", None, 5)
    assert {verdict["verdict"] for verdict in over.comparisons} == {"not distinguishable"}, "of two seeds"
    streamed = {cell.id: cell.measures["psnr_db"] for cell in cells if "psnr_db" in cell.measures}
    final = {cell.id: cell.measures["psnr_db"] for cell in over.cells if "psnr_db" in cell.measures}
    assert streamed == final
    assert client.experiment(experiment.id) == over
    with client.experiment_events(experiment.id) as events:
        again = list(events)
    assert [event.cell for event in again if isinstance(event, CellFinished)] == list(over.cells), "after a reload"
    assert client.history(limit=100) == history, "its images are nobody's history"
    check_files(client, server, over)


def check_files(client: Client, server: RunningServer, over: StoredExperiment) -> None:
    """Check that the files can be downloaded, and nothing else, until the experiment is deleted."""
    assert {"report.html", "report.json", "cells.csv", "overview.png", "strip-1.png"} <= set(over.files)
    table = list(csv.DictReader(io.StringIO(client.experiment_file(over.id, "cells.csv").decode())))
    assert [row["steps"] for row in table] == ["2", "2", "4", "4", "6"]
    assert client.experiment_file(over.id, over.cells[0].image.rpartition("/")[2]).startswith(b"\x89PNG")
    page = server.client.get(over.report or "")
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert b"data:image" in page.content
    for name in ("parts", "setup.json", "parts%2fsetup.json", "..%2f..%2fdiffserve.sqlite", "%2e%2e", "%00", "x.png"):
        answer = server.client.get(f"{PATH}/{over.id}/files/{name}")
        assert answer.status_code in (400, 404), name
    listed = client.experiments(limit=1).data[0]
    assert (listed.id, listed.status, listed.cells, listed.plan) == (over.id, "completed", (), {})
    assert error_of(server.client.post(f"{PATH}/{over.id}/cancel"))["code"] == "experiment_over"
    assert client.delete_experiment(over.id)
    assert not client.delete_experiment(over.id)
    for path in ("", "/events", "/files/report.html"):
        assert error_of(server.client.get(f"{PATH}/{over.id}{path}"))["code"] == "experiment_not_found"


def test_a_cancelled_experiment_keeps_its_finished_cells(client: Client, server: RunningServer) -> None:
    experiment = client.begin_experiment(**LONG)
    waiting = client.begin_experiment(**SMALL)
    wait_for(lambda: client.experiment(experiment.id).cells, OVER_S, "a cell")
    assert client.experiment(waiting.id).status == "validating", "one of each key runs at a time"
    assert server.paint(num_steps=2).status_code == 200
    assert client.experiment(experiment.id).status == "in_progress", "somebody came between"
    assert error_of(server.client.delete(f"{PATH}/{experiment.id}"))["code"] == "experiment_running"
    assert client.cancel_experiment(waiting.id).status == "cancelling"
    assert client.cancel_experiment(experiment.id).status == "cancelling"
    assert client.cancel_experiment(experiment.id).status in ("cancelling", "cancelled")
    over = until_over(client, experiment.id)
    assert over.status == "cancelled"
    assert 0 < len(over.cells) < 11
    assert over.report is None
    assert until_over(client, waiting.id).status == "cancelled"
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"samplers": "ddim,eular"}, "samplers", "Did you mean 'euler'"),
        ({"samplers": []}, "samplers", "samplers is empty"),
        ({"samplers": 3}, "samplers", "samplers is 3"),
        ({"steps": "5-1"}, "steps", "steps has '5-1', which is an empty range"),
        ({"steps": "1-100000000"}, "steps", "at most 100 are allowed"),
        ({"steps": [1001]}, "steps", "1000 steps is the maximum"),
        ({"steps": [None]}, "steps[0]", "steps[0] is null"),
        ({"guidance": "1e999"}, "guidance", "guidance is inf"),
        ({"guidance": True}, "guidance", "guidance is true"),
        ({"axes": {"beauty": "1"}}, "axes", "'beauty' is not an axis"),
        ({"axes": {"seed": "1"}}, "axes", "all cells share their seeds"),
        ({"axes": {"steps": "5"}}, "steps", "the axis steps is given twice"),
        ({"axes": {"eta": ["0", "x"]}}, "eta", "eta has 'x', which is not a number"),
        ({"axes": {"lora:none": "1"}}, "loras", "none"),
        ({"axes": {"prompt": "a {red|blue} fox"}}, "prompts", "prompts and the axis prompt both have prompts"),
        ({"axes": {"prompt": "a {red|blue"}}, "axes.prompt", "the template"),
        ({"axes": {"prompt": "a __sky__"}}, "axes.prompt", "the template names __sky__"),
        ({"axes": {"switch_at": "0.8"}}, "switch_at", "has no refiner"),
        ({"prompts": 0}, "prompts", "prompts is 0"),
        ({"prompts": 2001}, "prompts", "prompts is 2001; at most 2000 are allowed"),
        ({"prompts": []}, "prompts", "prompts is empty"),
        ({"prompts": [""]}, "prompts", "the prompt is empty"),
        ({"prompts": ["x" * 32_001]}, "prompts", "32001 characters"),
        ({"num_seeds": 0}, "num_seeds", "num_seeds is 0"),
        ({"num_seeds": 10**7}, "num_seeds", "num_seeds is 10000000"),
        ({"num_seeds": 5000}, "prompts", "at most 10,000 are allowed"),
        ({"first_seed": -1}, "first_seed", "first_seed is -1"),
        ({"first_seed": 2**63 - 1}, "first_seed", "first_seed is"),
        ({"reference_steps": 0}, "reference_steps", "reference_steps is 0"),
        ({"until_decided": True, "max_images": 3}, "max_images", "max_images is 3; 2 prompts with 2 seeds"),
        ({"detect": "beauty=1"}, "detect", "detect has 'beauty'"),
        ({"model": "nobody"}, "model", '"nobody"'),
        ({"plan_only": "yes"}, "plan_only", "true or false"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_generated(
    server: RunningServer, fields: dict[str, Any], param: str, message: str
) -> None:
    before = server.num_ended("finished"), len(server.client.get(PATH).json()["data"])
    answer = server.client.post(PATH, json=SMALL | fields)
    error = error_of(answer)
    assert answer.status_code in (400, 404), error
    assert message in error["message"]
    assert error["param"] == param
    assert (server.num_ended("finished"), len(server.client.get(PATH).json()["data"])) == before


def test_the_example_of_the_documentation_runs(server: RunningServer, client: Client) -> None:
    text = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    examples = [block.partition("```")[0] for block in text.split("```sh\n")[1:] if block.startswith("curl")]
    (example,) = [block for block in examples if "/v1/experiments" in block]
    words = shlex.split(example)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/experiments"]
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    answer = server.client.post(PATH, json=json.loads(words[words.index("-d") + 1]))
    assert (answer.status_code, answer.json()["num_images"]) == (200, 6 * (2 * 3 + 1))
    client.cancel_experiment(answer.json()["id"])
    until_over(client, answer.json()["id"])


def test_an_experiment_survives_restarts_with_equal_numbers(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Stop and kill the server midway; another key sees nothing of the experiment."""
    keys = Keys(Database(tmp_path / "data"))
    key, other = (keys.add(name, ["generate"])[0] for name in ("owner", "stranger"))
    config = '[engine]\nmax_rows = 8\n[model]\ndtype = "float32"\n'
    body: dict[str, Any] = SMALL | {"steps": "3,6,12", "num_seeds": 5, "reference_steps": 20}
    name = ""
    for life in range(3):
        with running_server(tiny_model("sd15"), tmp_path, config=config) as server:
            server.wait_until_ready()
            with Client(server.url, api_key=key) as client:
                if not name:
                    name = client.begin_experiment(**body).id
                if life == 2:
                    over = until_over(client, name)
                    again = until_over(client, client.begin_experiment(**body).id)
                    check_privacy(server, other, name)
                else:
                    wait_for(partial(_has_cells, client, name, 2 * life + 1), OVER_S, "cells")
            if life == 0:
                assert server.stop() == 0, "it does not wait for the experiment"
            server.process.kill()
            server.process.wait()
    assert (over.status, again.status) == ("completed", "completed")
    assert len(over.cells) == 7
    assert numbers_of(over) == numbers_of(again), "as without an interruption"


def _has_cells(client: Client, name: str, count: int) -> bool:
    return len(client.experiment(name).cells) >= count


def check_privacy(server: RunningServer, stranger: str, name: str) -> None:
    headers = {"Authorization": f"Bearer {stranger}"}
    for method, path in (
        ("GET", ""), ("GET", "/events"), ("GET", "/files/report.html"), ("POST", "/cancel"), ("DELETE", ""),
    ):  # fmt: skip
        answer = httpx.request(method, f"{server.url}{PATH}/{name}{path}", headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "experiment_not_found")
    assert httpx.get(f"{server.url}{PATH}", headers=headers).json()["data"] == []
