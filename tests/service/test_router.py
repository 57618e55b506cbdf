"""Routing by model, adapters, prefix and queue length."""

from __future__ import annotations

import pytest

from benchmarks.bench_routing import POOL_WINDOWS, at_random, drawn, routed, run, shortest
from diffserve.api.text_types import ChatMessage, TextRequest
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.models.loras import Lora
from diffserve.service.engine.router import (
    BLOCK_WORDS,
    AffinityWeights,
    ReplicaQueue,
    RouteNeeds,
    Router,
    chain,
    route_needs,
)

STYLE = "an oil painting in the style of the old masters with warm light"
IDLE = ReplicaQueue(0.0)


def needs(prompt: str, cost: float = 10.0, *, model: str = "", loras: tuple[Lora, ...] = ()) -> RouteNeeds:
    params = DiffusionParams(loras=loras)
    return route_needs(GenerationRequest(prompt=prompt, model=model, diffusion=params), cost, "first")


def queues(*costs: float) -> dict[str, ReplicaQueue]:
    """Return the queues by replica; all replicas have the first model."""
    return {f"m{number}": ReplicaQueue(cost, frozenset({"first"})) for number, cost in enumerate(costs)}


def test_without_affinity_the_shortest_queue_is_selected() -> None:
    router = Router()
    assert router.choose(needs("a fox"), queues(3.0, 1.0, 2.0)) == "m1"
    assert router.choose(route_needs(TextRequest(prompt="once"), 1.0), queues(3.0, 1.0, 0.5)) == "m2"


def test_a_prompt_goes_to_the_replica_of_its_prefix_within_half_a_request() -> None:
    router = Router(AffinityWeights(prefix=0.5))
    router.record("m1", needs(f"{STYLE}, a fox"))
    route = needs(f"{STYLE}, an owl", cost=10.0)
    assert router.num_known_words("m1", route) == BLOCK_WORDS
    assert router.choose(route, queues(0.0, 4.9)) == "m1"
    assert router.choose(route, queues(0.0, 5.1)) == "m0"
    assert router.choose(needs("an owl", cost=10.0), queues(0.0, 4.9)) == "m0"


def test_the_longest_prefix_counts_fully_and_shorter_ones_partially() -> None:
    router = Router(AffinityWeights(prefix=1.0))
    router.record("m1", needs(f"{STYLE}, a fox on a hill in the rain"))
    router.record("m2", needs(f"{STYLE}, a fox on a hill in the rain with a hat and a stick, at dawn"))
    route = needs(f"{STYLE}, a fox on a hill in the rain with a hat and a stick, at noon", cost=10.0)
    assert 0 < router.num_known_words("m1", route) < router.num_known_words("m2", route)
    assert router.choose(route, queues(0.0, 8.0, 9.0)) == "m2"
    assert router.choose(route, queues(9.0, 2.0, 9.0)) == "m1"


def test_a_model_and_adapters_weigh_more_than_a_prefix() -> None:
    router = Router()
    router.record("m0", needs("a fox"))
    where = {"m0": IDLE, "m1": ReplicaQueue(100.0, frozenset({"photo"}))}
    assert router.choose(needs("a fox", model="photo"), where) == "m1"
    ink = (Lora(name="ink"),)
    router.record("m1", needs("a boat", loras=ink))
    assert router.choose(needs("a boat", loras=ink), queues(0.0, 39.0)) == "m1"
    assert router.choose(needs("a boat", loras=ink), queues(0.0, 46.0)) == "m0"
    assert router.choose(needs("a boat", loras=(Lora(name="other"),)), queues(0.0, 1.0)) == "m0"


def test_a_model_that_is_being_loaded_attracts_further_requests_for_it() -> None:
    router = Router()
    router.record("m1", needs("a fox", model="photo"))
    assert router.choose(needs("a boat", model="photo"), queues(0.0, 30.0)) == "m1"


def test_a_restarted_replica_has_nothing_cached() -> None:
    router = Router()
    router.record("m1", needs("a fox"))
    assert router.choose(needs("a fox"), queues(0.0, 1.0)) == "m1"
    router.forget("m1")
    assert router.choose(needs("a fox"), queues(0.0, 1.0)) == "m0"


def test_the_index_is_bounded_and_evicts_prefixes_last() -> None:
    router = Router(max_keys=3)
    words = [f"word{number}" for number in range(3 * BLOCK_WORDS)]
    router.record("m0", needs(" ".join(words)))
    for number in range(100):
        router.record("m1", needs(f"prompt {number}"))
    assert router.num_known_words("m1", needs("prompt 99")) == 2
    assert router.num_known_words("m1", needs("prompt 9")) == 0
    assert router.num_known_words("m0", needs(" ".join(words))) >= BLOCK_WORDS


def test_equal_keys_require_equal_text_and_salt() -> None:
    assert chain(b"", "A Fox,  in the rain") == chain(b"", "a fox, in the rain")
    assert chain(b"", "a fox") != chain(b"model", "a fox")
    first, second = chain(b"", f"x {STYLE}"), chain(b"", f"y {STYLE}")
    assert not {block.key for block in first} & {block.key for block in second}
    assert chain(b"", "") == ()


@pytest.mark.parametrize("salt", [b"", b"mine"])
def test_a_conversation_stays_on_its_replica(salt: bytes) -> None:
    router = Router()
    turns = [ChatMessage(role="user", content=STYLE), ChatMessage(role="assistant", content="a fox, then")]
    router.record("m1", route_needs(TextRequest(messages=(turns[0],), cache_salt=b"mine"), 4.0))
    route = route_needs(TextRequest(messages=tuple(turns), cache_salt=salt), 4.0)
    assert router.choose(route, queues(0.0, 1.0)) == ("m1" if salt else "m0")


@pytest.mark.slow
def test_routed_replicas_hit_most_cached_pages_of_one_engine_and_random_routing_few() -> None:
    trace = drawn(600, members=6, load=0.7, seed=3)
    single_pages = run(trace, shortest, members=1).found_pages
    routed_pages = run(trace, routed(), members=6).found_pages
    assert routed_pages >= 0.8 * single_pages
    assert run(trace, at_random(), members=6).found_pages < 0.8 * routed_pages
    assert routed_pages <= run(trace, shortest, members=1, pool_windows=6 * POOL_WINDOWS).found_pages
