"""Several clients and two priorities at the text engine: the order of admission, without starvation. No torch."""

from __future__ import annotations

from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.api.types import Priority
from diffserve.engine.text.pages import BATCH_LATER, Turns
from diffserve.engine.text.task import LiveText


def live(client: str, priority: Priority = "interactive", *, tokens: int = 100, share: float = 1.0) -> LiveText:
    params = SamplingParams(max_tokens=tokens)
    request = TextRequest(prompt="a", params=params, client=client, priority=priority, share=share)
    return LiveText(request, [], 0, 0.0)


def test_the_first_of_a_client_comes_before_the_second_of_another_however_many_that_has() -> None:
    turns = Turns()
    crowd = [live("crowd") for _ in range(50)]
    for entry in crowd:
        turns.join(entry)
    for entry in crowd[:3]:
        turns.advance(entry)
    guest, again = live("guest"), live("guest")
    turns.join(guest)
    turns.join(again)
    order = sorted([*crowd[3:], guest, again], key=lambda entry: entry.turn)
    assert order[:1] == [guest]
    assert order.index(again) <= 2
    assert [entry.turn for entry in crowd] == sorted(entry.turn for entry in crowd)


def test_twice_the_share_is_half_the_way() -> None:
    turns = Turns()
    plain, twice = [live("a") for _ in range(9)], [live("b", share=2.0) for _ in range(9)]
    for entry in (*plain, *twice):
        turns.join(entry)
    first = sorted((*plain, *twice), key=lambda entry: entry.turn)[:9]
    assert sum(entry.request.client == "b" for entry in first) == 6


def test_batch_work_ages_and_is_passed_by_so_many_tokens_and_no_more() -> None:
    """Interactive requests without end: those that begin within BATCH_LATER tokens pass, and then it is its turn."""
    turns = Turns()
    batch = live("bulk", "batch")
    turns.join(batch)
    passed = 0
    while True:
        entry = live("someone", tokens=1000)
        turns.join(entry)
        if entry.turn > batch.turn:
            break
        turns.advance(entry)
        passed += 1
    assert passed == BATCH_LATER // 1000 + 1
