"""The folder of a sweep: nothing is lost that was measured, nothing half-written is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from diffserve.experiments.plan import Cell, Place, PlannedImage
from diffserve.experiments.records import FinishedImage, ImageRecord
from diffserve.experiments.store import PARTS, Store
from tests.experiments.synthetic import plan_of, records_of

PLAN = plan_of(num_prompts=3)
CELL, OTHER = PLAN.cells[:2]
REFERENCE = PLAN.references[0]
RECORDS = list(records_of(PLAN, lambda _: 0.5, lambda _: 0.2)[CELL].values())
RESULTS = ("cells.csv", "report.html")


def store_at(folder: Path, **setup: Any) -> Store:
    return Store(folder, {"weights": "abc", **setup}, results=RESULTS)


def journal(folder: Path) -> Path:
    (file,) = (folder / PARTS).glob("*.jsonl")
    return file


def keep(folder: Path, records: list[ImageRecord], cell: Cell = CELL, **setup: Any) -> None:
    with store_at(folder, **setup) as store:
        for record in records:
            store.add(cell, record)


def finished(cell: Cell, place: Place, size: int = 8) -> FinishedImage:
    """Return a finished image of noise."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (size, size, 3), np.uint8)
    return FinishedImage(PlannedImage(cell, *place), pixels, 0, "trailing", 8, rng.random((4, 2, 2), np.float32))


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    keep(tmp_path, RECORDS)
    with store_at(tmp_path) as store:
        assert store.records(CELL) == {record.place: record for record in RECORDS}
        assert store.records(OTHER) == {}


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    keep(tmp_path, RECORDS[:2])
    file = journal(tmp_path)
    file.write_bytes(file.read_bytes() + b'{"prompt_index":2,"seed')
    with store_at(tmp_path) as store:
        assert len(store.records(CELL)) == 2
        store.add(CELL, RECORDS[2])
    with store_at(tmp_path) as store:
        assert list(store.records(CELL).values()) == RECORDS[:3]


def test_a_line_that_makes_no_sense_is_painted_again_and_the_others_are_kept(tmp_path: Path) -> None:
    keep(tmp_path, RECORDS[:3])
    lines = journal(tmp_path).read_bytes().splitlines(keepends=True)
    journal(tmp_path).write_bytes(lines[0] + b'{"prompt_index": "two"}\n' + lines[2])
    with store_at(tmp_path) as store:
        assert list(store.records(CELL).values()) == [RECORDS[0], RECORDS[2]]


def test_the_first_of_two_records_of_one_picture_counts(tmp_path: Path) -> None:
    keep(tmp_path, RECORDS[:1])
    again = journal(tmp_path).read_bytes().replace(b'"trailing"', b'"leading"')
    journal(tmp_path).write_bytes(journal(tmp_path).read_bytes() + again)
    with store_at(tmp_path) as store:
        assert store.records(CELL)[RECORDS[0].place].spacing == "trailing"


def test_converged_pictures_are_kept_bit_by_bit_and_no_others(tmp_path: Path) -> None:
    converged = finished(REFERENCE, (0, 1))
    with store_at(tmp_path) as store:
        assert not store.has(REFERENCE, (0, 1))
        store.save(converged)
        store.save(finished(CELL, (0, 1)))
        assert store.has(REFERENCE, (0, 1))
        images = store.load(REFERENCE, (0, 1))
        assert images is not None
        assert images.latents is not None
        assert np.array_equal(images.pixels, converged.pixels)
        assert np.array_equal(images.latents, converged.latents)  # type: ignore[arg-type]
        assert store.load(REFERENCE, (1, 0)) is store.load(CELL, (0, 1)) is None
        assert not list(store.parts.rglob("*.part"))


def test_a_converged_picture_that_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        store.save(finished(REFERENCE, (0, 0), size=1))
        (file,) = store.parts.rglob("*.npz")
        file.write_bytes(file.read_bytes()[:40])
        assert store.load(REFERENCE, (0, 0)) is None


def test_documents_are_replaced_whole(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        store.write_json("times.json", {"a": [1]})
        store.write_json("times.json", {"a": [2]})
        assert store.read_json("times.json") == {"a": [2]}
        (store.parts / "times.json").write_text("{", encoding="utf-8")
        assert store.read_json("times.json") is None
        assert store.read_json("others.json") is None
