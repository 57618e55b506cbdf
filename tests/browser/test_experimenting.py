"""An experiment in the browser: its estimate, a growing grid, curves, files, and an early stop."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from playwright.sync_api import expect

from diffserve.media.images import decode_image
from tests.browser.test_editing import expect_no_barrier
from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import SOON_S, RunningServer, wait_for

RUN_S = 270.0
"""Patience with an experiment that takes some fifteen seconds where nothing else runs."""

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def open_experiment(here: Visit) -> None:
    here.page.get_by_role("tab", name="Experiment").click()
    expect(here.part("exp-run")).to_be_visible()


def fill_in(here: Visit, *, samplers: tuple[str, ...], steps: str, prompts: str = "a penguin", seeds: int = 1) -> None:
    open_experiment(here)
    here.pick("exp-samplers", *samplers)
    here.write("exp-steps", steps)
    here.write("exp-prompts", prompts)
    here.write("exp-seeds", seeds)


def until_run(here: Visit) -> None:
    expect(here.part("exp-stop")).to_be_hidden(timeout=1000 * RUN_S)
    expect(here.part("exp-run")).to_be_enabled()


def test_a_fresh_page_has_its_button_and_a_hint(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    open_experiment(here)
    here.expect_text("exp-estimate", r"12 combinations of .* 6 images each")
    expect(here.part("exp-run")).to_have_text("Run", use_inner_text=True)
    expect(here.part("exp-stop")).to_have_text("Stop")
    here.expect_text("exp-status", "Images appear here")
    here.field("exp-samplers").click()
    expect(here.page.get_by_role("option", name="learned:embedded-5")).to_be_attached()
    screenshot(here, "experiment-fresh")


def test_cells_fill_a_grid_and_become_curves_and_files(visit: Visitor, screenshot: Screenshot, tmp_path: Path) -> None:
    here = visit()
    fill_in(here, samplers=("DDIM", "DPM++ 2M"), steps="1, 3")
    here.write("exp-reference-steps", 5)
    here.expect_text("exp-estimate", r"4 combinations of .* 1 image each, and 1 converged one: about \d+ (s|min)")
    here.press("exp-run")
    here.until("() => document.querySelectorAll('#exp-grid img').length > 0")
    screenshot(here, "experiment-running")
    until_run(here)
    pictures = here.part("exp-grid").locator("td img").all()
    assert len({picture.get_attribute("src") for picture in pictures}) == 5
    assert all(picture.evaluate("image => image.naturalWidth") >= 64 for picture in pictures)
    for curves in ("exp-curves-steps", "exp-curves-seconds"):
        charts = here.part(curves).locator("figure svg")
        assert charts.count() >= 1
        for chart in charts.all():
            hints = "".join(dot.text_content() or "" for dot in chart.locator(".dot title").all())
            assert hints.count(" step") == 4, "a tooltip for each cell, shared where lines coincide"
    dark_color = charts.first.evaluate("""chart => {
        document.body.classList.add("dark");
        const color = getComputedStyle(chart).getPropertyValue("--chart-0").trim();
        document.body.classList.remove("dark");
        return color;
    }""")
    assert dark_color == "#f2bd88"
    screenshot(here, "experiment-done")
    expect_no_barrier(here)
    table = list(csv.DictReader(io.StringIO(here.save("exp-csv", tmp_path).read_text(encoding="utf-8"))))
    assert len(table) == 5
    assert {row["sampler"] for row in table} == {"ddim", "dpmpp_2m"}
    assert {int(row["steps"]) for row in table} == {1, 3, 5}
    sheet = decode_image(here.save("exp-png", tmp_path).read_bytes())
    assert sheet.width_px > 300
    assert "<html" in here.save("exp-report", tmp_path).read_text(encoding="utf-8")
    here.page.reload()
    here.until("() => document.querySelectorAll('#exp-grid img').length === 6")  # found again


def test_a_stopped_experiment_retains_finished_images_and_frees_its_slots(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit()
    fill_in(here, samplers=("DDIM", "DDPM"), steps="2, 1000")
    here.expect_text("exp-estimate", r"4 combinations of .* 1 image each.* about \d+ (s|min)")
    here.part("exp-run").press("Enter")
    here.until("() => document.querySelectorAll('#exp-grid img').length > 0")
    wait_for(lambda: page_server.num_requests() > 0, SOON_S, "the experiment to paint")
    expect(here.part("exp-stop")).to_be_focused()
    here.page.keyboard.press("Enter")
    wait_for(lambda: page_server.num_requests() == 0, SOON_S, "the lanes, long before a thousand steps are done")
    until_run(here)
    expect(here.part("exp-run")).to_be_focused()
    here.expect_text("exp-status", "stopped")
    assert here.part("exp-grid").locator("img").count() > 0
    screenshot(here, "experiment-stopped")


def test_any_field_is_compared_in_columns_and_rows_and_two_images_below_a_slider(
    visit: Visitor, screenshot: Screenshot
) -> None:
    here = visit()
    fill_in(here, samplers=("DDIM",), steps="2")
    here.write("exp-reference-steps", 4)
    here.write("exp-guidance", "1, 3")
    for axis, field in (("exp-x", "Eta"), ("exp-y", "Guidance")):
        here.field(axis).click()
        here.page.get_by_role("option", name=field, exact=True).click()
        expect(here.page.get_by_role("option")).to_have_count(0)
    here.expect_text("exp-estimate", "the axis .*Eta.* has no values")
    expect(here.part("exp-y-values")).to_have_count(0)  # Guidance has a list of its own
    here.write("exp-x-values", "0, 1")
    here.expect_text("exp-estimate", "4 combinations of sampler, steps, guidance and eta, 1 image each")
    here.press("exp-run")
    images = here.part("exp-grid").locator("td img")
    expect(images).to_have_count(6)
    until_run(here)
    assert here.part("exp-grid").locator("thead th").all_inner_texts()[:3] == ["eta", "0", "1"]
    rows = here.part("exp-grid").locator("tbody th")
    assert rows.all_inner_texts() == ["DDIM, guidance 1", "DDIM, guidance 3"]
    expect(here.part("exp-slider")).to_be_hidden()
    here.slow_down(500)  # the second image is checked before the server has the first
    for name in ("guidance 3, eta 0", "guidance 3, eta 1"):
        here.part("exp-grid").get_by_role("checkbox", name=name).check()
    expect(here.part("exp-slider").locator("img")).to_have_count(2)
    shown = [image.get_attribute("src") or "" for image in here.part("exp-slider").locator("img").all()]
    assert len(set(shown)) == 2
    expect_no_barrier(here)
    screenshot(here, "experiment-axes")
