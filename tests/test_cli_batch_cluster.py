"""``diffserve batch --cluster``: shards are written whole, done twice without harm, and every line is there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from benchmarks.bench_bulk import Batch, Bulk, counted
from diffserve.api.errors import InvalidRequest
from diffserve.cli import main
from diffserve.cli.batch.cluster_run import MOST_TRIES, ShardJob, ShardReport, ShardWorker, _from_anywhere
from diffserve.cli.batch.lines import NAME, Line, Outcome, read_outcomes
from diffserve.cli.batch.painters import PaintedFile, ReportProgress
from diffserve.cli.batch.shards import Layout, ShardFolder
from diffserve.settings.config import Settings
from tests.cluster.ports import check_refusals, listening


class FakePainter:
    """A worker that returns the seed as the image; the prompt "stop" kills it."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def paint(self, line: Line, report_progress: ReportProgress) -> list[PaintedFile]:
        fields = line.fields
        seed = fields["seed"]
        if fields["prompt"] == "none":
            raise InvalidRequest("nothing to see.")
        if fields["prompt"] == "stop":
            raise KeyboardInterrupt
        self.seeds.append(seed)
        recipe = {"id": os.urandom(4).hex(), "sampler": "ddim"}
        first = fields.get("variation_seed")
        places = range(fields.get("n", 1))
        if first is None:
            pairs: list[tuple[int, int | None]] = [(seed + place, None) for place in places]
        else:
            pairs = [(seed, first + place) for place in places]
        files = [f"picture {first} {other}".encode() for first, other in pairs]
        return [PaintedFile(place, files[place], *pairs[place], recipe, ()) for place in places]

    def stop(self) -> None:
        """Nothing goes on."""


class ShardedBatch:
    """A folder, a file of prompts, and workers for them."""

    def __init__(self, folder: Path, layout: Layout, *lines: object) -> None:
        folder.mkdir(exist_ok=True)
        self.prompts = folder / "p.jsonl"
        self.write(*lines)
        self.place = ShardFolder.open(folder / "out", lines=layout.lines, webdataset=layout.webdataset)
        self.place.token_path.write_text("token")
        self.job = ShardJob(
            prompts=str(self.prompts), folder=str(self.place.folder), token="token", layout=layout, concurrency=3
        )
        self.painter = FakePainter()

    def write(self, *lines: object) -> None:
        self.prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    def paint(self, **changed: Any) -> list[ShardReport]:
        """All shards, by a worker that is new."""
        worker = ShardWorker(msgspec.msgpack.encode(msgspec.structs.replace(self.job, **changed)), self._open)
        shards = list(self.place.shards(self.prompts))
        return [
            msgspec.msgpack.decode(worker.paint(msgspec.msgpack.encode(shard)), type=ShardReport) for shard in shards
        ]

    def _open(self, settings: Settings) -> FakePainter:
        return self.painter


PAIR = {"prompt": "c", "n": 2, "id": "pair", "variation_strength": 0.2}
PROMPTS = ("a", {"prompt": "b", "seed": 7}, {"prompt": "none"}, PAIR, [1], "a")


