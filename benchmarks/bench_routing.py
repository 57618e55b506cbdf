"""Does the router find the pages that one engine would? Prompts with shared beginnings over several members, simulated.

    python benchmarks/bench_routing.py
    python benchmarks/bench_routing.py --members 4 --requests 4000 --load 0.9

A trace is drawn: authors come and go, each with a style of its own that begins its prompts, and a negative prompt; they
ask again with another seed, for another subject in the same style, or for something new. Every member has a real page
pool, of the size that an engine takes by itself, that files the token windows of both texts under its own keys. They
are held against one engine, and against one with a pool as large as all of them have together. Members work one request
after the other, as long as it has rows; requests come as Poisson says, for a ``load`` of them all. The router sees
texts and queues only. Told are the pages found, and how long requests wait, in mean requests. One JSON document to
stdout and to results/.
"""

from __future__ import annotations

import datetime
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final, NamedTuple

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.report import RESULTS, hardware, versions, write
from benchmarks.trace import GUIDANCE, STEPS
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.runtime.kv import KVSpec, LayerSpec, PagePlan, PagePool
from diffserve.runtime.text.conditioning import AUTO_WINDOWS
from diffserve.service.engine.router import AffinityWeights, ReplicaQueue, Router, route_needs
from diffserve.world.captions import held_out

WINDOW_TOKENS: Final = 77
POOL_WINDOWS: Final = AUTO_WINDOWS
"""In the pool of an engine, as it takes one by itself."""

NEAR: Final = 40
"""Authors who are at work at a time."""

ASKS: Final = {"again": 0.4, "other subject": 0.4, "new": 0.2}
SPEC: Final = KVSpec("unet", (LayerSpec(1, 8),), torch.float32, whole_sequences=True)
Choose = Callable[[GenerationRequest, float, dict[str, float]], str]


class Arrival(NamedTuple):
    """Request with its arrival time, counted in UNet rows of one member."""

    at: float
    request: GenerationRequest

    @property
    def cost(self) -> float:
        """Number of UNet rows."""
        params = self.request.diffusion
        return float((params.num_steps or 0) * (2 if (params.guidance_scale or 0.0) > 1.0 else 1))


class Outcome(NamedTuple):
    """Number of pages requested and found, and the mean wait in mean requests."""

    asked_pages: int
    found_pages: int
    mean_wait: float


def drawn(count: int, *, members: int, load: float, seed: int) -> list[Arrival]:
    """Draw a trace that keeps ``members`` busy for a share ``load`` of the time."""
    draw = random.Random(seed)
    subjects = [prompt for _, prompt in held_out(400)]
    words = sorted({word for prompt in subjects for word in prompt.split()})
    authors: list[tuple[str, str, str]] = []
    requests: list[GenerationRequest] = []
    for number in range(count):
        if len(authors) < NEAR or draw.random() < 0.1:  # a new author, so that authors change over time
            style, negative = (" ".join(draw.choices(words, k=draw.randint(*some))) for some in ((12, 30), (0, 20)))
            authors = [*authors[-NEAR + 1 :], (style, draw.choice(subjects), negative)]
        place = draw.randrange(len(authors))
        style, subject, negative = authors[place]
        [asks] = draw.choices(list(ASKS), list(ASKS.values()))
        if asks != "again":
            subject = draw.choice(subjects)
            authors[place] = style, subject, negative
        [num_steps] = draw.choices(list(STEPS), list(STEPS.values()))
        params = DiffusionParams(num_steps=num_steps, guidance_scale=draw.choice(GUIDANCE))
        prompt = subject if asks == "new" else f"{style} {subject}"
        requests.append(GenerationRequest(prompt=prompt, negative_prompt=negative, seed=number, diffusion=params))
    gap = mean(Arrival(0.0, request).cost for request in requests) / (members * load)
    now, placed = 0.0, []
    for request in requests:
        now += draw.expovariate(1.0 / gap)
        placed.append(Arrival(now, request))
    return placed


