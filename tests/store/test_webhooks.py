"""Tests of webhook endpoints and deliveries, with SQLite and PostgreSQL: no event is lost, leases, retries, limits."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from sqlalchemy import func, select

from diffserve.api.errors import InvalidRequest
from diffserve.store import Database, webhooks
from diffserve.store.batch_input import LineProblem
from diffserve.store.batches import Batches
from diffserve.store.database import PageSelection
from diffserve.store.deliveries import (
    DELAYS_S,
    EVENT_S,
    LEASE_RESERVE_S,
    MAX_AT_ONCE,
    MAX_JITTER,
    PAUSE_S,
    UPLOAD_S,
    Deliveries,
    Delivery,
)
from diffserve.store.files import Files
from diffserve.store.jobs import Jobs
from diffserve.store.schema import deliveries as table
from diffserve.store.webhooks import EVENT_TYPES, MAX_ENDPOINTS, OLD_SECRET_S, WebhookEndpoint, WebhookEndpoints
from tests.store.conftest import OpenDatabase

PATH = "/v1/images/generations"
URL = "https://hooks.example.org/"
DAY_S = 86400.0


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def endpoints(database: Database, clock: Clock) -> WebhookEndpoints:
    return WebhookEndpoints(database, clock)


@pytest.fixture
def deliveries(database: Database, clock: Clock) -> Deliveries:
    return Deliveries(database, clock)


@pytest.fixture
def jobs(database: Database, clock: Clock) -> Jobs:
    return Jobs(database, clock)


def claim(deliveries: Deliveries) -> Delivery:
    delivery = deliveries.claim()
    assert delivery is not None
    return delivery


def event_of(delivery: Delivery) -> tuple[str, str]:
    """Return the type of an event and the ID of its object."""
    event = msgspec.json.decode(delivery.body)
    assert (event["id"], event["object"]) == (delivery.event, "event")
    return event["type"], event["data"]["id"]


def current(endpoints: WebhookEndpoints, endpoint: WebhookEndpoint) -> WebhookEndpoint:
    row = endpoints.get(endpoint.id)
    assert row is not None
    return row


def finish_job(jobs: Jobs, name: str = "one", owner: str = "key-1", **output: str) -> None:
    jobs.add(owner, name, PATH, "{}", DAY_S, output)
    job = jobs.claim("a")
    assert job is not None
    assert jobs.finish(job, "succeeded", (200, b"{}"))


def test_many_endpoints_of_one_owner_leave_places_for_others(
    endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, clock: Clock
) -> None:
    for number in range(MAX_AT_ONCE + 2):
        endpoints.add("key-1", f"slow {number}", URL, EVENT_TYPES)
    finish_job(jobs)
    clock.now_s += 1.0
    other = endpoints.add("key-2", "other", URL, EVENT_TYPES)
    finish_job(jobs, owner="key-2")
    busy = [claim(deliveries).recipient for _ in range(MAX_AT_ONCE - 1)]
    last = deliveries.claim(busy)
    assert last is not None
    assert last.recipient not in (*busy, other.id), "the oldest first, up to the limit of the owner"
    delivery = deliveries.claim([*busy, last.recipient])
    assert delivery is not None
    assert delivery.recipient == other.id
    assert deliveries.claim([*busy, last.recipient, other.id]) is None
    assert deliveries.claim(busy) is not None


def test_every_end_of_a_job_is_an_event_of_its_owner(
    endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, clock: Clock
) -> None:
    endpoints.add("key-1", "all", URL, EVENT_TYPES)
    endpoints.add("key-2", "other key", URL, EVENT_TYPES)
    endpoints.add("key-1", "batches only", URL, ["batch.failed"])
    finish_job(jobs, "good")
    jobs.add("key-1", "bad", PATH, "{}", DAY_S)
    leased = jobs.claim("a")
    assert leased is not None
    jobs.drain(leased)
    leased = jobs.claim("a")
    assert leased is not None
    jobs.finish(leased, "failed", None, "a: b")
    assert not jobs.finish(leased, "succeeded", (200, b"{}"))
    jobs.add("key-1", "unwanted", PATH, "{}", DAY_S)
    jobs.cancel("key-1", "unwanted")
    jobs.cancel("key-1", "unwanted")
    jobs.add("key-1", "late", PATH, "{}", 60.0)
    clock.now_s += 61.0
    jobs.sweep()
    received = []
    while (delivery := deliveries.claim()) is not None:
        received.append(event_of(delivery))
    assert received == [
        ("job.succeeded", "good"), ("job.failed", "bad"), ("job.cancelled", "unwanted"), ("job.expired", "late"),
    ]  # fmt: skip


def test_every_end_of_a_batch_is_an_event(
    database: Database, endpoints: WebhookEndpoints, deliveries: Deliveries, clock: Clock
) -> None:
    batches = Batches(database, Files(database, 100), clock)
    endpoints.add("key-1", "all", URL, EVENT_TYPES)
    expected = []
    for status in ("completed", "expired", "cancelled", "failed"):
        batch = batches.add("key-1", PATH, "file-1", 1, {})
        batches.move(batch.id, "in_progress", of=("validating",))
        batches.finish(batch.id, status)
        batches.finish(batch.id, status)
        expected.append((f"batch.{status}", batch.id))
    failed = batches.add("key-1", PATH, "file-1", 1, {}, [LineProblem("a", "b")])
    expected.append(("batch.failed", failed.id))
    assert [event_of(claim(deliveries)) for _ in expected] == expected
    assert deliveries.claim() is None


def test_an_event_survives_a_crash_before_and_during_its_delivery(open_database: OpenDatabase, clock: Clock) -> None:
    first = open_database()
    WebhookEndpoints(first, clock).add("key-1", "all", URL, EVENT_TYPES)
    finish_job(Jobs(first, clock))
    first.close()
    second = Deliveries(open_database(), clock)
    leased = claim(second)
    third = Deliveries(open_database(), clock)
    assert third.claim() is None, "another process delivers it"
    clock.now_s += EVENT_S + LEASE_RESERVE_S
    repeated = claim(third)
    assert (repeated.event, repeated.body, repeated.attempts) == (leased.event, leased.body, 2)
    second.succeed(leased)
    clock.now_s += EVENT_S + LEASE_RESERVE_S
    assert claim(third).attempts == 3, "a process that lost its lease does not end the delivery"


def test_a_rolled_back_change_has_no_event(
    database: Database, endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints.add("key-1", "all", URL, EVENT_TYPES)
    jobs.add("key-1", "one", PATH, "{}", DAY_S)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("diffserve.store.jobs.add_event", fail)
    with pytest.raises(OSError, match="full"):
        jobs.cancel("key-1", "one")
    job = jobs.get("key-1", "one")
    assert job is not None
    assert (job.status, deliveries.claim()) == ("queued", None)


def test_attempts_are_repeated_for_three_days(
    endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, clock: Clock
) -> None:
    endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
    finish_job(jobs)
    began_s = clock.now_s
    for delay_s in DELAYS_S:
        assert deliveries.fail(claim(deliveries), "the endpoint answered 500.")
        clock.now_s += delay_s - 0.01
        assert deliveries.claim() is None
        clock.now_s += MAX_JITTER * delay_s + 0.02
    assert 2.9 < (clock.now_s - began_s) / DAY_S < 3.6
    assert current(endpoints, endpoint).last_error == "the endpoint answered 500."
    assert not deliveries.fail(claim(deliveries), "the endpoint answered 502.")
    clock.now_s += 10 * DAY_S
    assert deliveries.claim() is None
    assert current(endpoints, endpoint).last_error == "the endpoint answered 502."
    finish_job(jobs, "two")
    deliveries.succeed(claim(deliveries))
    assert current(endpoints, endpoint).last_error == ""


def test_a_failing_endpoint_delays_its_own_events_only(
    endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, clock: Clock
) -> None:
    dead = endpoints.add("key-1", "dead", URL, EVENT_TYPES)
    for number in range(20):
        finish_job(jobs, f"job-{number}")
    good = endpoints.add("key-2", "good", URL, EVENT_TYPES)
    finish_job(jobs, owner="key-2")
    first = claim(deliveries)
    assert first.recipient == dead.id
    other = deliveries.claim(busy=(first.recipient,))
    assert other is not None
    assert other.recipient == good.id
    deliveries.fail(first, "the endpoint cannot be reached.")
    clock.now_s += 6.0
    assert claim(deliveries).event == first.event, "only the repeated event is due"
    assert deliveries.claim() is None
    clock.now_s += PAUSE_S
    assert len({claim(deliveries).event for _ in range(19)} - {first.event, other.event}) == 19


def test_interrupted_and_dropped_deliveries(
    endpoints: WebhookEndpoints, deliveries: Deliveries, jobs: Jobs, clock: Clock
) -> None:
    endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
    finish_job(jobs, "one")
    deliveries.give_back(claim(deliveries))
    again = claim(deliveries)
    assert again.attempts == 1
    deliveries.drop(again)
    finish_job(jobs, "two")
    endpoints.disable(endpoint.id, "disabled because the endpoint answered 410.")
    finish_job(jobs, "three")
    assert deliveries.claim() is None
    assert current(endpoints, endpoint).disabled
    enabled = endpoints.update(endpoint.id, name="new name")
    assert enabled is not None
    assert (enabled.disabled, enabled.name, enabled.url) == ("", "new name", URL)
    finish_job(jobs, "four")
    assert event_of(claim(deliveries)) == ("job.succeeded", "four")
    finish_job(jobs, "five")
    endpoints.delete(endpoint.id)
    clock.now_s += DAY_S
    assert (deliveries.claim(), endpoints.get(endpoint.id), endpoints.update(endpoint.id, name="x")) == (None,) * 3


def test_endpoints_and_waiting_events_are_limited(
    database: Database, endpoints: WebhookEndpoints, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
    monkeypatch.setattr(webhooks, "MAX_PENDING", 3)
    for number in range(5):
        finish_job(jobs, f"job-{number}")
    with database.reading() as connection:
        assert connection.execute(select(func.count()).select_from(table)).scalar_one() == 3
    assert current(endpoints, endpoint).last_error.startswith("3 events wait")
    for number in range(1, MAX_ENDPOINTS):
        endpoints.add("key-1", str(number), URL, ["job.failed"])
    with pytest.raises(InvalidRequest, match="delete one"):
        endpoints.add("key-1", "too many", URL, ["job.failed"])
    page = endpoints.page("key-1", PageSelection(5))
    assert page is not None
    assert ([entry.name for entry in page[0]], page[1]) == (["19", "18", "17", "16", "15"], True)
    assert endpoints.page("key-2", PageSelection(5)) == ([], False)


def test_a_replaced_secret_may_stay_valid_for_a_day(endpoints: WebhookEndpoints, clock: Clock) -> None:
    endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
    with_old_secret = endpoints.rotate_secret(endpoint.id, keeps_old=True)
    assert with_old_secret is not None
    assert (with_old_secret.old_secret, with_old_secret.old_secret_until_s) == (
        endpoint.secret,
        clock.now_s + OLD_SECRET_S,
    )
    replaced = endpoints.rotate_secret(endpoint.id, keeps_old=False)
    assert replaced is not None
    assert replaced.old_secret == b""
    assert len({endpoint.secret, with_old_secret.secret, replaced.secret}) == 3
    assert endpoints.rotate_secret("we_none", keeps_old=False) is None


def test_the_outcome_of_an_upload_is_in_its_job(deliveries: Deliveries, jobs: Jobs, clock: Clock) -> None:
    output = {"put_url": "https://bucket.example.org/a?signature=x", "status": "waiting"}

    def upload_of(name: str) -> dict[str, str]:
        job = jobs.get("key-1", name)
        assert job is not None
        return job.output

    jobs.add("key-1", "bad", PATH, "{}", DAY_S, output)
    leased = jobs.claim("a")
    assert leased is not None
    jobs.finish(leased, "failed", (400, b"{}"), "a: b")
    assert deliveries.claim() is None, "only successful results are uploaded"
    finish_job(jobs, "good", **output)
    delivery = claim(deliveries)
    job = jobs.by_number(delivery.job)
    assert job is not None
    assert (job.id, delivery.event, delivery.body) == ("good", "", "")
    deliveries.fail(delivery, "the host of put_url answered 503.")
    assert upload_of("good") == output | {"error": "the host of put_url answered 503."}
    clock.now_s += DAY_S
    deliveries.succeed(claim(deliveries))
    assert upload_of("good") == output | {"status": "delivered", "error": ""}
    finish_job(jobs, "refused", **output)
    assert not deliveries.fail(claim(deliveries), "the host of put_url answered 403.", is_final=True)
    assert (upload_of("refused")["status"], deliveries.claim()) == ("failed", None)


@pytest.mark.parametrize("is_final", [False, True])
def test_a_server_that_lost_its_lease_does_not_change_the_outcome(
    open_database: OpenDatabase, clock: Clock, is_final: bool
) -> None:
    database = open_database()
    slow, fast, jobs = Deliveries(database, clock), Deliveries(open_database(), clock), Jobs(database, clock)
    finish_job(jobs, put_url="https://bucket.example.org/a", status="waiting")
    lost_delivery = claim(slow)
    clock.now_s += UPLOAD_S + LEASE_RESERVE_S
    repeated = claim(fast)
    slow.fail(lost_delivery, "the host of put_url answered 403.", is_final=is_final)
    fast.succeed(repeated)
    job = jobs.get("key-1", "one")
    assert job is not None
    assert (job.output["status"], job.output["error"], fast.claim()) == ("delivered", "", None)
    slow.fail(lost_delivery, "the host of put_url answered 403.", is_final=is_final)
    assert jobs.get("key-1", "one") == job


def test_two_servers_record_failures_of_one_endpoint(open_database: OpenDatabase) -> None:
    databases = [open_database() for _ in range(2)]
    servers = [Deliveries(database) for database in databases]
    endpoint = WebhookEndpoints(databases[0]).add("key-1", "dead", URL, EVENT_TYPES)
    for number in range(40):
        finish_job(Jobs(databases[0]), f"job-{number}")
    leased = [[claim(server) for _ in range(10)] for server in servers]

    def fail(server: int) -> list[bool]:
        return [servers[server].fail(delivery, "the endpoint answered 500.") for delivery in leased[server]]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fail, range(2))) == [[True] * 10] * 2
    assert (servers[0].claim(), current(WebhookEndpoints(databases[1]), endpoint).last_error) == (
        None, "the endpoint answered 500.",
    )  # fmt: skip


def test_two_servers_deliver_every_event_once(open_database: OpenDatabase) -> None:
    databases = [open_database() for _ in range(2)]
    WebhookEndpoints(databases[0]).add("key-1", "all", URL, EVENT_TYPES)
    for number in range(40):
        finish_job(Jobs(databases[0]), f"job-{number}")
    servers = [Deliveries(database) for database in databases]

    def deliver(worker: int) -> list[str]:
        done, claims = [], servers[worker % 2]
        while (delivery := claims.claim()) is not None:
            claims.succeed(delivery)
            done.append(delivery.event)
        return done

    with ThreadPoolExecutor(4) as pool:
        counts = Counter(event for done in pool.map(deliver, range(4)) for event in done)
    assert (len(counts), set(counts.values())) == (40, {1})