@pytest.mark.parametrize("webdataset", [False, True])
def test_a_shard_that_is_painted_twice_has_the_same_names_and_bytes(tmp_path: Path, *, webdataset: bool) -> None:
    layout = Layout(lines=4, webdataset=webdataset)
    once, again = (ShardedBatch(tmp_path / name, layout, *PROMPTS) for name in ("once", "again"))
    assert [(report.num_painted, report.num_failed, report.error) for report in once.paint()] == [
        (3, 1, ""),
        (1, 1, ""),
    ]
    again.paint()
    names = {path.name for path in once.place.folder.iterdir() if path.is_file()}
    if webdataset:
        assert names == {"shard-000000.tar", "shard-000001.tar"}
        with tarfile.open(once.place.tar_path(0)) as tar:
            assert tar.getnames() == [
                "1.png", "1.json", "2.png", "2.json", "pair-1.png", "pair-1.json", "pair-2.png", "pair-2.json",
            ]  # fmt: skip
            member = tar.extractfile("2.json")
            assert member is not None
            assert json.load(member) == {
                "prompt": "b", "line": 2, "id": "2", "recipe": {"sampler": "ddim"}, "seed": 7,
            }  # fmt: skip
            pair = [json.loads((tar.extractfile(f"pair-{number}.json") or member).read()) for number in (1, 2)]
            assert pair[0]["seed"] == pair[1]["seed"]
            assert pair[0]["variation_seed"] + 1 == pair[1]["variation_seed"]
    else:
        assert names == {"1.png", "2.png", "6.png", "pair-1.png", "pair-2.png"}
    assert all((once.place.folder / name).read_bytes() == (again.place.folder / name).read_bytes() for name in names)
    assert [outcome.line for outcome in once.place.in_order(2)] == [1, 2, 3, 4, 5, 6]
    first, *_, last = once.place.in_order(2)
    assert first.seeds != last.seeds, "the same prompt on two lines is two pictures"
    assert not list(once.place.folder.rglob("*part"))


@pytest.mark.parametrize("webdataset", [False, True])
def test_a_shard_resumes_by_line_and_changed_prompts_are_generated(tmp_path: Path, *, webdataset: bool) -> None:
    batch = ShardedBatch(tmp_path / "one", Layout(lines=6, webdataset=webdataset), *PROMPTS)
    batch.paint()
    batch.painter.seeds.clear()
    batch.write(*PROMPTS[:2], {"prompt": "now", "seed": 3}, *PROMPTS[3:])
    [shard] = batch.place.shards(batch.prompts)
    assert list(batch.place.outcomes(shard)) == [1, 2, 4, 5, 6]
    [report] = batch.paint()
    assert (report.num_painted, report.num_failed, batch.painter.seeds) == (5, 1, [3])
    assert [bool(outcome.files) for outcome in batch.place.in_order(1)] == [True, True, True, True, False, True]
    [shard] = batch.place.shards(batch.prompts)
    assert len(batch.place.outcomes(shard)) == 6, "nothing is left to do"
    if webdataset:
        with tarfile.open(batch.place.tar_path(0)) as tar:
            assert tar.getnames()[4:8] == ["3.png", "3.json", "pair-1.png", "pair-1.json"]


def test_a_shard_that_ends_early_is_not_reported(tmp_path: Path) -> None:
    batch = ShardedBatch(tmp_path / "one", Layout(lines=4, webdataset=True), "a", "b", "stop", "c")
    with pytest.raises(KeyboardInterrupt):
        batch.paint()
    assert not list(batch.place.in_order(1))
    assert not batch.place.tar_path(0).exists()
    assert not list(batch.place.parts())


