"""Tests of the table of jobs, with SQLite and PostgreSQL: leases, fencing, exactly one end, expiry and deletion."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.store import Database
from diffserve.store.database import PageSelection
from diffserve.store.jobs import KEPT_S, LOCK_CREATED_S, MAX_ATTEMPTS, Job, JobFilter, Jobs
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
    assert jobs.reclaim({"alive"}) == ["one"]
    leased = claim(jobs, "alive")
    assert not jobs.finish(stale, "succeeded", (200, b"stale"))
    assert not jobs.release(stale)
    assert jobs.reclaim({"alive"}) == []
    assert jobs.finish(leased, "succeeded", (200, b"good"))
    assert not jobs.finish(leased, "failed", None, "x: y")
    assert jobs.result(current(jobs)) == b"good"


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
        jobs.reclaim({"alive"})
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
    jobs.reclaim({"alive"})
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


def test_expiry_deletion_and_pages(jobs: Jobs, clock: Clock) -> None:
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
    failed = current(jobs, "job-0")
    jobs.delete(failed)
    assert (jobs.get("key-1", "job-0"), list(jobs.folder.iterdir())) == (None, [])
    jobs.delete(current(jobs, "job-1"))
    assert current(jobs, "job-1").status == "queued", "only finished jobs are deleted"
    clock.now_s += KEPT_S
    jobs.sweep()
    assert jobs.get("key-1", "job-3") is None
    assert current(jobs, "job-1").status == "expired"


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


def test_owners_take_turns(jobs: Jobs) -> None:
    for number in range(32):
        jobs.add("key-1", f"many-{number}", PATH, "{}", DAY_S)
    first = claim(jobs)
    jobs.add("key-2", "late", PATH, "{}", DAY_S)
    assert [first.id, claim(jobs).id, claim(jobs).id] == ["many-0", "late", "many-1"]
