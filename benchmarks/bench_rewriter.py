"""Text engine benchmark for rewriting: against transformers' own continuous batching, and against its own options.

    python benchmarks/bench_rewriter.py
    python benchmarks/bench_rewriter.py --model /models/smollm2-135m-instruct --style tags --device cuda

Three measurements, each with a goal.

    crowd    8 wishes at once, each behind the shared system text: tokens per second, at least twice those of
             ``generate_batch`` (same weights, dtype and threads, its manager kept alive, prefixes shared, greedy)
    first    8 wishes at once, and one alone: seconds to the first token, with the system text in the page pool at
             most a quarter of the time without it (cold: each wish behind a unique salt)
    lookup   one client, sequential wishes as the rewriter sends them: time of the tokens after the first, with
             prompt lookup at most 1 / 1.3 of that without

Every figure is a median over interleaved pairs: the arms alternate in going first, and no wish is repeated. CPU time of
all threads is reported in addition to wall time, for machines with other work. Progress goes to stderr, one JSON
document to stdout and to results/.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.report import RESULTS, head, write
from benchmarks.rewriter_arms import CLIP_TOKENS, WARM_UPS, Desk, Measure, Peer, compared, figures, in_turns
from diffserve.api.text_types import Speculation
from diffserve.engine.text import TextEngine
from diffserve.rewriting import Style, find_rewriter, load_style

CROWD: Final = 8
GOALS: Final = {"crowd": "at least 2", "first": "at most 0.25", "lookup": "at least 1.3"}


def crowd(desk: Desk, peer: Peer, rounds: int) -> dict[str, Any]:
    """Measure tokens per second of ``CROWD`` concurrent wishes: peer, engine, and engine with rewriter options."""

    def prompts() -> list[str]:
        return desk.prompts(CROWD, with_system=True)

    measures_by_arm = in_turns(
        {
            "generate_batch": lambda: peer.together(prompts()),
            "engine": lambda: desk.together([desk.request(prompt, "off") for prompt in prompts()], None),
            "rewriter": lambda: desk.together([desk.request(prompt, "auto") for prompt in prompts()], desk.constraint),
        },
        rounds,
    )
    compared_prompts = prompts()
    answers = desk.texts.generate([desk.request(prompt, "off") for prompt in compared_prompts])
    pairs = zip(answers, peer.generate(compared_prompts), strict=True)
    num_equal = sum(list(answer.results[0].token_ids) == peer_tokens for answer, peer_tokens in pairs)
    document: dict[str, Any] = {
        "users": CROWD,
        "prompt_tokens": answers[0].usage.prompt_tokens,
        "equal_answers": f"{num_equal} of {CROWD}",
    }
    for unit, seconds in clocks():
        rates = {
            name: [measure.tokens / seconds(measure) for measure in measures]
            for name, measures in measures_by_arm.items()
        }
        document[f"tokens_per_{unit}"] = {name: figures(values) for name, values in rates.items()}
        document[f"over_generate_batch_by_{unit}"] = {
            name: compared(rates[name], rates["generate_batch"]) for name in ("engine", "rewriter")
        }
    return document | {"goal": GOALS["crowd"]}


def first_token(desk: Desk, rounds: int) -> dict[str, Any]:
    """Measure the seconds to the first token, with and without the system text in the page pool."""
    document: dict[str, Any] = {}
    for users in (CROWD, 1):
        arms = {name: partial(desk.first_tokens, users, is_warm=name == "warm") for name in ("cold", "warm")}
        measures_by_arm = in_turns(arms, rounds)
        part: dict[str, Any] = {}
        for unit, seconds in clocks():
            times = {name: [seconds(measure) for measure in measures] for name, measures in measures_by_arm.items()}
            part[f"ms_by_{unit}"] = {name: figures(values, 1e3) for name, values in times.items()}
            part[f"warm_over_cold_by_{unit}"] = compared(times["warm"], times["cold"])
        document[f"{users} at once" if users > 1 else "alone"] = part
    return document | {"goal": GOALS["first"]}


def lookup(desk: Desk, rounds: int) -> dict[str, Any]:
    """Measure the time of each token after the first for one client, with and without prompt lookup."""
    document: dict[str, Any] = {}
    for name, with_system in (("as the rewriter asks", False), ("behind the shared system text", True)):
        before = desk.texts.stats()
        pairs = [_pair(desk, index, with_system=with_system) for index in range(-WARM_UPS, rounds)][WARM_UPS:]
        after = desk.texts.stats()
        drafted = after.draft_tokens - before.draft_tokens
        figures_of_case: dict[str, Any] = {
            "drafted_tokens": drafted,
            "acceptance": round((after.accepted_tokens - before.accepted_tokens) / max(drafted, 1), 3),
        }
        for unit, seconds in clocks():
            times = {arm: [seconds(pair[arm]) / pair[arm].tokens for pair in pairs] for arm in ("off", "on")}
            figures_of_case[f"ms_per_token_by_{unit}"] = {arm: figures(values, 1e3) for arm, values in times.items()}
            figures_of_case[f"speedup_by_{unit}"] = compared(times["off"], times["on"])
        document[name] = figures_of_case
    return document | {"goal": GOALS["lookup"]}


def _pair(desk: Desk, index: int, *, with_system: bool) -> dict[str, Measure]:
    """Run ``CROWD`` sequential wishes with and without drafts; the order alternates by round."""
    arms: tuple[tuple[str, Speculation], ...] = (("off", "off"), ("on", "prompt_lookup"))
    prompts = desk.prompts(CROWD, with_system=with_system)
    return {
        arm: _sum([desk.decoding(prompt, speculation) for prompt in prompts])
        for arm, speculation in arms[:: 1 if index % 2 else -1]
    }


def _sum(measures: Sequence[Measure]) -> Measure:
    wall_s, cpu_s = sum(measure.wall_s for measure in measures), sum(measure.cpu_s for measure in measures)
    return Measure(wall_s, cpu_s, sum(measure.tokens for measure in measures))


def clocks() -> tuple[tuple[str, Callable[[Measure], float]], ...]:
    """Return the two kinds of seconds by name."""
    return ("s", lambda measure: measure.wall_s), ("cpu_s", lambda measure: measure.cpu_s)


def shared_system(style: Style) -> str:
    """Return the shared system text: the style's own, else the embedded rewriter's."""
    from diffserve.training.rewriter_model import system_prompt

    return style.prompt.system_for(CLIP_TOKENS) or system_prompt()


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(
    model: Annotated[str, typer.Option(help="Model: embedded, or the directory of an instruct model.")] = "embedded",
    style: Annotated[str, typer.Option(help="Style: a file of configs/rewriter/.")] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of both implementations; 0: number of cores.")] = 0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per question.")] = 30,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    directory = find_rewriter(model)
    texts = TextEngine.from_pretrained(directory, device=device, dtype=dtype)
    loaded = load_style(style)
    desk = Desk(texts, loaded, shared_system(loaded))
    document = head("rewriter", directory.name, texts.info)
    arguments = [Path(word).name for word in sys.argv[1:]]
    document["command"] = " ".join(["python", "benchmarks/bench_rewriter.py", *arguments])
    document["settings"] = {"rounds": rounds, "style": style, "max_tokens": loaded.answer.max_tokens}
    info, day = texts.info, document["date"][:10]
    path = out or RESULTS / f"rewriter-{directory.name}-{info.device.replace(':', '')}-{info.dtype}-{day}.json"
    questions: dict[str, Callable[[], dict[str, Any]]] = {
        "crowd": lambda: crowd(desk, Peer(directory, texts, loaded.answer.max_tokens), rounds),
        "first": lambda: first_token(desk, rounds),
        "lookup": lambda: lookup(desk, rounds),
    }
    for name, ask in questions.items():
        document[name] = ask()
        say(f"{name}: {json.dumps(document[name])}")
        write(document, path)
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)
