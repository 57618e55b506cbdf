"""Random sequences of all operations on jobs, compared with a plain model, on SQLite and PostgreSQL."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete

from diffserve.api.errors import InvalidRequest
from diffserve.store import Database
from diffserve.store.database import PageSelection
from diffserve.store.jobs import KEPT_S, MAX_ATTEMPTS, MAX_LOSSES, OVER, Job, JobFilter, Jobs
from diffserve.store.schema import jobs as table

PATH = "/v1/images/generations"
HOUR_S = 3600.0
OWNERS, NAMES, HOLDERS, BODIES = ("key-1", "key-2"), ("one", "two", "three"), ("a", "b", "c"), ("{}", '{"n":2}')
FOLLOWERS = {
    "queued": {"running", "paused", "cancelled", "expired"},
    "running": {"queued", "paused", "succeeded", "failed", "cancelled"},
    "paused": {"queued", "cancelled", "expired"},
    "succeeded": set[str](),
    "failed": {"queued"},
    "cancelled": {"queued"},
    "expired": {"queued"},
}


@dataclass
class ModelJob:
    """Expected state of a job."""

    number: int
    body: str
    expires_s: float
    states: list[str] = field(default_factory=lambda: ["queued"])
    holder: str = ""
    token: int = 0
    attempts: int = 0
    losses: int = 0
    result: bytes | None = None

    @property
    def status(self) -> str:
        return self.states[-1]

    def end_lease(self, status: str) -> None:
        self.states.append(status)
        self.holder = ""


class JobMachine(RuleBasedStateMachine):
    """Operations of three servers and two owners."""

    leases = Bundle("leases")

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.now_s = 1e9
        self.database = database
        self.jobs = Jobs(database, lambda: self.now_s)
        self.model: dict[tuple[str, str], ModelJob] = {}

    def teardown(self) -> None:
        with self.database.writing() as connection:
            connection.execute(delete(table))
        shutil.rmtree(self.jobs.folder, ignore_errors=True)

    def leased(self, lease: Job) -> ModelJob | None:
        """Return the job of ``lease`` if the lease is valid."""
        job = self.model.get((lease.owner, lease.id))
        is_valid = job is not None and (job.number, job.status, job.token) == (lease.number, "running", lease.token)
        return job if is_valid else None

    @rule(
        owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES), body=st.sampled_from(BODIES),
        timeout_s=st.sampled_from((HOUR_S, 24 * HOUR_S)),
    )  # fmt: skip
    def add(self, owner: str, name: str, body: str, timeout_s: float) -> None:
        job = self.model.get((owner, name))
        if job is not None and job.body != body:
            with pytest.raises(InvalidRequest, match="another endpoint or body"):
                self.jobs.add(owner, name, PATH, body, timeout_s)
            return
        added, is_new = self.jobs.add(owner, name, PATH, body, timeout_s)
        assert is_new == (job is None)
        if job is None:
            assert all(added.number > other.number for other in self.model.values())
            self.model[owner, name] = ModelJob(added.number, body, self.now_s + timeout_s)

    @rule(target=leases, holder=st.sampled_from(HOLDERS), is_idle=st.booleans(), is_full=st.booleans())
    def claim(self, holder: str, is_idle: bool, is_full: bool) -> object:
        running = [owner for (owner, _), job in self.model.items() if job.status == "running"]
        waiting = sorted(
            (running.count(key[0]), job.number, key) for key, job in self.model.items() if job.status == "queued"
        )
        claimed = self.jobs.claim(holder, is_idle=is_idle, is_full=is_full)
        job = self.model[waiting[0][2]] if waiting else None
        if job is None or (job.losses and not is_idle) or (is_full and waiting[0][0]):
            assert claimed is None
            return multiple()
        assert claimed is not None
        assert claimed.number == job.number
        job.states.append("running")
        job.holder, job.token, job.attempts = holder, job.token + 1, job.attempts + 1
        return claimed

    @rule(lease=leases, status=st.sampled_from(("succeeded", "failed")), has_result=st.booleans())
    def finish(self, lease: Job, status: str, has_result: bool) -> None:
        job, body = self.leased(lease), f"{lease.number} {lease.token}".encode()
        result = (200, body) if has_result or status == "succeeded" else None
        assert self.jobs.finish(lease, "succeeded" if status == "succeeded" else "failed", result) == (job is not None)
        if job is not None:
            job.end_lease(status)
            job.result = result and result[1]

    @rule(lease=consumes(leases), is_engine_lost=st.sampled_from((True, True, False)))
    def release(self, lease: Job, is_engine_lost: bool) -> None:
        job = self.leased(lease)
        assert self.jobs.release(lease, is_engine_lost=is_engine_lost) == (job is not None)
        if job is not None:
            self.count_release(job, is_engine_lost)

    def count_release(self, job: ModelJob, is_engine_lost: bool = False) -> None:
        job.losses += is_engine_lost
        job.end_lease("failed" if job.losses >= MAX_LOSSES or job.attempts >= MAX_ATTEMPTS else "queued")

    @rule(lease=consumes(leases))
    def drain(self, lease: Job) -> None:
        job = self.leased(lease)
        assert self.jobs.drain(lease) == (job is not None)
        if job is not None:
            job.end_lease("queued")
            job.attempts -= 1

    @rule(alive=st.sets(st.sampled_from(HOLDERS)))
    def reclaim(self, alive: set[str]) -> None:
        orphaned_jobs = {
            key: job for key, job in self.model.items() if job.status == "running" and job.holder not in alive
        }
        assert sorted(self.jobs.reclaim(lambda: alive)) == sorted(name for _, name in orphaned_jobs)
        for job in orphaned_jobs.values():
            self.count_release(job)

    @rule(holder=st.sampled_from(HOLDERS))
    def drain_all(self, holder: str) -> None:
        self.jobs.drain_all(holder)
        for job in self.model.values():
            if job.holder == holder:
                job.end_lease("queued")
                job.attempts -= 1

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def cancel(self, owner: str, name: str) -> None:
        job = self.model.get((owner, name))
        assert (self.jobs.cancel(owner, name) is None) == (job is None)
        if job is not None and job.status not in OVER:
            job.end_lease("cancelled")

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def pause(self, owner: str, name: str) -> None:
        job = self.model.get((owner, name))
        assert (self.jobs.pause(owner, name) is None) == (job is None)
        if job is not None and job.status in ("queued", "running"):
            job.attempts -= job.status == "running"
            job.end_lease("paused")

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def resume(self, owner: str, name: str) -> None:
        job = self.model.get((owner, name))
        assert (self.jobs.resume(owner, name) is None) == (job is None)
        if job is not None and job.status == "paused":
            job.states.append("queued")

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def retry(self, owner: str, name: str) -> None:
        job = self.model.get((owner, name))
        assert (self.jobs.retry(owner, name, HOUR_S) is None) == (job is None)
        if job is not None and job.status in ("failed", "cancelled", "expired"):
            job.states.append("queued")
            job.attempts, job.losses, job.result, job.expires_s = 0, 0, None, self.now_s + HOUR_S

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(NAMES))
    def delete(self, owner: str, name: str) -> None:
        job = self.jobs.get(owner, name)
        if job is not None:
            self.jobs.delete(job)
            if job.is_over:
                del self.model[owner, name]

    @rule(passed_s=st.sampled_from((60.0, HOUR_S, KEPT_S)))
    def sweep(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.jobs.sweep()
        for key, job in tuple(self.model.items()):
            if job.status in ("queued", "paused") and job.expires_s <= self.now_s:
                job.end_lease("expired")
            elif job.status in OVER and job.expires_s < self.now_s - KEPT_S:
                del self.model[key]
        files = {path.name for path in self.jobs.folder.iterdir()} if self.jobs.folder.is_dir() else set()
        results = {f"{job.number}-{job.token}" for job in self.model.values() if job.result is not None}
        assert files == results

    @invariant()
    def rows_equal_the_model(self) -> None:
        for owner in OWNERS:
            page = self.jobs.page(owner, PageSelection(100, order="asc"), JobFilter())
            assert page is not None
            names = [name for key, name in self.model if key == owner]
            assert sorted(job.id for job in page[0]) == sorted(names)
            for job in page[0]:
                expected = self.model[owner, job.id]
                states = [status for status, _ in job.entered]
                assert states == expected.states
                assert all(after in FOLLOWERS[before] for before, after in pairwise(states))
                assert (job.number, job.status, job.holder, job.token, job.attempts, job.losses, job.expires_s) == (
                    expected.number, expected.status, expected.holder, expected.token, expected.attempts,
                    expected.losses, expected.expires_s,
                )  # fmt: skip
                assert (job.result_status > 0) == (expected.result is not None)
                if expected.result is not None:
                    assert self.jobs.result(job) == expected.result


@pytest.mark.slow
def test_jobs_behave_as_the_model_whatever_happens(database: Database) -> None:
    class Machine(JobMachine):
        def __init__(self) -> None:
            super().__init__(database)

    limits = settings(max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=limits)
