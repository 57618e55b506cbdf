"""Images and rewrites on one device: the slowdown of each by the other.

    python benchmarks/bench_colocation.py --model embedded

Three arms: rewrites alone, images alone, both. A fixed number of requests is in flight; each finished request is
replaced by a new one. A round is rewrites, then images that continue while rewrites start and stop, then rewrites
again; ratios compare arms of the same round. The time of an output token is reported per token (from one to the next)
and per rewrite (its mean, ``timings.tpot_s``).

``--clock cpu`` counts the CPU seconds of this process in one thread, for machines with other work.

Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import RESULTS, head, summary, write
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import ModelNotFound
from diffserve.api.ipc import AnyEvent
from diffserve.api.rewrite_types import RewriteEvent, RewriteFinished, RewriteRequest
from diffserve.api.text_types import TextDelta, TextEvent
from diffserve.api.types import DiffusionParams, Failed, GenerationRequest
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.loading import load_parts
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.engine.time_share import TimeShare
from diffserve.rewriting import TextWindow, find_rewriter
from diffserve.runtime import choose_device
from diffserve.settings.layers import load_settings
from diffserve.training.rewriter_model import build_rewriter, build_tokenizer, export_rewriter
from diffserve.training.wishes import LooseWish, wishes

Clock = Callable[[], float]

MOST_RATIO, MOST_LOSS = 3.0, 0.30
"""The goals: a token takes at most three times as long, the UNet loses at most 30 % of its rows a second."""

ROUND = ("rewrites", *("pictures", "both", "both", "pictures") * 3, "rewrites")
NUM_WISHES = 2000
UNSURE_OF_NOTHING = 1e9
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Window:
    """Measurements of one time window: token times by token and by rewrite, and UNet rows."""

    seconds: float = 0.0
    token_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_rewrites: int = 0
    num_rows: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    image_s: float = 0.0
    text_s: float = 0.0

    def add(self, before: EngineStats, after: EngineStats) -> None:
        """Add the engine's work between two snapshots."""
        self.num_rows += after.images.num_rows - before.images.num_rows
        self.num_steps += after.images.num_steps - before.images.num_steps
        self.busy_s += after.images.busy_s - before.images.busy_s
        self.image_s += after.share.image_s - before.share.image_s
        self.text_s += after.share.text_s - before.share.text_s

    @property
    def rows_per_s(self) -> float:
        """UNet throughput."""
        return self.num_rows / self.seconds

    def results(self) -> dict[str, float]:
        """Return the results in milliseconds and per second."""
        values = {"rows_per_s": self.rows_per_s}
        if self.num_rows:
            values |= {"rows_per_step": self.num_rows / self.num_steps, "ms_per_row": 1e3 * self.busy_s / self.num_rows}
        if self.image_s:
            values["text_share"] = self.text_s / (self.image_s + self.text_s)
        if self.token_s:
            tokens = sorted(self.token_s)
            values |= {
                "tokens_per_s": len(tokens) / self.seconds,
                "rewrites_per_s": self.num_rewrites / self.seconds,
                "token_p50_ms": 1e3 * statistics.median(tokens),
                "token_mean_ms": 1e3 * statistics.mean(tokens),
                "token_p99_ms": 1e3 * tokens[len(tokens) * 99 // 100],
                "tpot_p50_ms": 1e3 * statistics.median(self.tpot_s or [0.0]),
                "ttft_p50_ms": 1e3 * statistics.median(self.ttft_s or [0.0]),
                "total_p50_ms": 1e3 * statistics.median(self.total_s or [0.0]),
            }
        return {name: round(value, 4) for name, value in values.items()}


class WatchedRewriter(Rewriter):
    """Rewriter that records token times in ``watched``; the time of several tokens is split equally."""

    def __init__(self, texts: TextEngine, *, style: str, window: TextWindow, clock: Clock) -> None:
        super().__init__(texts, style=style, window=window, max_entropy=UNSURE_OF_NOTHING)
        self.clock = clock
        self.watched: Window | None = None
        self._said_s: dict[str, float] = {}

    def feed(self, events: Iterable[TextEvent]) -> tuple[list[RewriteEvent], list[TextEvent]]:
        """Handle text events as ``Rewriter`` does, and record token times."""
        text_events = list(events)
        now_s = self.clock()
        for event in text_events:
            if isinstance(event, TextDelta) and event.token_ids:
                self._note(f"{event.request_id} {event.text_index}", now_s, len(event.token_ids))
        return super().feed(text_events)

    def _note(self, name: str, now_s: float, num_tokens: int) -> None:
        before_s = self._said_s.get(name)
        self._said_s[name] = now_s
        if before_s is not None and self.watched is not None:
            self.watched.token_s += [(now_s - before_s) / num_tokens] * num_tokens


class Load:
    """Load generator that keeps a fixed number of images and rewrites in flight.

    The first images of a run take fewer steps, each a different number, so that later ones do not end all at once: a
    window may then be shorter than an image takes.
    """

    def __init__(self, studio: CombinedEngine, pairs: Iterator[LooseWish], num_steps: int, clock: Clock) -> None:
        self.studio = studio
        self.clock = clock
        self.pairs = pairs
        self.num_steps = num_steps
        self.live: dict[str, str] = {}
        self._seeds = itertools.count()

    def run(self, window: Window, *, pictures: int, rewrites: int, seconds: float, settle_s: float) -> None:
        """Record ``seconds`` into ``window`` after ``settle_s`` of warm-up; images in flight continue afterwards."""
        rewriter = self.studio.rewriter
        assert isinstance(rewriter, WatchedRewriter)
        self._leave("picture" if not pictures else "rewrite" if not rewrites else "")
        for index in range(pictures if "picture" not in self.live.values() else 0):
            self._paint(-(-self.num_steps * (index + 1) // pictures))
        self._tick_until(self.clock() + settle_s, pictures, rewrites, Window())
        rewriter.watched = window
        before, started_s = self.studio.stats(), self.clock()
        self._tick_until(started_s + seconds, pictures, rewrites, window)
        window.seconds += self.clock() - started_s
        window.add(before, self.studio.stats())
        rewriter.watched = None

    def stop(self) -> None:
        """Cancel all requests and wait until they have ended."""
        self._leave("picture")
        self._leave("rewrite")
        for event in self.studio.events():
            self._take(event, Window())

    def _leave(self, kind: str) -> None:
        for request_id in [name for name, live_kind in self.live.items() if live_kind == kind]:
            self.studio.cancel(request_id)

    def _tick_until(self, end_s: float, pictures: int, rewrites: int, window: Window) -> None:
        while self.clock() < end_s:
            kinds = list(self.live.values())
            for _ in range(pictures - kinds.count("picture")):
                self._paint(self.num_steps)
            for _ in range(rewrites - kinds.count("rewrite")):
                self._rewrite()
            for event in self.studio.tick():
                self._take(event, window)

    def _paint(self, num_steps: int) -> None:
        params = DiffusionParams(num_steps=num_steps)
        request = GenerationRequest(prompt=next(self.pairs).caption, seed=next(self._seeds), diffusion=params)
        self.live[self.studio.submit(request)] = "picture"

    def _rewrite(self) -> None:
        self.live[self.studio.submit(RewriteRequest(wish=next(self.pairs).text, deltas=True))] = "rewrite"

    def _take(self, event: AnyEvent, window: Window) -> None:
        if isinstance(event, RewriteFinished):
            window.num_rewrites += 1
            window.ttft_s.append(event.timings.ttft_s)
            window.total_s.append(event.timings.total_s)
            if event.usage.output_tokens > 1:
                window.tpot_s.append(event.timings.tpot_s)
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.request_id} failed: {event.message}")
        if isinstance(event, CombinedEngine.terminal):
            self.live.pop(event.request_id, None)


def find_models(model: str, rewriter: str, dtype: str, scratch: Path) -> tuple[str, str, str]:
    """Return the image model, the language model, and a description of the latter."""
    if model in NAMES:
        say(f"making {model}")
        model = str(save_random_model(model, scratch, dtype=choose_device("auto", dtype).compute_dtype))
    try:
        find_rewriter(rewriter)
        return model, rewriter, "the rewriter that ships inside" if rewriter == "embedded" else Path(rewriter).name
    except ModelNotFound:
        if rewriter != "embedded":
            raise
    say("no rewriter is shipped: making a random one of its shape")
    torch.manual_seed(0)
    tokenizer = build_tokenizer(num_wishes=2500)
    directory = export_rewriter(scratch / "rewriter", build_rewriter(tokenizer), tokenizer)
    return model, str(directory), "random weights of the shipped rewriter's shape"


def open_engine(model: str, rewriter: str, device: str, dtype: str, clock: Clock) -> CombinedEngine:
    """Load and warm up an engine for images and text whose rewriter is recorded."""
    env = {"DIFFSERVE_MODEL_DEVICE": device, "DIFFSERVE_MODEL_DTYPE": dtype, "DIFFSERVE_TEXT_MODEL": rewriter}
    settings = load_settings(model=model, env=env)
    engine, texts, plain = load_parts(settings.model, settings.engine, settings.text, clock=clock)
    if texts is None or plain is None:
        raise typer.BadParameter(f"{rewriter} cannot rewrite: give a model with a chat template.")
    watched = WatchedRewriter(texts, style=plain.style.name, window=plain.window, clock=clock)
    studio = CombinedEngine(engine, texts, watched, time_share=settings.text.time_share, clock=clock)
    studio.warm_up()
    return studio


def compare(rounds: Sequence[dict[str, Window]]) -> dict[str, Any]:
    """Return medians over rounds of the slowdown of each side, and whether it is within the goals."""
    token, tpot, rows_kept = [], [], []
    for windows in rounds:
        alone, both = windows["rewrites"], windows["both"]
        token.append(statistics.median(both.token_s) / statistics.median(alone.token_s))
        tpot.append(statistics.median(both.tpot_s) / statistics.median(alone.tpot_s))
        rows_kept.append(both.rows_per_s / windows["pictures"].rows_per_s)
    return {
        "token_p50_ratio": summary(token),
        "tpot_p50_ratio": summary(tpot),
        "unet_rows_kept": summary(rows_kept),
        "goals": {
            f"token p50 at most {MOST_RATIO:g} times": statistics.median(token) <= MOST_RATIO,
            f"tpot p50 at most {MOST_RATIO:g} times": statistics.median(tpot) <= MOST_RATIO,
            f"UNet loses at most {MOST_LOSS:.0%}": 1.0 - statistics.median(rows_kept) <= MOST_LOSS,
        },
    }


def measure(
    load: Load, share: float, *, rounds: int, pictures: int, rewrites: int, seconds: float, settle_s: float
) -> dict[str, Any]:
    """Measure all arms in turn, ``rounds`` times, at one time share."""
    load.studio.share = TimeShare(share)
    in_flight = {"rewrites": (0, rewrites), "pictures": (pictures, 0), "both": (pictures, rewrites)}
    windows_by_round: list[dict[str, Window]] = []
    for index in range(rounds):
        windows_by_round.append({arm: Window() for arm in in_flight})
        for arm in ROUND:
            counts = dict(zip(("pictures", "rewrites"), in_flight[arm], strict=True))
            load.run(windows_by_round[-1][arm], **counts, seconds=seconds, settle_s=settle_s)
        load.stop()
        for arm, window in windows_by_round[-1].items():
            say(f"share {share} round {index} {arm:9} {window.results()}")
    return {
        "time_share": share,
        "pictures": pictures,
        "rewrites": rewrites,
        "rounds": [{arm: window.results() for arm, window in windows.items()} for windows in windows_by_round],
        **compare(windows_by_round),
    }


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "embedded",
    rewriter: Annotated[
        str, typer.Option(help="Language model: embedded, or a directory with a chat template.")
    ] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16 or float16.")] = "auto",
    shares: Annotated[str, typer.Option(help="Comma-separated time shares of texts; empty: the default.")] = "",
    pictures: Annotated[int, typer.Option(help="Image requests in flight.")] = 8,
    rewrites: Annotated[str, typer.Option(help="Comma-separated numbers of rewrites in flight.")] = "8,1",
    num_steps: Annotated[int, typer.Option(help="Denoising steps per image; 0: the default of the model.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs all three arms.")] = 5,
    seconds: Annotated[float, typer.Option(help=f"Seconds per part; a round has {len(ROUND)} parts.")] = 2.0,
    settle: Annotated[float, typer.Option(help="Warm-up seconds at the start of each part.")] = 0.5,
    clock: Annotated[str, typer.Option(help="wall, or cpu on a machine with other load.")] = "wall",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    if clock not in CLOCKS:
        raise typer.BadParameter(f"{clock}: no such clock; there are {', '.join(CLOCKS)}.")
    if clock == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        image, language, kind = find_models(model, rewriter, dtype, Path(scratch))
        studio = open_engine(image, language, device, dtype, CLOCKS[clock])
        info = studio.info
        document = head("colocation", Path(model).name, info)
        arguments = [Path(word).name for word in sys.argv[1:]]
        document["command"] = " ".join(["python", "benchmarks/bench_colocation.py", *arguments])
        assert studio.text_info is not None
        document["language_model"] = {
            "what": kind,
            "num_parameters": studio.text_info.num_parameters,
            "dtype": studio.text_info.dtype,
            "digest": studio.text_info.digest,
        }
        day, place = document["date"][:10], info.device.replace(":", "")
        path = out or RESULTS / f"colocation-{Path(model).name}-{place}-{info.dtype}-{day}.json"
        pairs = itertools.cycle(itertools.islice(wishes(1, held_out=False), NUM_WISHES))
        load = Load(studio, pairs, num_steps or info.default_num_steps, CLOCKS[clock])
        document["settings"] = {
            "rounds": rounds,
            "seconds": seconds,
            "buckets": [list(b) for b in studio.engine.buckets.values()],
        }
        document["points"] = []
        time_shares = [float(share) for share in shares.split(",") if share] or [studio.share.share]
        for share, count in itertools.product(time_shares, rewrites.split(",")):
            point = measure(
                load, share, rounds=rounds, pictures=pictures, rewrites=int(count), seconds=seconds, settle_s=settle
            )
            document["points"].append(point)
            say(
                json.dumps(
                    {name: point[name] for name in ("token_p50_ratio", "tpot_p50_ratio", "unet_rows_kept", "goals")}
                )
            )
            write(document, path)
        print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)
