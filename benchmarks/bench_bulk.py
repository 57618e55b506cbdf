"""Bulk benchmark: a batch over Ray whose worker is killed twice and whose command is killed once.

    python benchmarks/bench_bulk.py --lines 2000 --out benchmarks/results/bulk.json
    python benchmarks/bench_bulk.py --lines 100000 --workers 8 --shard-lines 200 --model DIR --webdataset

``diffserve batch --cluster`` generates the images of a file of prompts. After a quarter and after half of the shards a
worker is killed, after three quarters the command itself (SIGKILL, with all child processes), and the same command is
started again. Then every line must be reported once and every image exist once. Results are images per second in total
and the number of images generated twice. Progress goes to stderr, one JSON document to stdout.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffserve.cli.batch.lines import NAME, read_outcomes
from tests.tiny_models import save_model

ENV: Final = {"RAY_worker_niceness": "0"}  # which lets everything else go first
ENDS_S: Final = 60.0

Batch = subprocess.Popen[str]


class Bulk:
    """A batch run that is killed and restarted; ``look`` sees the command while its first worker generates."""

    def __init__(
        self,
        prompts: Path,
        folder: Path,
        *options: str,
        patience_s: float = 600.0,
        look: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        """``patience_s``: for a shard, and for a worker to begin."""
        self.folder = folder
        self._command = [sys.executable, "-m", "diffserve", "batch", str(prompts), "-o", str(folder), "--cluster"]
        self._command += options
        self._patience_s = patience_s
        self._look = look

    @property
    def shards(self) -> dict[Path, int]:
        """Return the finished shards with the time at which each was written."""
        return {path: path.stat().st_mtime_ns for path in (self.folder / "shards").glob("*.jsonl")}

    def run(self, kills: tuple[int, int], restart: int) -> dict[str, Any]:
        """Kill a worker after each of ``kills`` shards and the command after ``restart`` shards; then run to the end.

        Raises:
            TimeoutError: the batch makes no progress.
            RuntimeError: the batch fails or ends early.
        """
        begun_s = time.monotonic()
        with self._start() as batch:
            for number, count in enumerate(kills):
                self._until(batch, count)
                if number == 0:
                    self._look(batch)
                worker = self._worker_of(batch)
                worker.kill()
                worker.wait(ENDS_S)
                print(f"a worker is killed after {len(self.shards)} shards", file=sys.stderr)
            self._until(batch, max(restart, len(self.shards) + 1))
            children = psutil.Process(batch.pid).children(recursive=True)
            batch.send_signal(signal.SIGKILL)
            batch.wait(ENDS_S)
        for child in psutil.wait_procs(children, 20)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, ENDS_S)
        before = self.shards
        print(f"the command is killed after {len(before)} shards, and begun again", file=sys.stderr)
        with self._start() as batch:
            stdout, stderr = batch.communicate()
        if batch.returncode:
            raise RuntimeError(f"the batch ended with {batch.returncode}: {stderr[-2000:]}")
        return {
            "seconds": round(time.monotonic() - begun_s, 1),
            "num_shards": len(self.shards),
            "num_shards_before_restart": len(before),
            "num_shards_painted_again": sum(self.shards[path] != written_ns for path, written_ns in before.items()),
            "said": stdout.strip().splitlines()[-1],
        }

    def _start(self) -> Batch:
        return subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | ENV
        )

    def _until(self, batch: Batch, count: int) -> None:
        until_s = time.monotonic() + self._patience_s
        while len(self.shards) < count:
            if batch.poll() is not None:
                raise RuntimeError(f"the batch ended early: {batch.communicate()[1][-2000:]}")
            if time.monotonic() > until_s:
                raise TimeoutError(f"waited {self._patience_s:g} s for shard {count}")
            time.sleep(0.02)

    def _worker_of(self, batch: Batch) -> psutil.Process:
        """Wait for a worker process of ``batch``. Raises TimeoutError if none starts."""
        until_s = time.monotonic() + self._patience_s
        while time.monotonic() < until_s:
            for child in psutil.Process(batch.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if child.name().startswith("ray::MapWorker"):
                        return child
            time.sleep(0.02)
        raise TimeoutError("no worker paints")


def counted(folder: Path) -> dict[str, int]:
    """Count lines, repeated lines, reported images, files, and files that are unreported or missing."""
    outcomes = list(read_outcomes(folder / NAME))
    lines = Counter(outcome.line for outcome in outcomes)
    reported = Counter(name for outcome in outcomes for name in outcome.files)
    there = Counter(path.name for path in folder.glob("*.png"))
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            there.update(name for name in tar.getnames() if name.endswith(".png"))
    return {
        "num_lines": len(lines),
        "num_lines_twice": sum(count > 1 for count in lines.values()),
        "num_pictures": sum(reported.values()),
        "num_files": sum(there.values()),
        "num_files_amiss": sum(((reported - there) + (there - reported)).values()),
        "num_parts_left": sum(1 for _ in folder.rglob("*part")),
    }


def main(
    lines: Annotated[int, typer.Option(min=12, help="Number of prompts; one image each.")] = 2000,
    steps: Annotated[int, typer.Option(help="Denoising steps per image.")] = 4,
    workers: Annotated[int, typer.Option(help="Number of engines.")] = 1,
    shard_lines: Annotated[int, typer.Option(help="Lines per shard.")] = 50,
    webdataset: Annotated[bool, typer.Option("--webdataset", help="Write a tar file per shard.")] = False,
    model: Annotated[Path | None, typer.Option(help="Model directory; default: a tiny random model.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for a copy of the JSON results.")] = None,
) -> None:
    """Measure and print one JSON document; exit code 1 if an image is missing or duplicated."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "fox {each}", "steps": {steps}}}\n' for each in range(lines)))
        options = ["--workers", str(workers), "--shard-lines", str(shard_lines)]
        options += ["--model", str(model or save_model("sd15", folder / "model"))]
        options += ["--webdataset"] if webdataset else []
        num_shards = -(-lines // shard_lines)
        bulk = Bulk(prompts, folder / "out", *options)
        timing = bulk.run((max(1, num_shards // 4), num_shards // 2), 3 * num_shards // 4)
        counts = counted(bulk.folder)
    is_right = counts["num_files"] == counts["num_pictures"] == counts["num_lines"] == lines
    is_right = is_right and not counts["num_lines_twice"] and not counts["num_files_amiss"]
    report = {
        "benchmark": "bulk",
        "command": " ".join(["python", "benchmarks/bench_bulk.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "lines": lines,
        "steps": steps,
        "workers": workers,
        "killed_workers": 2,
        "restarts": 1,
        "each_once": is_right,
        "pictures_per_s": round(lines / timing["seconds"], 3),
        **timing,
        **counts,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
    if not is_right:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
