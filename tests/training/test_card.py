"""The card stage: what is installed into the package, and the content of the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.runtime.loading.checkpoint import check_manifest
from diffserve.training import card, train
from diffserve.world.checker import EDITION

OLD = {
    "stage": "vae", "begun": "2026-01-01T00:00+00:00", "iterations_done": 7, "batch_size": 16, "learning_rate": 0.001,
    "device": "cpu", "seconds": 3600, "flops": 2_000_000_000_000_000,
}  # fmt: skip
NEW = {**OLD, "stage": "denoiser", "begun": "2026-01-02T00:00+00:00", "seconds": 1800}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the package's directories by temporary ones with a model and a bill."""
    room = tmp_path / "package"
    (room / "weights" / "preview").mkdir(parents=True)
    (room / "weights" / "preview" / "config.json").write_text("{}")
    (room / "training.json").write_text(json.dumps([OLD]))
    monkeypatch.setattr(card, "ROOM", room)
    monkeypatch.setattr(card, "SHIPPED", {name: room / name for name in card.SHIPPED})
    return room


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Create the work directory of a trained denoiser."""
    folder = tmp_path / "work"
    (folder / "weights" / "unet").mkdir(parents=True)
    (folder / "weights" / "unet" / "config.json").write_text("{}")
    (folder / "denoiser.json").write_text(json.dumps(NEW))
    return folder


def bills(package: Path) -> Any:
    return json.loads((package / "training.json").read_text(encoding="utf-8"))


def test_a_new_model_replaces_the_old_one_wholly_and_its_bill_joins_the_log_once(package: Path, work: Path) -> None:
    (work / "notes.json").write_text("[]")  # other files of the directory are not bills
    for _ in range(2):
        card.install(work)
        files = [path.relative_to(package).as_posix() for path in sorted(package.rglob("*.*")) if path.is_file()]
        assert files == ["training.json", "weights/manifest-sha256.json", "weights/unet/config.json"]
        check_manifest(package / "weights")
        assert bills(package) == [OLD, NEW]


def test_a_folder_without_a_model_or_with_half_a_bill_changes_nothing(package: Path, work: Path) -> None:
    (work / "denoiser.json").write_text(json.dumps({"stage": "denoiser"}))
    with pytest.raises(ConfigError, match=r"denoiser\.json is no bill of a training stage: it lacks batch_size, begun"):
        card.install(work)
    with pytest.raises(ConfigError, match=r"nothing was trained in .*nowhere"):
        card.install(work / "nowhere")
    assert (package / "weights" / "preview" / "config.json").is_file()
    assert bills(package) == [OLD]


def test_the_bill_table_has_a_row_per_stage() -> None:
    *_, row = card.bill_table([OLD, NEW]).splitlines()
    assert row == "| denoiser | 2026-01-02T00:00+00:00 | 7 | 16 | 0.001 | cpu | 0.50 | 2.00 |"


def test_the_card_is_what_the_kept_results_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "CARD", tmp_path / "card.md")
    written = card.write().read_text(encoding="utf-8")
    assert written == (card.ROOM / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert not re.search(r"\{\{|\}\}", written)


STAGES = ("denoiser", "tune", "preview", "distill", "adapters", "upscaler", "rewriter", "card")


def test_all_runs_every_stage_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, object]] = []

    def stage(name: str) -> Any:
        return lambda work, *device, **options: ran.append((name, work))

    for name in STAGES:
        monkeypatch.setattr(train, name, stage(name))
    precision = torch.get_float32_matmul_precision()
    train.everything(tmp_path, "cpu")
    torch.set_float32_matmul_precision(precision)
    assert ran == [(name, tmp_path) for name in STAGES]


def test_scores_of_another_checker_edition_produce_a_warning() -> None:
    now, before = {"checker": EDITION}, {"checker": EDITION - 1}
    assert card.edition_sentence(now, now) == ""
    assert "tightened since" in card.edition_sentence(now, before)
    assert "tightened since" in card.edition_sentence({})
