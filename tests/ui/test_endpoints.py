"""The page's named endpoints with Gradio's client: scripts can do what visitors can."""

from __future__ import annotations

import csv
import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from diffserve.media.images import decode_image, read_infotext
from tests.service.server import SOON_S, RunningServer, files_of, wait_for
from ui.create.handlers import CreateHandlers
from ui.create.view import UPDATE_EVERY_S

pytestmark = pytest.mark.slow

ENDPOINTS = {"/generate", "/suggest", "/read_parameters", "/read_control", "/experiment_estimate", "/experiment"}
FOX = "a fox next to a cactus on the beach"
PATIENCE_S = 280.0
REFUSED = re.compile(r'^diffserve_engine_requests_total\{kind="image",outcome="rejected"\} [1-9]', re.MULTILINE)


class Painted(NamedTuple):
    """The result of ``/generate``: downloaded files, HTML, and the parameters of the image."""

    picture: Any
    batch: Any
    caption: str
    painted_from: str
    gallery: Any
    parameters: str
    download: Any
    queue: str
    prompt: Any
    difference: str


class Experiment(NamedTuple):
    """The result of ``/experiment``: HTML, three downloaded files, and the ID of the experiment."""

    status: str
    grid: str
    over_steps: str
    over_seconds: str
    csv: Any
    png: Any
    report: Any
    current: str


def file_in(value: Any) -> Path:
    """Return the file of a component's value, plain or within an update."""
    return Path(value["value"] if isinstance(value, dict) else value)