def test_an_unusable_folder_is_reported(tmp_path: Path) -> None:
    batch = ShardedBatch(tmp_path / "one", Layout(lines=4), "a")
    [report] = batch.paint(token="another")
    assert "give one that all machines of the cluster share" in report.error
    for number in range(MOST_TRIES):
        batch.place.part_path(0).with_name(f".000000-there-{number}.part").write_bytes(b"")
    [report] = batch.paint()
    assert "4 workers were lost while they generated lines 1 to 1" in report.error
    with pytest.raises(InvalidRequest, match="was started with --shard-lines 4;"):
        ShardFolder.open(batch.place.folder, lines=5, webdataset=False)
    with pytest.raises(InvalidRequest, match="was started with"):
        ShardFolder.open(batch.place.folder, lines=None, webdataset=True)
    batch.place.clear()
    batch.place.folder.joinpath("1.png").mkdir()
    [report] = batch.paint()
    assert "cannot write" in report.error


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the standard error of ``diffserve batch`` with these arguments."""
    with pytest.raises(SystemExit) as caught:
        main(["batch", *map(str, arguments)])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a fox\n")
    assert "--webdataset needs --cluster" in refused(capsys, file, "-o", tmp_path / "o", "--webdataset")
    both = ("--cluster", "--server", "http://127.0.0.1:9")
    assert "--cluster and --server exclude each other" in refused(capsys, file, "-o", tmp_path / "o", *both)
    assert not (tmp_path / "o").exists()


NO_RAY = """
import sys
sys.modules["ray"] = None
from diffserve.cli import main
main(["batch", *sys.argv[1:]])
"""


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a fox\n")
    command = [sys.executable, "-c", NO_RAY, str(file), "-o", str(tmp_path / "o"), "--cluster"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "pip install 'diffserve[cluster]'" in done.stderr
    command[3:] = [str(tmp_path / "none.txt"), "-o", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "cannot read" in done.stderr, "a batch without a cluster asks for none"


def test_what_lies_here_is_called_as_everybody_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vae").mkdir()
    assert _from_anywhere("vae") == str(tmp_path / "vae")
    assert [_from_anywhere(name) for name in (None, "embedded", "gone")] == [None, "embedded", "gone"]


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "p.txt"
    file.write_text("a fox\n")
    for address, message in (
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://there:1", "give HOST:PORT"),
    ):
        command = [sys.executable, "-m", "diffserve", "batch", str(file), "-o", str(tmp_path / "o"), "--cluster"]
        done = subprocess.run([*command, "--address", address], capture_output=True, text=True, timeout=120)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def check_ports(process: Batch) -> None:
    """Check that all Ray processes of a batch listen on localhost only and require the token."""
    batch = psutil.Process(process.pid)
    sockets = listening([batch, *batch.children(recursive=True)])
    assert [connection for connection in sockets if not connection.host.is_loopback] == []
    [gcs] = [connection for connection in sockets if connection.name == "gcs_server"]
    kinds = check_refusals(sockets, gcs.process.environ()["RAY_AUTH_TOKEN"])
    assert kinds["grpc"] >= 5, "a GCS, a raylet and its store, the batch, a worker"


@pytest.mark.chaos
def test_every_picture_is_there_once_whatever_is_killed(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A worker twice, and the command itself once, before the lines that take longer."""
    pytest.importorskip("ray")
    file, looked = tmp_path / "p.jsonl", list[int]()
    steps = [4] * 12 + [40] * 12
    file.write_text("".join(f'{{"prompt": "fox {seed}", "steps": {each}}}\n' for seed, each in enumerate(steps)))

    def look(batch: Batch) -> None:
        looked.append(batch.pid)
        check_ports(batch)

    options = ["--workers", "1", "--shard-lines", "3", "--model", str(tiny_model("sd15"))]
    bulk = Bulk(file, tmp_path / "out", *options, patience_s=200, look=look)
    report = bulk.run((1, 3), 4)
    assert looked
    assert 4 <= report["num_shards_before_restart"] < report["num_shards"] == 8
    assert report["num_shards_painted_again"] == 0, "what was over is not painted again"
    assert "24 of 24 lines are done" in report["said"]
    assert counted(bulk.folder) == {
        "num_lines": 24, "num_lines_twice": 0, "num_pictures": 24, "num_files": 24, "num_files_amiss": 0,
        "num_parts_left": 0,
    }  # fmt: skip
    assert [outcome.line for outcome in read_outcomes(bulk.folder / NAME)] == list(range(1, 25))


def test_what_is_missing_or_there_twice_is_counted(tmp_path: Path) -> None:
    outcomes = [Outcome(line=line, id="", digest="", prompt="", files=(f"{line}.png",)) for line in (1, 2, 2)]
    (tmp_path / NAME).write_bytes(b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in outcomes))
    for name in ("1.png", "3.png"):
        (tmp_path / name).touch()
    counts = counted(tmp_path)
    assert (counts["num_lines"], counts["num_lines_twice"]) == (2, 1)
    assert (counts["num_pictures"], counts["num_files"], counts["num_files_amiss"]) == (3, 2, 3)
