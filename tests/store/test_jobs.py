"""Tests of the table of jobs, with SQLite and PostgreSQL: leases, fencing, exactly one end, expiry and deletion."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from diffserve.api.errors import InvalidRequest
from diffserve.store import Database
from diffserve.store.database import PageSelection
from diffserve.store.jobs import (
    CANCELLED_AT_ONCE,
    KEPT_S,
    LOCK_CREATED_S,
    MAX_ATTEMPTS,
    OVER,
    UNFINISHED,
    Job,
    JobFilter,
    Jobs,
    Status,
)
from diffserve.store.schema import job_bodies
from tests.store.conftest import OpenDatabase

PATH = "/v1/images/generations"
DAY_S = 86400.0


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(database: Database, clock: Clock) -> Jobs:
    return Jobs(database, clock)


def claim(jobs: Jobs, holder: str = "a") -> Job:
    job = jobs.claim(holder)
    assert job is not None
    return job


def current(jobs: Jobs, name: str = "one") -> Job:
    job = jobs.get("key-1", name)
    assert job is not None
    return job


def test_a_job_is_added_once_and_its_result_is_stored(jobs: Jobs) -> None:
    job, is_new = jobs.add("key-1", "one", PATH, '{"prompt":"a"}', DAY_S)
    again, is_new_again = jobs.add("key-1", "one", PATH, '{"prompt":"a"}', DAY_S)
    assert (again, is_new, is_new_again) == (job, True, False)
    with pytest.raises(InvalidRequest, match="another endpoint or body"):
        jobs.add("key-1", "one", PATH, '{"prompt":"b"}', DAY_S)
    ordered, _ = jobs.add("key-3", "one", PATH, '{"prompt":"a","seed":1}', DAY_S)
    assert jobs.add("key-3", "one", PATH, '{"seed":1,"prompt":"a"}', DAY_S) == (ordered, False)
    assert jobs.cancel("key-3", "one") is not None
    other, is_new = jobs.add("key-2", "one", PATH, '{"prompt":"b"}', DAY_S)
    assert is_new, "each owner has IDs of its own"
    leased = claim(jobs)
    assert (leased.number, leased.status, leased.holder, leased.token) == (job.number, "running", "a", 1)
    assert jobs.finish(leased, "succeeded", (200, b"{}"))
    finished = current(jobs)
    assert [status for status, _ in finished.entered] == ["queued", "running", "succeeded"]
    assert (finished.result_status, finished.holder, jobs.result(finished)) == (200, "", b"{}")
    assert claim(jobs).number == other.number
    assert jobs.claim("a") is None


def test_a_lost_lease_cannot_end_the_job(jobs: Jobs) -> None:
    jobs.add("key-1", "one", PATH, "{}", DAY_S)
    stale = claim(jobs, "dead")
    assert jobs.reclaim(lambda: {"alive"}) == ["one"]
    leased = claim(jobs, "alive")
    assert not jobs.finish(stale, "succeeded", (200, b"stale"))
    assert not jobs.release(stale)
    assert jobs.reclaim(lambda: {"alive"}) == []
    assert jobs.finish(leased, "succeeded", (200, b"good"))
    assert not jobs.finish(leased, "failed", None, "x: y")
    assert jobs.result(current(jobs)) == b"good"


def test_a_job_that_a_new_process_claims_while_the_processes_are_listed_stays_leased(jobs: Jobs) -> None:
    for name in ("one", "two"):
        jobs.add("key-1", name, PATH, "{}", DAY_S)
    claim(jobs, "dead")

    def list_holders() -> set[str]:
        claim(jobs, "new")
        return {"alive"}

    assert jobs.reclaim(list_holders) == ["one"]
    assert (current(jobs, "two").status, current(jobs, "two").attempts) == ("running", 1)


def test_cancel_wins_over_a_running_job_and_retry_runs_it_again(jobs: Jobs) -> None:
    jobs.add("key-1", "one", PATH, "{}", DAY_S)
    leased = claim(jobs)
    cancelled = jobs.cancel("key-1", "one")
    assert cancelled is not None
    assert (cancelled.status, jobs.finish(leased, "succeeded", (200, b"late"))) == ("cancelled", False)
    assert jobs.states([leased.number]) == {leased.number: ("cancelled", 1)}
    assert jobs.cancel("key-1", "one") == cancelled
    retried = jobs.retry("key-1", "one", DAY_S)
    assert retried is not None
    assert retried.status == "queued"
    assert jobs.finish(claim(jobs), "succeeded", (200, b"good"))
    assert jobs.cancel("key-1", "one") == jobs.retry("key-1", "one", DAY_S) == current(jobs), "it is over"
    assert jobs.cancel("key-2", "one") is None


def test_a_job_that_loses_two_engines_is_poison_but_draining_does_not_count(jobs: Jobs) -> None:
    jobs.add("key-1", "one", PATH, "{}", DAY_S)
    for _ in range(3 * MAX_ATTEMPTS):
        assert jobs.drain(claim(jobs))
    assert current(jobs).attempts == 0
    assert jobs.release(claim(jobs), is_engine_lost=True)
    assert current(jobs).status == "queued"
    assert jobs.release(claim(jobs), is_engine_lost=True)
    assert (current(jobs).status, current(jobs).error.partition(":")[0]) == ("failed", "poison")


def test_a_job_that_ends_every_server_is_poison(jobs: Jobs) -> None:
    jobs.add("key-1", "one", PATH, "{}", DAY_S)
    for attempt in range(MAX_ATTEMPTS):
        claim(jobs, f"dead-{attempt}")
        jobs.reclaim(lambda: {"alive"})
    assert (current(jobs).status, current(jobs).error.partition(":")[0]) == ("failed", "poison")


def test_a_job_that_has_lost_an_engine_runs_alone(jobs: Jobs) -> None:
    for name in ("one", "two"):
        jobs.add("key-1", name, PATH, "{}", DAY_S)
    suspect, other = claim(jobs), claim(jobs)
    assert jobs.release(suspect, is_engine_lost=True)
    assert jobs.claim("a", is_idle=False) is None
    assert jobs.finish(other, "succeeded", (200, b"{}"))
    assert claim(jobs).number == suspect.number


def test_files_that_no_job_needs_are_removed(jobs: Jobs, clock: Clock) -> None:
    """The files of killed servers: parts, results of lost leases, captured states, and a lock that was not taken."""
    clock.now_s = time.time()
    jobs.folder.mkdir()
    for name in ("one", "two", "three"):
        jobs.add("key-1", name, PATH, "{}", DAY_S)
    assert jobs.finish(claim(jobs), "succeeded", (200, b"good"))
    claim(jobs, "dead")
    jobs.reclaim(lambda: {"alive"})
    running = claim(jobs, "alive")
    needed = {"1-1", "2-2.part", "2-capture-0", "2-capture-0.part", "3-capture-0", "a.lock", "new.new"}
    for name in (*needed, "1-1.part", "1-capture-0", "1-capture-0.part", "2-1", "2-1.part", "9-1", "9-capture-0"):
        (jobs.folder / name).write_bytes(b"good")
    jobs.sweep()
    assert {path.name for path in jobs.folder.iterdir()} == needed
    clock.now_s += LOCK_CREATED_S + 1.0
    assert jobs.cancel("key-1", running.id)
    jobs.sweep()
    assert {path.name for path in jobs.folder.iterdir()} == {"1-1", "3-capture-0", "a.lock"}
    assert jobs.result(current(jobs)) == b"good"


def test_expiry_deletion_and_pages(database: Database, jobs: Jobs, clock: Clock) -> None:
    for number in range(5):
        jobs.add("key-1", f"job-{number}", PATH if number else "/v1/embeddings", "{}", 60.0 if number == 3 else DAY_S)
    clock.now_s += 61.0
    jobs.finish(claim(jobs), "failed", (400, b"bad"), "a: b")
    jobs.sweep()
    assert (current(jobs, "job-3").status, current(jobs, "job-2").status) == ("expired", "queued")

    def names(job_filter: JobFilter, selection: PageSelection) -> list[str]:
        page = jobs.page("key-1", selection, job_filter)
        assert page is not None
        return [job.id for job in page[0]]

    assert names(JobFilter(), PageSelection(2)) == ["job-4", "job-3"]
    assert names(JobFilter(), PageSelection(2, "job-3")) == ["job-2", "job-1"]
    assert names(JobFilter(("queued",)), PageSelection(9, order="asc")) == ["job-1", "job-2", "job-4"]
    assert names(JobFilter(("failed", "queued"), "/v1/embeddings"), PageSelection(9)) == ["job-0"]
    assert names(JobFilter(prefix="job-4"), PageSelection(9)) == ["job-4"]
    assert names(JobFilter(prefix="Job_"), PageSelection(9)) == []
    failed = current(jobs, "job-0")
    jobs.delete(failed)
    assert (jobs.get("key-1", "job-0"), list(jobs.folder.iterdir())) == (None, [])
    jobs.delete(current(jobs, "job-1"))
    assert current(jobs, "job-1").status == "queued", "only finished jobs are deleted"
    clock.now_s += KEPT_S
    jobs.sweep()
    assert jobs.get("key-1", "job-3") is None
    assert current(jobs, "job-1").status == "expired"
    clock.now_s += KEPT_S
    jobs.sweep()
    with database.reading() as connection:
        assert connection.execute(select(func.count()).select_from(job_bodies)).scalar_one() == 0


def test_the_result_of_a_job_that_waited_for_days_is_kept(jobs: Jobs, clock: Clock) -> None:
    jobs.add("key-1", "one", PATH, "{}", KEPT_S)
    clock.now_s += KEPT_S - 1.0
    leased = claim(jobs)
    clock.now_s += 2.0
    assert jobs.finish(leased, "succeeded", (200, b"done"))
    jobs.sweep()
    assert jobs.result(current(jobs)) == b"done"
    clock.now_s += KEPT_S
    jobs.sweep()
    assert jobs.get("key-1", "one") is None


def test_two_servers_claim_every_job_once(open_database: OpenDatabase) -> None:
    servers = [Jobs(open_database()) for _ in range(2)]
    for number in range(40):
        servers[0].add("key-1", f"job-{number}", PATH, "{}", DAY_S)

    def run(worker: int) -> list[int]:
        jobs, done = servers[worker % 2], []
        while (job := jobs.claim(f"server-{worker}")) is not None:
            assert jobs.finish(job, "succeeded", (200, b"{}"))
            done.append(job.number)
        return done

    with ThreadPoolExecutor(4) as pool:
        counts = Counter(number for done in pool.map(run, range(4)) for number in done)
    assert (len(counts), set(counts.values())) == (40, {1})
    page = servers[0].page("key-1", PageSelection(100), JobFilter(("succeeded",)))
    assert page is not None
    assert {len(job.entered) for job in page[0]} == {3}


def test_bodies_are_only_read_to_run_their_jobs(jobs: Jobs) -> None:
    size = 1 << 20
    body = f'{{"image": "{"a" * size}", "prompt": "a \\u0000fox"}}'
    for number in range(8):
        jobs.add("key-1", str(number), PATH, body, DAY_S)
    assert jobs.body(claim(jobs)) == body
    tracemalloc.start()
    try:
        page = jobs.page("key-1", PageSelection(8), JobFilter())
        assert page is not None
        assert [job.prompt for job in page[0]] == ["a fox"] * 8
        assert jobs.pause("key-1", "0") is not None
        assert jobs.resume("key-1", "0") is not None
        jobs.drain(claim(jobs))
        assert len(jobs.cancel_many("key-1", None, JobFilter())) == 8
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_bodies_count_until_their_jobs_succeed_or_are_deleted(database: Database, clock: Clock) -> None:
    jobs, body = Jobs(database, clock, max_bytes=100), '{"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaaa"}'
    assert len(body) == 42
    jobs.add("key-1", "one", PATH, body, DAY_S)
    assert jobs.finish(claim(jobs), "succeeded", (200, b"{}"))
    assert jobs.add("key-1", "one", PATH, body, DAY_S) == (current(jobs), False), "its body is known by its digest"
    with pytest.raises(InvalidRequest, match="choose another ID"):
        jobs.add("key-1", "one", PATH, "{}", DAY_S)
    for name in ("two", "three"):
        jobs.add("key-1", name, PATH, body, DAY_S)
        jobs.cancel("key-1", name)
    with pytest.raises(InvalidRequest, match=r"have 84 bytes and this one has 42; at most 100 are allowed\."):
        jobs.add("key-1", "four", PATH, body, DAY_S)
    jobs.add("key-2", "four", PATH, body, DAY_S)
    jobs.delete(current(jobs, "two"))
    assert jobs.add("key-1", "four", PATH, body, DAY_S)[1]


def test_owners_take_turns(jobs: Jobs) -> None:
    for number in range(32):
        jobs.add("key-1", f"many-{number}", PATH, "{}", DAY_S)
    first = claim(jobs)
    jobs.add("key-2", "late", PATH, "{}", DAY_S)
    assert [first.id, claim(jobs).id, claim(jobs).id] == ["many-0", "late", "many-1"]
    assert jobs.claim("a", is_full=True) is None, "key-1 has running jobs"
    jobs.add("key-3", "other", PATH, "{}", DAY_S)
    claimed = jobs.claim("a", is_full=True)
    assert claimed is not None
    assert claimed.id == "other"


OWNERS = ("key-1", "key-2", "key-3")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    added=st.lists(st.sampled_from(OWNERS), max_size=12),
    num_running=st.integers(0, 6),
    added_later=st.lists(st.sampled_from(OWNERS), max_size=12),
    paused=st.sets(st.integers(0, 23), max_size=5),
)
def test_positions_are_the_order_of_claims(
    jobs: Jobs, added: list[str], num_running: int, added_later: list[str], paused: set[int]
) -> None:
    names = iter(range(24))
    numbers: list[int] = []

    def add(owner: str) -> None:
        name = next(names)
        numbers.append(jobs.add(owner, f"{numbers}-{name}", PATH, "{}", DAY_S)[0].number)
        if name in paused:
            jobs.pause(owner, f"{numbers[:-1]}-{name}")

    for owner in added:
        add(owner)
    for _ in range(num_running):
        jobs.claim("a")
    for owner in added_later:
        add(owner)
    positions = jobs.positions(numbers)
    claimed = []
    while (job := jobs.claim("a")) is not None:
        claimed.append(job.number)
    assert sorted(positions, key=positions.__getitem__) == claimed
    assert sorted(positions.values()) == list(range(1, len(claimed) + 1))
    for owner in OWNERS:
        jobs.cancel_many(owner, None, JobFilter())


def test_a_paused_job_waits_keeps_its_attempts_and_returns_to_its_place(jobs: Jobs, clock: Clock) -> None:
    for name in ("one", "two"):
        jobs.add("key-1", name, PATH, "{}", 60.0)
    leased = claim(jobs)
    paused = jobs.pause("key-1", "one")
    assert paused is not None
    assert (paused.status, paused.attempts, paused.holder, paused.token) == ("paused", 0, "", leased.token)
    assert not jobs.finish(leased, "succeeded", (200, b"late"))
    assert not jobs.drain(leased)
    assert jobs.pause("key-1", "one") == paused
    assert (claim(jobs).id, jobs.claim("a")) == ("two", None)
    resumed = jobs.resume("key-1", "one")
    assert resumed is not None
    assert (resumed.status, jobs.positions([leased.number])) == ("queued", {leased.number: 1})
    assert (claim(jobs).token, current(jobs).attempts) == (leased.token + 1, 1)
    assert jobs.pause("key-1", "two") is not None
    clock.now_s += 61.0
    jobs.sweep()
    expired = current(jobs, "two")
    assert (expired.status, expired.error.partition(":")[0]) == ("expired", "job_expired")
    assert jobs.pause("key-1", "two") == jobs.resume("key-1", "two") == expired
    assert jobs.pause("key-2", "two") is None
    assert jobs.resume("key-2", "two") is None


def test_many_jobs_are_cancelled_by_filter_and_by_id(jobs: Jobs) -> None:
    num_jobs = CANCELLED_AT_ONCE + 3
    for number in range(num_jobs):
        jobs.add("key-1", f"job-{number}", PATH if number else "/v1/embeddings", "{}", DAY_S)
    jobs.add("key-2", "job-1", PATH, "{}", DAY_S)
    leased = claim(jobs)
    jobs.pause("key-1", "job-2")

    def cancelled(names: list[str] | None, job_filter: JobFilter) -> list[str]:
        return [job.id for job in jobs.cancel_many("key-1", names, job_filter)]

    assert cancelled(["job-1", "job-1", "none"], JobFilter()) == ["job-1"]
    assert cancelled(["job-3"], JobFilter(("running",))) == []
    assert cancelled(None, JobFilter(("queued", "running"), "/v1/embeddings")) == [leased.id]
    assert cancelled(None, JobFilter(("queued",))) == [f"job-{number}" for number in range(3, num_jobs)]
    assert cancelled(None, JobFilter()) == ["job-2"]
    assert cancelled(None, JobFilter()) == []
    assert not jobs.finish(leased, "succeeded", (200, b"late"))
    assert claim(jobs).owner == "key-2"


def test_captures_of_finished_jobs_are_removed(jobs: Jobs) -> None:
    for name in ("one", "two"):
        jobs.add("key-1", name, PATH, "{}", DAY_S)
    jobs.folder.mkdir(exist_ok=True)
    numbers = [current(jobs, name).number for name in ("one", "two")]
    for number in numbers:
        (jobs.folder / f"{number}-capture-0").write_bytes(b"state")
    jobs.pause("key-1", "two")
    jobs.cancel("key-1", "one")
    jobs.sweep()
    assert [path.name for path in jobs.folder.iterdir()] == [f"{numbers[1]}-capture-0"]


ACTIONS = ("claim", "finish", "fail", "drain", "release", "reclaim", "cancel", "pause", "resume", "retry", "expire")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=25))
def test_any_order_of_actions_keeps_one_lease_and_one_end(jobs: Jobs, clock: Clock, actions: list[str]) -> None:
    """A model of one job predicts its state; a lease ends with pause, cancel, drain, release and reclaim."""
    clock.now_s += 1.0
    name = f"model-{clock.now_s}"
    job, _ = jobs.add("key-1", name, PATH, "{}", DAY_S)
    status, lease = "queued", None
    for action in actions:
        has_lease = lease is not None and status == "running"
        match action:
            case "claim":
                claimed = jobs.claim("a")
                assert (claimed is not None) == (status == "queued")
                if claimed is not None:
                    status, lease = "running", claimed
            case "finish" | "fail" | "drain" | "release" if lease is not None:
                if action in ("finish", "fail"):
                    end: Status = "succeeded" if action == "finish" else "failed"
                    assert jobs.finish(lease, end) == has_lease
                    status = end if has_lease else status
                else:
                    release = jobs.drain if action == "drain" else jobs.release
                    assert release(lease) == has_lease
                    status = "queued" if has_lease else status
            case "reclaim":
                assert jobs.reclaim(set) == ([name] if status == "running" else [])
                status = "queued" if status == "running" else status
            case "cancel":
                jobs.cancel("key-1", name)
                status = "cancelled" if status in UNFINISHED else status
            case "pause":
                jobs.pause("key-1", name)
                status = "paused" if status in ("queued", "running") else status
            case "resume":
                jobs.resume("key-1", name)
                status = "queued" if status == "paused" else status
            case "retry":
                jobs.retry("key-1", name, DAY_S)
                status = "queued" if status in ("failed", "cancelled", "expired") else status
            case "expire":
                clock.now_s += DAY_S
                jobs.sweep()
                status = "expired" if status in ("queued", "paused") else status
        stored_job = current(jobs, name)
        if stored_job.status == "failed" != status:  # poison: too many attempts
            assert stored_job.error.startswith("poison")
            status = "failed"
        assert (stored_job.status, stored_job.entered[-1][0], stored_job.is_over) == (status, status, status in OVER)
        assert stored_job.attempts >= 0
        assert jobs.positions([job.number]) == ({job.number: 1} if status == "queued" else {})
    jobs.cancel("key-1", name)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_clock_neither_expires_nor_repeats_nor_loses_jobs(
    open_database: OpenDatabase, clock: Clock, jump_s: float
) -> None:
    jobs, other = Jobs(open_database(), clock), Jobs(open_database(), Clock())
    for name in ("one", "two"):
        jobs.add("key-1", name, PATH, "{}", DAY_S)
    first = claim(jobs)
    clock.now_s += jump_s
    jobs.sweep()
    reclaimed = [each.reclaim(lambda: {"a", "b"}) for each in (jobs, other)]
    assert reclaimed == [[], []], "leases belong to processes, not to times"
    second = claim(other, "b")
    assert (first.id, second.id, jobs.claim("a"), other.claim("b")) == ("one", "two", None, None)
    clock.now_s -= jump_s
    jobs.sweep()
    assert jobs.finish(first, "succeeded", (200, b"1"))
    assert other.finish(second, "succeeded", (200, b"2"))
    assert not other.finish(first, "failed")
    assert [(job.id, job.status, job.attempts) for job in (current(jobs), current(jobs, "two"))] == [
        ("one", "succeeded", 1),
        ("two", "succeeded", 1),
    ]
