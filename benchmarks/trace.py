"""Recorded traces, one line of JSON per request, and Poisson arrivals of the mixed workload."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.workload import SAMPLERS
from diffserve.api.types import DiffusionParams, GenerationRequest, Priority

STEPS: Final = {4: 0.3, 20: 0.4, 30: 0.2, 50: 0.1}
GUIDANCE: Final = (1.0, 5.0, 7.5, 12.0)


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a trace.

    arrival_s  since the trace began
    latency_s  from arrival to the last picture, where the trace was run; ``None`` where it was only drawn
    """

    arrival_s: float
    num_steps: int
    sampler: str
    guidance_scale: float
    width_px: int
    height_px: int
    num_images: int = 1
    seed: int = 0
    client: str = ""
    priority: Priority = "interactive"
    latency_s: float | None = None

    def request(self, request_id: str) -> GenerationRequest:
        """Convert the entry to a request to the engine."""
        return GenerationRequest(
            request_id=request_id,
            prompt=f"a fox on the beach {self.seed}",
            seed=self.seed,
            width_px=self.width_px,
            height_px=self.height_px,
            num_images=self.num_images,
            client=self.client,
            priority=self.priority,
            diffusion=DiffusionParams(
                sampler=self.sampler, num_steps=self.num_steps, guidance_scale=self.guidance_scale, spacing="leading"
            ),
        )


def mixed(
    count: int, sizes: Sequence[tuple[int, int]], *, seed: int, uniform_steps: int | None = None
) -> list[Recorded]:
    """Return ``count`` requests of the mixed workload, all at time 0; ``sizes`` (width, height) are equally frequent.

    uniform_steps  same number of steps for all requests, as a control
    """
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        [steps] = draw.choices(list(STEPS), list(STEPS.values()))
        width_px, height_px = draw.choice(sizes)
        requests.append(
            Recorded(
                arrival_s=0.0,
                num_steps=uniform_steps or steps,
                sampler=draw.choice(SAMPLERS),
                guidance_scale=draw.choice(GUIDANCE),
                width_px=width_px,
                height_px=height_px,
                seed=number,
            )
        )
    return requests


def at_poisson_times(requests: Iterable[Recorded], rate_per_s: float, *, seed: int) -> list[Recorded]:
    """Place ``requests`` in order, with independent exponential gaps of mean 1 / ``rate_per_s``."""
    draw, now_s, placed = random.Random(seed), 0.0, []
    for request in requests:
        now_s += draw.expovariate(rate_per_s)
        placed.append(msgspec.structs.replace(request, arrival_s=now_s))
    return placed


def save(trace: Iterable[Recorded], path: Path) -> None:
    """Write a trace, one line per request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(trace))


def load(path: Path) -> list[Recorded]:
    """Read a trace. Raises ValueError with the line that is not a request."""
    decoder = msgspec.json.Decoder(Recorded)
    trace = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            trace.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
    return sorted(trace, key=lambda request: request.arrival_s)
