"""Exported folders as the evaluation scripts of benchmarks read them, and prompts from their files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.engine import Engine
from diffserve.experiments.engine_generator import request_for
from diffserve.experiments.export import DPG_BENCH, GENEVAL, LAYOUTS, T2I_COMPBENCH, Export
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.prompts import BenchmarkPrompt, read_benchmark_prompts, read_prompts
from diffserve.experiments.run import SweepProgress, run_plan
from diffserve.settings.config import EngineConfig
from tests.tiny_models import ONE_LEVEL

LINES = (
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {"tag": "colors", "include": [{"class": "fox", "count": 1, "color": "red"}], "prompt": "a photo of a red fox"},
)
PLAN = SweepPlan(
    samplers=("ddim",),
    steps=(2,),
    guidance=(3.0,),
    prompts=tuple(str(line["prompt"]) for line in LINES),
    num_seeds=4,
    reference_steps=3,
)
CELL = PLAN.cells[0]


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Engine:
    config = EngineConfig(max_rows=8)
    return Engine.from_pretrained(tiny_model(ONE_LEVEL), dtype="float32", device="cpu", config=config)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the prompts in the published layouts of GenEval and DPG-Bench; return the folder of both."""
    folder = tmp_path_factory.mktemp("benchmark")
    text = "".join(f"{json.dumps(line)}\n" for line in LINES)
    (folder / "evaluation_metadata.jsonl").write_text(text, encoding="utf-8")
    (folder / "prompts").mkdir()
    for name, line in zip(("partiprompts12", "COCOval2014000000000328"), LINES[::-1], strict=True):
        (folder / "prompts" / f"{name}.txt").write_text(f"{line['prompt']}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tiny: Engine, benchmark: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one sweep and export it in every layout, continuing it each time; return its folder."""
    folder = tmp_path_factory.mktemp("sweep")
    for layout, path in ((GENEVAL, "evaluation_metadata.jsonl"), (T2I_COMPBENCH, "evaluation_metadata.jsonl"),
                         (DPG_BENCH, "prompts")):  # fmt: skip
        progress: list[SweepProgress] = []
        export = Export(layout, read_benchmark_prompts(benchmark / path))
        assert [prompt.text for prompt in export.prompts] == list(PLAN.prompts)
        run_plan(tiny, PLAN, folder, progress.append, export=export)
        assert (progress[-1].num_rows > 0) == (layout == GENEVAL), "images are generated once"
    return folder


def painted(engine: Engine, place: Place, cell: Cell = CELL) -> NDArray[np.uint8]:
    return engine.generate(request_for(PLAN, cell, place))[0].pixels


def opened(file: Path) -> NDArray[np.uint8]:
    return np.asarray(Image.open(file).convert("RGB"))


def test_geneval_finds_metadata_and_samples(tiny: Engine, folder: Path) -> None:
    """Reads as evaluate_images.py does."""
    root, num_images = folder / GENEVAL / CELL.slug, 0
    for name in sorted(os.listdir(root)):
        assert name.isdigit()
        with (root / name / "metadata.jsonl").open(encoding="utf-8") as file:
            metadata = json.load(file)
        assert metadata == LINES[int(name)]
        for image in os.listdir(root / name / "samples"):
            assert re.match(r"\d+\.png", image)
            place = int(name), int(image.removesuffix(".png"))
            assert np.array_equal(opened(root / name / "samples" / image), painted(tiny, place))
            num_images += 1
    assert num_images == len(PLAN.places)


def test_dpg_bench_crops_four_images_of_a_prompt(tiny: Engine, folder: Path) -> None:
    """Crops as compute_dpg_bench.py does, with the side of an image as the resolution."""
    root = folder / DPG_BENCH / CELL.slug
    assert sorted(os.listdir(root)) == ["COCOval2014000000000328.png", "partiprompts12.png"]
    for prompt, name in enumerate(("COCOval2014000000000328", "partiprompts12")):
        grid = Image.open(root / f"{name}.png")
        side = tiny.info.good_sizes[0][0]
        corners = [(0, 0), (side, 0), (0, side), (side, side)]
        for seed, (x, y) in enumerate(corners):
            part = np.asarray(grid.crop((x, y, x + side, y + side)))
            assert np.array_equal(part, painted(tiny, (prompt, seed)))


def test_t2i_compbench_reads_prompt_and_number_from_the_name(tiny: Engine, folder: Path) -> None:
    """Sorts and splits names as BLIP_vqa.py does."""
    root = folder / T2I_COMPBENCH / CELL.slug / "samples"
    names = sorted(os.listdir(root), key=lambda name: int(name.split("_")[-1].split(".")[0]))
    assert names[0] == "a photo of a bench_000000.png"
    assert [name.split("_")[0] for name in names] == [PLAN.prompts[prompt] for prompt, _ in PLAN.places]
    for name, place in zip(names, PLAN.places, strict=True):
        assert np.array_equal(opened(root / name), painted(tiny, place))


def test_every_cell_has_a_folder(folder: Path) -> None:
    for layout in LAYOUTS:
        assert {path.name for path in (folder / layout).iterdir()} == {cell.slug for cell in PLAN.all_cells}


@pytest.mark.parametrize(
    ("layout", "changes", "prompts", "message"),
    [
        ("coco", {}, LINES, "export-layout is 'coco'; choose one of geneval, dpg-bench, t2i-compbench."),
        (GENEVAL, {}, None, "export-layout is geneval: its script needs the tag and include of each prompt; pass"),
        (DPG_BENCH, {}, LINES, "export-layout is dpg-bench: its script finds questions by the prompt's file; pass"),
        (DPG_BENCH, {"num_seeds": 2}, "names", "export-layout is dpg-bench: its grids have 4 images; pass --seeds 4"),
        (T2I_COMPBENCH, {"prompts": ("a_b",)}, None, "export-layout is t2i-compbench: its files are named by the"),
        (T2I_COMPBENCH, {"prompts": ("x" * 300,)}, None, "export-layout is t2i-compbench: its files are named by the"),
    ],
)
def test_what_does_not_fit_a_benchmark_is_refused(
    layout: str, changes: dict[str, Any], prompts: object, message: str
) -> None:
    plan = msgspec.structs.replace(PLAN, **changes)
    with pytest.raises(InvalidRequest) as caught:
        Export(
            layout,
            [
                BenchmarkPrompt(
                    text,
                    name="name" if prompts == "names" else "",
                    metadata=dict(LINES[index]) if prompts is LINES else None,
                )
                for index, text in enumerate(plan.prompts)
            ],
        ).check(plan)
    assert caught.value.message.startswith(message)


def test_prompts_are_read_from_the_files_of_benchmarks(benchmark: Path, tmp_path: Path) -> None:
    assert read_prompts(benchmark / "evaluation_metadata.jsonl") == PLAN.prompts
    assert [prompt.name for prompt in read_benchmark_prompts(benchmark / "prompts")] == [
        "COCOval2014000000000328", "partiprompts12"
    ]  # fmt: skip
    file = tmp_path / "bad.jsonl"
    for line in ("[]", "{}", '{"prompt": 3}', "not json"):
        file.write_text(f'{{"prompt": "a fox"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(InvalidRequest, match=r'line 2 of .+ is not a JSON object with a text as "prompt"'):
            read_prompts(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"has no prompts; it needs \.txt files with one prompt each"):
        read_prompts(tmp_path / "empty")
