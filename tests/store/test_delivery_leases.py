"""Tests of deliveries that several servers share, with SQLite and PostgreSQL: lost leases, and failures at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from diffserve.store import Database
from diffserve.store.deliveries import EVENT_S, LEASE_RESERVE_S, UPLOAD_S, Deliveries, Delivery
from diffserve.store.jobs import Jobs
from diffserve.store.webhooks import EVENT_TYPES, WebhookEndpoints
from tests.store.conftest import OpenDatabase

PATH = "/v1/images/generations"
URL = "https://hooks.example.org/"
PUT_URL = "https://bucket.example.org/a"


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claim(deliveries: Deliveries) -> Delivery:
    delivery = deliveries.claim()
    assert delivery is not None
    return delivery


def finish_job(database: Database, clock: Clock, name: str, **output: str) -> None:
    jobs = Jobs(database, clock)
    jobs.add("key-1", name, PATH, "{}", 86400.0, output)
    job = jobs.claim("a")
    assert job is not None
    assert jobs.finish(job, "succeeded", (200, b"{}"))


@pytest.mark.parametrize("is_final", [False, True])
def test_a_server_that_lost_its_lease_does_not_change_the_outcome_of_an_upload(
    open_database: OpenDatabase, clock: Clock, is_final: bool
) -> None:
    database = open_database()
    slow, fast = Deliveries(database, clock), Deliveries(open_database(), clock)
    finish_job(database, clock, "one", put_url=PUT_URL, status="waiting")
    lost_delivery = claim(slow)
    clock.now_s += UPLOAD_S + LEASE_RESERVE_S
    fast.succeed(claim(fast))
    assert not slow.fail(lost_delivery, "the host of put_url did not answer within 300 s.", is_final=is_final)
    job = Jobs(database, clock).get("key-1", "one")
    assert job is not None
    assert job.output == {"put_url": PUT_URL, "status": "delivered", "error": ""}


def test_a_server_that_lost_its_lease_does_not_delay_other_events(open_database: OpenDatabase, clock: Clock) -> None:
    database = open_database()
    slow, fast = Deliveries(database, clock), Deliveries(open_database(), clock)
    endpoint = WebhookEndpoints(database, clock).add("key-1", "all", URL, EVENT_TYPES)
    finish_job(database, clock, "one")
    lost_delivery = claim(slow)
    clock.now_s += EVENT_S + LEASE_RESERVE_S
    fast.succeed(claim(fast))
    finish_job(database, clock, "two")
    assert not slow.fail(lost_delivery, "the endpoint did not answer within 15 s.")
    stored_endpoint = WebhookEndpoints(database, clock).get(endpoint.id)
    assert stored_endpoint is not None
    assert stored_endpoint.last_error == ""
    assert claim(fast).recipient == endpoint.id


def test_failures_of_one_endpoint_on_two_servers_do_not_block_each_other(
    open_database: OpenDatabase, clock: Clock
) -> None:
    databases = [open_database(), open_database()]
    servers = [Deliveries(database, clock) for database in databases]
    WebhookEndpoints(databases[0], clock).add("key-1", "all", URL, EVENT_TYPES)
    for number in range(60):
        finish_job(databases[0], clock, f"job-{number}")
    leased = [claim(servers[number % 2]) for number in range(60)]
    clock.now_s += 1.0  # so that each failure also delays the leased events of the other server

    def fail(server: int) -> int:
        num_repeated = 0
        for delivery in leased[server::2]:
            clock.now_s += 0.01
            num_repeated += servers[server].fail(delivery, "the endpoint answered 500.")
        return num_repeated

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fail, range(2))) == [30, 30]


def test_an_endpoint_can_be_disabled_while_another_server_records_failures(
    open_database: OpenDatabase, clock: Clock
) -> None:
    database = open_database()
    endpoints, deliveries = WebhookEndpoints(database, clock), Deliveries(open_database(), clock)
    for turn in range(10):
        endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
        for number in range(8):
            finish_job(database, clock, f"job-{turn}-{number}")
        leased, barrier = [claim(deliveries) for _ in range(8)], Barrier(2)

        def fail(leased: list[Delivery] = leased, barrier: Barrier = barrier) -> None:
            barrier.wait(60.0)
            for delivery in leased:
                deliveries.fail(delivery, f"the endpoint answered {delivery.number}.")

        def disable(name: str = endpoint.id, barrier: Barrier = barrier) -> None:
            barrier.wait(60.0)
            endpoints.disable(name, "disabled because the endpoint answered 410.")

        with ThreadPoolExecutor(2) as pool:
            for task in [pool.submit(fail), pool.submit(disable)]:
                task.result()
        endpoints.delete(endpoint.id)


def test_a_late_outcome_keeps_the_reason_of_a_disabled_endpoint(database: Database, clock: Clock) -> None:
    endpoints, deliveries = WebhookEndpoints(database, clock), Deliveries(database, clock)
    endpoint = endpoints.add("key-1", "all", URL, EVENT_TYPES)
    finish_job(database, clock, "one")
    lost_delivery = claim(deliveries)
    reason = "disabled because the endpoint answered 410."
    endpoints.disable(endpoint.id, reason)
    deliveries.succeed(lost_delivery)
    assert not deliveries.fail(lost_delivery, "the endpoint answered 500.")
    stored_endpoint = endpoints.get(endpoint.id)
    assert stored_endpoint is not None
    assert (stored_endpoint.disabled, stored_endpoint.last_error) == (reason, reason)