def client_of(server: RunningServer, folder: Path) -> Client:
    return Client(
        server.url, verbose=False, analytics_enabled=False, download_files=str(folder),
        httpx_kwargs={"timeout": PATIENCE_S, "trust_env": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared_page(shared_page_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Return Gradio's client of the page, for all tests that do not close it."""
    client = client_of(shared_page_server, tmp_path_factory.mktemp("files"))
    yield client
    client.close()


@pytest.fixture
def page(shared_page: Client, page_server: RunningServer) -> Client:
    """Yield the client, and wait until the server is idle after each test."""
    return shared_page


def test_only_these_endpoints_are_named(page: Client) -> None:
    api: Any = page.view_api(print_info=False, return_format="dict")
    assert set(api["named_endpoints"]) == ENDPOINTS
    assert api["unnamed_endpoints"] == {}


def test_endpoint_types_and_names_match_their_values(page: Client, page_server: RunningServer) -> None:
    endpoints: Any = page.view_api(print_info=False, return_format="dict")["named_endpoints"]
    for name, endpoint in endpoints.items():
        labels = [value["label"] for value in (*endpoint["parameters"], *endpoint["returns"])]
        assert not [label for label in labels if label.startswith(("value_", "parameter_"))], name
    parameters = {each["parameter_name"]: each for each in endpoints["/generate"]["parameters"]}
    types = {name: each["python_type"]["type"] for name, each in parameters.items()}
    assert "Literal['']" not in [types[name] for name in ("sampler", "model")]
    assert "'ddim'" in types["sampler"]
    assert types["model"] == "Literal['', 'embedded']"
    assert {types[name] for name in ("steps", "seed", "variation_seed", "clip_skip", "best_of")} == {"int | None"}
    assert {types[name] for name in ("guidance", "strength", "eta", "switch_at")} == {"float | None"}
    assert types["count"] == "int"
    assert {parameters[name]["parameter_default"] for name in ("steps", "seed", "guidance")} == {None}
    [samplers] = [each for each in endpoints["/experiment"]["parameters"] if each["parameter_name"] == "samplers"]
    assert "'euler'" in samplers["python_type"]["type"]
    [sampler] = [value for value in endpoints["/read_parameters"]["returns"] if value["label"] == "Sampler"]
    assert "'ddim'" in sampler["python_type"]["type"]


def test_element_ids_of_the_form_are_the_names_of_its_fields(page: Client) -> None:
    names = {part["id"]: part["props"].get("elem_id") for part in page.config["components"]}
    [generate] = [event for event in page.config["dependencies"] if event["api_name"] == "generate"]
    fields = (*inspect.signature(CreateHandlers.generate).parameters,)[1:-2]
    assert [names[part] for part in generate["inputs"][:-1]] == [name.replace("_", "-") for name in fields]


def test_generate_shows_previews_and_ends_with_the_servers_file(page: Client, page_server: RunningServer) -> None:
    started_s = time.monotonic()
    moments = [Painted(*moment) for moment in page.submit(FOX, steps="30", seed="5", api_name="/generate")]
    assert len(moments) <= (time.monotonic() - started_s) / UPDATE_EVERY_S + 2  # the first and the last are extra
    *_, last = moments
    pictures = {file_in(moment.picture).name for moment in moments if isinstance(moment.picture, str)}
    assert len([name for name in pictures if name.startswith("preview-")]) >= 1
    counted = [re.search(r"step (\d+) of 30", str(moment.caption)) for moment in moments]
    assert len({match[1] for match in counted if match}) >= 2
    file = file_in(last.picture).read_bytes()
    assert [file] == files_of(page_server.paint(FOX, num_steps=30, seed=5, size="128x128"))
    assert last.parameters == read_infotext(file)
    assert file_in(last.download).read_bytes() == file
    [entry] = last.gallery["value"] if isinstance(last.gallery, dict) else last.gallery
    assert Path(entry["image"]).read_bytes() == file


@pytest.mark.parametrize(
    "fields",
    [{"sampler": "ddim", "guidance": "2.5"}, {"sampler": "euler_a", "eta": "0", "guidance": "2.123456789"}],
    ids=["ddim", "euler_a"],
)
def test_a_file_is_read_into_settings_that_reproduce_it(page: Client, fields: dict[str, str]) -> None:
    first = Painted(*page.predict(
        "a crown", negative_prompt="night", steps="6", size="192x128", seed="8", **fields, api_name="/generate"
    ))  # fmt: skip
    read = page.predict(handle_file(str(file_in(first.picture))), api_name="/read_parameters")
    api: Any = page.view_api(print_info=False, return_format="dict")
    names = [parameter["parameter_name"] for parameter in api["named_endpoints"]["/generate"]["parameters"]]
    settings = dict(zip(names[:-1], read, strict=False))  # the last one holds the marks of the browser
    assert (settings["prompt"], settings["negative_prompt"], settings["seed"]) == ("a crown", "night", "8")
    expected = [float(fields[name]) if name in fields else None for name in ("guidance", "eta")]
    assert [settings["guidance"], settings["eta"]] == expected
    again = Painted(*page.predict(**settings, api_name="/generate"))
    once, twice = (decode_image(file_in(answer.picture).read_bytes()).array for answer in (first, again))
    assert np.array_equal(once, twice)
    assert again.parameters == first.parameters


def test_suggest_streams_words_and_shows_the_changes(page: Client) -> None:
    moments = list(page.submit("pls draw me 2 doggos chillin on teh beach", api_name="/suggest"))
    assert moments[-1][0] == "two dogs on the beach"
    written = [re.sub(r"<del>.*?</del>|</?ins>", "", difference) for _, difference in moments]
    assert all("two dogs on the beach".startswith(text.strip()) for text in written)
    assert len(set(written)) >= 3
    assert re.search(r"<del>.*doggos", moments[-1][1])
    assert re.search(r"<ins>.*dogs", moments[-1][1])


def test_auto_shows_the_revised_prompt_and_the_caption_shows_the_settings(page: Client) -> None:
    fields = {
        "rewrite_mode": "Auto",
        "steps": "4",
        "loras": "sepia:0.5",
        "guidance_interval": "0.1-0.9",
        "clip_skip": "1",
    }
    painted = Painted(*page.predict("two doggos on teh beach", **fields, api_name="/generate"))
    assert ", sepia 0.5, guidance interval 0.1-0.9, clip skip 1, seed " in painted.caption
    assert "two dogs on the beach" in painted.painted_from
    assert painted.parameters.startswith("two dogs on the beach <lora:sepia:0.5>\n")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": "  "}, "describe a picture"),
        ({"prompt": FOX, "steps": "1001"}, "from 1 to 1000"),
        ({"prompt": FOX, "seed": "seven"}, "seven"),
        ({"prompt": FOX, "sampler": "dimm"}, "ddim"),
        ({"prompt": FOX, "size": "big"}, "big"),
    ],
)
def test_an_invalid_value_is_a_message_with_the_fix(page: Client, fields: dict[str, str], sentence: str) -> None:
    painted = Painted(*page.predict(**fields, api_name="/generate"))
    assert 'role="alert"' in painted.caption
    assert sentence in painted.caption
    assert not isinstance(painted.picture, str)


def test_a_number_out_of_bounds_is_refused_with_its_label(page: Client) -> None:
    for fields, message in (
        ({"steps": "0"}, "Steps is 0; give a number at least 1"),
        ({"guidance": 31}, "Guidance is 31; give a number from 0 to 30"),
    ):
        with pytest.raises(AppError, match=message):
            page.predict("a fox", **fields, api_name="/generate")


def test_an_experiment_is_estimated_run_and_stored_in_files(page: Client) -> None:
    fields = {
        "samplers": ["ddim", "euler"], "steps": "1, 3", "prompts": "a penguin", "num_seeds": 1, "first_seed": 7,
        "reference_steps": 5,
    }  # fmt: skip
    estimate = page.predict(**fields, api_name="/experiment_estimate")
    assert re.search(r"about \d+ (s|min)", estimate)
    done = Experiment(*page.submit(**fields, api_name="/experiment").result(PATIENCE_S))
    table = list(csv.DictReader(file_in(done.csv).read_text(encoding="utf-8").splitlines()))
    assert {(row["sampler"], row["steps"]) for row in table} == {
        ("ddim", "1"), ("ddim", "3"), ("euler", "1"), ("euler", "3"), ("ddim", "5")
    }  # fmt: skip
    assert done.grid.count("<img") == 6, "the converged image at the end of each row"
    assert "<svg" in done.over_steps
    assert "<svg" in done.over_seconds
    assert decode_image(file_in(done.png).read_bytes()).width_px > 300


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"samplers": []}, "at least one"), ({"steps": "5, many"}, "many"), ({"steps": "2000"}, "1000"),
     ({"prompts": "\n"}, "prompt"), ({"num_seeds": 0}, "Seeds is 0"), ({"first_seed": -1}, "First seed is -1")],
)  # fmt: skip
def test_an_experiment_that_cannot_run_reports_the_reason(page: Client, fields: dict[str, Any], sentence: str) -> None:
    values = {"samplers": ["ddim"], "steps": "2", "prompts": "a penguin", **fields}
    for answer in (
        page.predict(**values, api_name="/experiment_estimate"),
        Experiment(*page.predict(**values, api_name="/experiment")).status,
    ):
        assert 'role="alert"' in answer
        assert sentence in answer


