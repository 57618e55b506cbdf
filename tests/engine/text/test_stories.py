"""Page allocation on a pool of ten pages of four tokens: which request gets pages, waits or is preempted."""

from __future__ import annotations

import pytest

from diffserve.api.text_types import TextFinished
from diffserve.api.types import Cancelled
from diffserve.engine.text import TextEngine
from tests.engine.text.conftest import MakeEngine
from tests.engine.text.text_requests import expected, greedy, of_type, token_ids_of
from tests.runtime.language import tiny


def pages_of(engine: TextEngine, request_id: str) -> list[int]:
    """Return the pages of a request's first sequence, in order."""
    table = engine.scheduler.live[request_id].tasks[0].sequences[0].table
    return [] if table is None else [page for logical in table.pages for page in logical]


def ids_of(engine: TextEngine) -> list[set[str]]:
    """Return the ids of the requests that shared each call."""
    return [{row[0] for row in tick.rows} for tick in engine.trace]


def test_a_text_grows_page_by_page_and_gives_all_of_them_back(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10, reads_late=False)
    anna = engine.submit(greedy(tiny.random_ids(7, seed=0), 6))
    page_lists: list[list[int] | None] = []
    while engine.scheduler.live or not page_lists:
        engine.tick()
        page_lists.append(pages_of(engine, anna) if anna in engine.scheduler.live else None)
    assert page_lists == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], None]
    assert engine.pool.draw() == "o o o . . . . . . ."  # twelve tokens were computed: three full pages are kept


def test_whoever_does_not_fit_waits_and_comes_next(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    anna = engine.submit(greedy(tiny.random_ids(24, seed=1), 4))
    ben = engine.submit(greedy(tiny.random_ids(24, seed=2), 4))
    engine.tick()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    events = list(engine.events())
    assert [event.request_id for event in of_type(events, TextFinished)] == [anna, ben]
    assert engine.stats().preemptions == 0
    assert not any(len(ids) > 1 for ids in ids_of(engine))


def test_a_small_request_does_not_overtake_one_that_waits_for_pages(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    prompts = [tiny.random_ids(count, seed=count) for count in (24, 25, 4)]
    ids = [engine.submit(greedy(prompt, 4)) for prompt in prompts]
    events = list(engine.events())
    assert [event.request_id for event in of_type(events, TextFinished)] == ids


def test_the_youngest_gives_way_when_the_oldest_must_grow(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    prompts = [tiny.random_ids(8, seed=seed) for seed in range(3)]
    names = [engine.submit(greedy(prompt, 24)) for prompt in prompts]
    gone: list[str] = []
    while engine.has_work:
        before = {name for name in names if name in engine.scheduler.live and pages_of(engine, name)}
        engine.tick()
        live = engine.scheduler.live
        gone += [name for name in names if name in before and name in live and not pages_of(engine, name)]
        engine.check_integrity()
    assert gone[0] == names[2]
    assert names[0] not in gone
    assert engine.stats().preemptions == len(gone)


def test_a_common_beginning_is_computed_once_even_when_all_come_at_the_same_time(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=100, max_batch_tokens=20)
    system = tiny.random_ids(40, seed=0)
    prompts = [[*system, *tiny.random_ids(3, seed=seed)] for seed in range(1, 6)]
    answers = engine.generate([greedy(ids, 4) for ids in prompts])
    assert [token_ids_of(answer) for answer in answers] == [expected("llama", ids, 4) for ids in prompts]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 40, 40, 40, 40]
    assert engine.stats().computed_tokens == 43 + 4 * 3 + 5 * 3


def test_strangers_with_another_salt_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=100)
    ids = tiny.random_ids(20, seed=0)
    requests = [greedy(ids, 4, cache_salt=salt) for salt in (b"", b"anna", b"anna", b"ben")]
    answers = [engine.generate(request)[0] for request in requests]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 0, 16, 0]


def test_a_cancelled_text_has_no_pages_after_the_next_tick_and_takes_no_part_in_it(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    anna = engine.submit(greedy(tiny.random_ids(8, seed=1), 20))
    ben = engine.submit(greedy(tiny.random_ids(8, seed=2), 20))
    engine.tick()
    assert engine.cancel(anna)
    assert not engine.cancel(anna)
    events = engine.tick()
    assert [event.request_id for event in of_type(events, Cancelled)] == [anna]
    assert ids_of(engine)[-1] == {ben}
    engine.check_integrity()
    assert not engine.cancel(anna)
    list(engine.events())


def test_a_text_cancelled_while_it_is_computed_says_nothing_more(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_pages=10)
    anna = engine.submit(greedy(tiny.random_ids(8, seed=1), 20, num_texts=2))
    engine.tick()
    run = engine.runners.run
    monkeypatch.setattr(engine.runners, "run", lambda plan: (engine.cancel(anna), run(plan))[1])
    events = engine.tick()
    assert [type(event) for event in events] == [Cancelled]
    assert engine.pool.stats().held_pages == 0


def test_a_request_cancelled_before_its_first_tick_never_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    anna = engine.submit(greedy([1, 2, 3], 4))
    assert engine.cancel(anna)
    assert [type(event).__name__ for event in engine.tick()] == ["TextAccepted", "Cancelled"]
    assert engine.trace == ()


def test_pages_of_another_tenant_make_texts_wait_and_not_fail(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    pool = engine.pool
    stranger, _ = pool.open("llm", range(100, 132), b"stranger", reserve=32)
    ids = tiny.random_ids(7, seed=1)
    anna = engine.submit(greedy(ids, 12))
    for _ in range(4):
        engine.tick()
    assert len(engine.scheduler.live[anna].tasks[0].choices) == 2  # two pages: eight tokens
    pool.close(stranger)
    (answer,) = of_type(list(engine.events()), TextFinished)
    assert token_ids_of(answer) == expected("llama", ids, 12)


def test_other_texts_of_a_request_start_from_the_pages_of_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=20)
    anna = engine.submit(greedy(tiny.random_ids(10, seed=1), 4, num_texts=3))
    engine.tick()
    tables = [task.sequences[0].table for task in engine.scheduler.live[anna].tasks]
    assert [None if table is None else table.pages for table in tables] == [((0,), (1,), (2,))] * 3
    engine.tick()
    assert engine.pool.draw().startswith("3 3 1 1 1")  # the open page was copied for all but one
    list(engine.events())
