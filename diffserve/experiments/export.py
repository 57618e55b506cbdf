"""Writes the images of a sweep in the folder layouts that the evaluation scripts of benchmarks read.

Each cell has a folder of its own, ``DIR/<layout>/<cell>``, to which the script is pointed:

geneval        00000/metadata.jsonl and 00000/samples/0000.png: evaluation/evaluate_images.py of djghosh13/geneval
dpg-bench      PROMPT-ID.png, four images in a 2x2 grid: dpg_bench/compute_dpg_bench.py of TencentQQGYLab/ELLA
t2i-compbench  samples/PROMPT_000000.png: BLIPvqa_eval/BLIP_vqa.py of Karine-Huang/T2I-CompBench
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.axes import quote
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.prompts import BenchmarkPrompt
from diffserve.experiments.store import Store, guard, write_whole

GENEVAL, DPG_BENCH, T2I_COMPBENCH = "geneval", "dpg-bench", "t2i-compbench"
LAYOUTS: Final = (GENEVAL, DPG_BENCH, T2I_COMPBENCH)
GRID_IMAGES: Final = 4
MAX_NAME_BYTES: Final = 255 - len("._000000.png.part")
"""Largest prompt in a file name; a file has the longer name while it is written."""

Images = Iterator[tuple[Place, NDArray[np.uint8]]]
"""Places and images (H, W, 3), in the order of the places."""


@dataclass(frozen=True)
class Export:
    """A benchmark's layout, and the prompts of a plan as their file has them.

    Raises:
        InvalidRequest: The layout is unknown.
    """

    layout: str
    prompts: Sequence[BenchmarkPrompt]

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            message = f"export-layout is {quote(self.layout)}; choose one of {', '.join(LAYOUTS)}."
            raise InvalidRequest(message, param="export_layout")

    def check(self, plan: SweepPlan) -> None:
        """Check that the images of ``plan`` can be written in this layout.

        Raises:
            InvalidRequest: Prompts or the number of images do not fit the benchmark.
        """
        problem = None
        if self.layout == GENEVAL and not all(
            {"tag", "include"} <= {*(prompt.metadata or {})} for prompt in self.prompts
        ):
            problem = "its script needs the tag and include of each prompt; pass --prompts evaluation_metadata.jsonl"
        if self.layout == DPG_BENCH and not all(prompt.name for prompt in self.prompts):
            problem = "its script finds questions by the prompt's file; pass --prompts FOLDER with its .txt files"
        if self.layout == DPG_BENCH and (plan.looks or plan.num_seeds != GRID_IMAGES):
            problem = f"its grids have {GRID_IMAGES} images; pass --seeds {GRID_IMAGES} without --until-decided"
        if self.layout == T2I_COMPBENCH:
            names = (prompt.text for prompt in self.prompts if not _is_file_name(prompt.text))
            if (name := next(names, None)) is not None:
                problem = f"its files are named by the prompt, and {quote(name)} has a / or _ or is too long"
        if problem is not None:
            raise InvalidRequest(f"export-layout is {self.layout}: {problem}.", param="export_layout")

    def write(self, plan: SweepPlan, store: Store) -> Path:
        """Write the images of every cell, including the converged ones, and return the folder."""
        files_of = {GENEVAL: self._geneval_files, DPG_BENCH: self._grid_files, T2I_COMPBENCH: self._sample_files}
        folder = store.folder / self.layout
        for cell in plan.all_cells:
            places = [place for place in plan.places if place in store.records(cell)]
            for name, data in files_of[self.layout](_stored_images(store, cell, places)):
                file = folder / cell.slug / name
                with guard(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, data)
        return folder

    def _geneval_files(self, images: Images) -> Iterator[tuple[str, bytes]]:
        for (prompt, seed), pixels in images:
            if seed == 0:
                yield f"{prompt:05d}/metadata.jsonl", json.dumps(self.prompts[prompt].metadata).encode()
            yield f"{prompt:05d}/samples/{seed:04d}.png", _png(pixels)

    def _grid_files(self, images: Images) -> Iterator[tuple[str, bytes]]:
        for index, group in groupby(images, lambda image: image[0][0]):
            parts = [pixels for _, pixels in group]
            rows = [np.concatenate(parts[row : row + 2], axis=1) for row in (0, 2)]
            yield f"{self.prompts[index].name}.png", _png(np.concatenate(rows, axis=0))

    def _sample_files(self, images: Images) -> Iterator[tuple[str, bytes]]:
        for index, ((prompt, _), pixels) in enumerate(images):
            yield f"samples/{self.prompts[prompt].text}_{index:06d}.png", _png(pixels)


def _stored_images(store: Store, cell: Cell, places: Iterable[Place]) -> Images:
    """Yield the stored images of a cell, one after the other, because all of them may not fit in memory."""
    for place in places:
        image = store.load(cell, place)
        if image is None:
            raise InvalidRequest(
                f"an image of {cell.label} in {str(store.folder)!r} cannot be read; run the same command again.",
                param="output",
            )
        yield place, image.pixels


def _is_file_name(text: str) -> bool:
    return not {"/", "_", "\0"} & {*text} and len(text.encode()) <= MAX_NAME_BYTES


def _png(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