def test_numbers_may_be_sent_as_numbers(page: Client, page_server: RunningServer) -> None:
    fields: dict[str, Any] = {"steps": 3, "seed": 7, "guidance": 2.5, "sampler": "ddim", "eta": 0.5}
    painted = Painted(*page.predict("a crown", **fields, api_name="/generate"))
    [file] = files_of(
        page_server.paint("a crown", num_steps=3, seed=7, guidance_scale=2.5, sampler="ddim", eta=0.5, size="128x128")
    )
    assert file_in(painted.picture).read_bytes() == file


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_script_that_disconnects_frees_the_slot(page_server: RunningServer, tmp_path: Path, way: str) -> None:
    page = client_of(page_server, tmp_path)
    job = page.submit(FOX, steps="1000", api_name="/generate")
    page_server.wait_for_requests(1)
    if way == "cancel":
        job.cancel()
    else:
        page.close()
    page_server.wait_until_idle(SOON_S)
    page.close()


def test_one_visitor_with_many_images_does_not_block_others(
    page: Client, page_server: RunningServer, tmp_path: Path
) -> None:
    other = client_of(page_server, tmp_path)
    page.predict("a crown", steps="25", api_name="/generate")  # the server learns how fast it is
    jobs = [page.submit("a crown", count=10, steps="1000", api_name="/generate") for _ in range(12)]
    wait_for(lambda: REFUSED.search(page_server.client.get("/metrics").text), SOON_S, "the end of one's share")
    last = Painted(*other.predict("a penguin", steps="4", seed="5", api_name="/generate"))
    assert "seed 5" in last.caption
    assert not all(job.done() for job in jobs), "it waited for all of them"
    for job in jobs:
        job.cancel()
    other.close()
    page_server.wait_until_idle(PATIENCE_S)