def run(trace: Sequence[Arrival], choose: Choose, *, members: int, pool_windows: int = POOL_WINDOWS) -> Outcome:
    """Send ``trace`` to ``members`` with a pool of so many windows each, as ``choose`` says."""
    pages = pool_windows * SPEC.num_logical_pages(WINDOW_TOKENS)
    page_bytes = PagePlan.smallest_page_bytes([SPEC])
    pools = {str(number): PagePool.for_specs(pages * page_bytes, [SPEC]) for number in range(members)}
    free_at = dict.fromkeys(pools, 0.0)
    num_pages = num_found = 0
    waits = []
    for arrival in trace:
        queues = {member: max(0.0, until - arrival.at) for member, until in free_at.items()}
        member = choose(arrival.request, arrival.cost, queues)
        waits.append(queues[member])
        free_at[member] = arrival.at + queues[member] + arrival.cost
        for text in (arrival.request.prompt, arrival.request.negative_prompt):
            ids = window(text)
            table, num_cached = pools[member].open(SPEC.tenant, ids, reserve=len(ids))
            pools[member].commit(table, ids)
            pools[member].close(table)
            num_pages += SPEC.num_logical_pages(len(ids))
            num_found += SPEC.num_logical_pages(num_cached)
    return Outcome(num_pages, num_found, mean(waits) / mean(arrival.cost for arrival in trace))


@cache
def window(text: str) -> tuple[int, ...]:
    """Tokenize ``text`` with the embedded model's tokenizer into a window as long as Stable Diffusion's."""
    ids = _tokenizer()(text, truncation=True, max_length=WINDOW_TOKENS).input_ids
    return tuple(ids + ids[-1:] * (WINDOW_TOKENS - len(ids)))


@cache
def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    weights = Path(__file__).resolve().parent.parent / "diffserve" / "embedded" / "weights"
    return CLIPTokenizer.from_pretrained(str(weights / "tokenizer"))


def routed(bounds: AffinityWeights | None = None) -> Choose:
    """Return a policy that uses the product's router."""
    router = Router(bounds)

    def choose(request: GenerationRequest, cost: float, queues: dict[str, float]) -> str:
        needs = route_needs(request, cost)
        member = router.choose(needs, {name: ReplicaQueue(queued) for name, queued in queues.items()})
        router.record(member, needs)
        return member

    return choose


def at_random(seed: int = 0) -> Choose:
    """Return a policy that picks a random member."""
    draw = random.Random(seed)
    return lambda _request, _cost, queues: draw.choice(sorted(queues))


def shortest(_request: GenerationRequest, _cost: float, queues: dict[str, float]) -> str:
    """Pick the member with the least queued work."""
    return min(queues, key=lambda member: queues[member])


def main(
    members: Annotated[str, typer.Option(help="Comma-separated numbers of pool members.")] = "2,4,8",
    requests: Annotated[int, typer.Option(help="Requests of the trace.")] = 3000,
    load: Annotated[float, typer.Option(help="Load of the members, 0 to 1.")] = 0.7,
    bounds: Annotated[str, typer.Option(help="Comma-separated prefix weights of the router.")] = "0.25,0.5,1,2",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and write the document."""
    rows = []
    for num_members in map(int, members.split(",")):
        trace = drawn(requests, members=num_members, load=load, seed=17)
        found_by_one = run(trace, shortest, members=1).found_pages
        found_by_large = run(trace, shortest, members=1, pool_windows=POOL_WINDOWS * num_members).found_pages
        arms: dict[str, Choose] = {"random": at_random(), "shortest": shortest}
        arms |= {f"router {bound}": routed(AffinityWeights(prefix=float(bound))) for bound in bounds.split(",")}
        for name, choose in arms.items():
            outcome = run(trace, choose, members=num_members)
            share, wait = outcome.found_pages / outcome.asked_pages, round(outcome.mean_wait, 3)
            shares = {
                "of_asked": share,
                "of_one": outcome.found_pages / found_by_one,
                "of_one_large": outcome.found_pages / found_by_large,
            }
            found_shares = {f"found_{name}": round(part, 3) for name, part in shares.items()}
            rows.append({"members": num_members, "arm": name, **found_shares, "mean_wait_in_requests": wait})
    now = datetime.datetime.now(datetime.UTC)
    document = {
        "benchmark": "routing",
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/bench_routing.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "trace": {"requests": requests, "load": load, "authors": NEAR, "asks": ASKS, "pool_windows": POOL_WINDOWS},
        "rows": rows,
    }
    write(document, out or RESULTS / f"routing-{now.date().isoformat()}.json")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
