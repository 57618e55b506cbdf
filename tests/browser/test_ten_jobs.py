"""The ten commonest jobs in the browser, and the table of their clicks in docs/page.md."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.test_editing import mark
from tests.browser.visit import Visit, Visitor
from tests.service.server import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DOCS = Path(__file__).resolve().parents[2] / "docs" / "page.md"
COUNT = "window.clicks = 0; addEventListener('pointerdown', ({ isTrusted }) => { window.clicks += isTrusted; }, true);"
"""Counts presses of the mouse button: clicks, and strokes of the brush. Typing is not counted."""


def documented() -> dict[str, int]:
    """Return the clicks of diffserve in the table of docs/page.md by job."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    return {job: int(clicks) for job, clicks in rows}


def painted(here: Visit, count: int) -> None:
    """Wait until the gallery has ``count`` images and nothing runs."""
    expect(here.gallery()).to_have_count(count)
    here.until_rested()


def generate(here: Visit) -> None:
    here.part("generate").click()
    painted(here, 2)


def vary(here: Visit) -> None:
    here.part("vary").click()
    painted(here, 5)


def upscale(here: Visit) -> None:
    here.part("upscale").click()
    here.expect_text("true-size", "512x512 pixels")


def suggest(here: Visit) -> None:
    here.field("prompt").fill("2 doggos on teh beach")
    here.part("rewrite-mode").get_by_role("radio", name="Suggest").click()
    here.part("generate").click()
    expect(here.field("prompt")).to_have_value("two dogs on the beach")
    painted(here, 2)


def edit(here: Visit) -> None:
    here.part("edit-this").click()
    mark(here, (0.25, 0.75), (0.75, 0.75))
    here.field("prompt").fill("a cactus on the beach")
    here.part("generate").click()
    painted(here, 2)
    here.expect_caption("strength 1")


def refer(here: Visit) -> None:
    here.part("use-reference").click()
    expect(here.part("references").get_by_role("listitem")).to_have_count(1)
    here.part("generate").click()
    painted(here, 2)
    here.expect_caption("reference base 1")


def use_lora(here: Visit) -> None:
    here.part("groups").get_by_role("radio", name="Adapters").click()
    here.part("lora-buttons").get_by_role("button", name="sepia").click()
    expect(here.field("loras")).to_have_value("sepia:1")
    here.part("generate").click()
    painted(here, 2)
    here.expect_caption("sepia 1")


def find(here: Visit) -> None:
    here.page.get_by_role("tab", name="History").click()
    here.field("history-words").fill("fox beach")
    here.field("history-words").press("Enter")
    here.part("history-grid").locator("label").first.click()
    here.expect_text("history-said", "a fox on the beach")


def compare(here: Visit) -> None:
    here.page.get_by_role("tab", name="Experiment").click()
    here.field("exp-steps").fill("2")
    here.field("exp-prompts").fill("a penguin")
    here.field("exp-seeds").fill("1")
    here.field("exp-reference-steps").fill("4")
    here.part("exp-samplers").locator(".token", has_text="DDPM").locator(".token-remove").click()
    here.expect_text("exp-estimate", "2 combinations")
    here.part("exp-run").click()
    expect(here.part("exp-grid").locator("img")).to_have_count(4)  # each row has the converged image
    expect(here.part("exp-stop")).to_be_hidden()


def download_five(here: Visit) -> None:
    here.page.get_by_role("tab", name="History").click()
    images = here.part("history-grid").locator("label")
    images.first.click()
    images.nth(4).click(modifiers=["Shift"])
    here.expect_text("history-said", "5 images are selected")
    with here.page.expect_download() as waiting:
        here.part("history-download").click()
    with zipfile.ZipFile(waiting.value.path()) as packed:
        assert len(packed.namelist()) == 5


JOBS: dict[str, Callable[[Visit], None]] = {
    "generate an image": generate,
    "four variations of an image": vary,
    "upscale an image": upscale,
    "rewrite the prompt and generate": suggest,
    "repaint a part of an image": edit,
    "use an image as a reference": refer,
    "use a LoRA": use_lora,
    "find an old image": find,
    "compare two samplers": compare,
    "download five images": download_five,
}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_takes_the_documented_clicks(visit: Visitor, equipped_server: RunningServer, job: str) -> None:
    """Do the job from a page that shows an image and whose prompt is filled in, and count the clicks."""
    here = visit(equipped_server.url)
    here.set_advanced(steps=2)
    here.write("prompt", "a fox on the beach")
    here.paint()
    painted(here, 1)
    for _ in range(4 if job == "download five images" else 0):
        here.paint()
    here.part("groups").get_by_role("radio", name="Basics").check()
    here.page.evaluate(COUNT)
    JOBS[job](here)
    assert here.page.evaluate("window.clicks") == documented()[job]


def test_the_table_has_all_jobs() -> None:
    assert list(documented()) == list(JOBS)
