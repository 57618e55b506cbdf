"""Delivery runner: sends events to webhook endpoints, and results of jobs to the URLs that their clients gave.

Only hosts of the settings get data, by https and only at public addresses. Several servers with one database share
the deliveries.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from contextlib import suppress
from typing import Final

from diffserve.service.http.errors import log_failure
from diffserve.service.http.outgoing import AT_ONCE, OutgoingClient, OutgoingError
from diffserve.service.stored.background import MAX_RETRY_S, run_to_end
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import FILES, LISTINGS
from diffserve.store.deliveries import EVENT_S, UPLOAD_S, Deliveries, Delivery
from diffserve.store.errors import StoreError
from diffserve.store.jobs import Jobs
from diffserve.store.webhooks import WebhookEndpoint, WebhookEndpoints

LOOK_EVERY_S: Final = 1.0
MAX_ANSWER_BYTES: Final = 1 << 20
GONE: Final = 410
PASSING_ERRORS: Final = (408, 425, 429)
"""Client errors after which an upload is repeated: timeout, too early, too many requests."""

log = logging.getLogger("diffserve.deliveries")


class DeliveryError(Exception):
    """Failure of an attempt; the text is shown to the owner.

    Attributes:
        is_final: Whether further attempts would fail as well.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class DeliveryRunner:
    """Runs ``deliveries``, a few at a time and one of each recipient.

    Args:
        deliveries: The queue.
        endpoints: The webhook endpoints.
        jobs: The jobs whose results are uploaded.
        owners: Events of invalid keys are dropped.
        hooks: Sends events.
        uploads: Uploads results.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        endpoints: WebhookEndpoints,
        jobs: Jobs,
        owners: Owners,
        hooks: OutgoingClient,
        uploads: OutgoingClient,
    ) -> None:
        self._deliveries = deliveries
        self._endpoints = endpoints
        self._jobs = jobs
        self._owners = owners
        self._hooks = hooks
        self._uploads = uploads
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakeup = asyncio.Event()

    async def run_for_ever(self) -> None:
        """Run deliveries when they are due, until cancelled; interrupted ones are repeated later."""
        try:
            while True:
                self._wakeup.clear()
                try:
                    await self._claim()
                except (OSError, StoreError) as error:
                    log_failure(log, "deliveries cannot be read", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wakeup.wait()
        finally:
            running = list(self._tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _claim(self) -> None:
        while len(self._tasks) < AT_ONCE:
            delivery = await run_to_end(self._deliveries.claim, tuple(self._tasks))
            if delivery is None:
                return
            self._tasks[delivery.recipient] = task = asyncio.create_task(self._run(delivery), name="delivery")
            task.add_done_callback(lambda _, recipient=delivery.recipient: self._forget(recipient))  # type: ignore[misc]

    def _forget(self, recipient: str) -> None:
        self._tasks.pop(recipient, None)
        self._wakeup.set()

    async def _run(self, delivery: Delivery) -> None:
        """Make one attempt; after errors of the database, the delivery is repeated when its lease ends."""
        facts = {"webhook_id": delivery.event, "job_number": delivery.job, "attempt": delivery.attempts}
        try:
            try:
                await (self._upload(delivery) if delivery.job else self._send_event(delivery))
            except DeliveryError as error:
                is_repeated = await run_to_end(self._deliveries.fail, delivery, str(error), is_final=error.is_final)
                log.warning("a delivery failed", extra=facts | {"reason": str(error), "is_repeated": is_repeated})
        except asyncio.CancelledError:
            with suppress(OSError, StoreError):
                await run_to_end(self._deliveries.give_back, delivery)
            raise
        except (OSError, StoreError) as error:
            log_failure(log, "a delivery waits", error, **facts)
            await asyncio.sleep(MAX_RETRY_S)
        except Exception:
            log.exception("a delivery failed", extra=facts)

    async def _send_event(self, delivery: Delivery) -> None:
        """Send an event and end its delivery.

        Raises:
            DeliveryError: It was not accepted.
        """
        endpoint = await LISTINGS.run(self._endpoints.get, delivery.recipient)
        if endpoint is None or endpoint.disabled or not await self._owners.is_good(endpoint.owner):
            await run_to_end(self._deliveries.drop, delivery)
            return
        status = await send_event(self._hooks, endpoint, delivery.event, delivery.body.encode())
        if status == GONE:
            reason = f"disabled because the endpoint answered {GONE}; update it to enable it again."
            await run_to_end(self._endpoints.disable, endpoint.id, reason)
        elif 200 <= status < 300:
            await run_to_end(self._deliveries.succeed, delivery)
        else:
            raise DeliveryError(f"the endpoint answered {status}.")

    async def _upload(self, delivery: Delivery) -> None:
        """Upload the result of a job and end its delivery.

        Raises:
            DeliveryError: It was not accepted.
        """
        job = await LISTINGS.run(self._jobs.by_number, delivery.job)
        if job is None:
            await run_to_end(self._deliveries.drop, delivery)
            return
        target = self._uploads.target(job.output["put_url"])
        if target is None:
            raise DeliveryError("the host of put_url is not in [serve] upload_hosts of the server any more.")
        try:
            body = await FILES.run(self._jobs.result, job)
        except FileNotFoundError:
            raise DeliveryError("the result was removed.", is_final=True) from None
        headers = (("Content-Type", "application/json"),)
        try:
            answer = await self._uploads.request(
                target, "PUT", headers, body, limit_s=UPLOAD_S, max_bytes=MAX_ANSWER_BYTES
            )
        except OutgoingError as error:
            raise DeliveryError(f"the host of put_url {error}.") from None
        if not 200 <= answer.status < 300:
            is_final = 400 <= answer.status < 500 and answer.status not in PASSING_ERRORS
            raise DeliveryError(f"the host of put_url answered {answer.status}.", is_final=is_final)
        await run_to_end(self._deliveries.succeed, delivery)


async def send_event(client: OutgoingClient, endpoint: WebhookEndpoint, event: str, body: bytes) -> int:
    """Send an event with its signatures and return the status of the answer.

    Raises:
        DeliveryError: There is no answer.
    """
    target = client.target(endpoint.url)
    if target is None:
        raise DeliveryError("the host is not in [serve] webhook_hosts of the server any more.")
    headers = [("Content-Type", "application/json"), *signature_headers(endpoint, event, body, int(time.time()))]
    try:
        answer = await client.request(target, "POST", headers, body, limit_s=EVENT_S, max_bytes=MAX_ANSWER_BYTES)
    except OutgoingError as error:
        raise DeliveryError(f"the endpoint {error}.") from None
    return answer.status


def signature_headers(endpoint: WebhookEndpoint, event: str, body: bytes, now_s: int) -> list[tuple[str, str]]:
    """Return the headers of the Standard Webhooks specification, with a signature by each valid secret."""
    secrets = [endpoint.secret, *([endpoint.old_secret] if endpoint.old_secret_until_s > now_s else [])]
    signed = f"{event}.{now_s}.".encode() + body
    digests = (hmac.new(secret, signed, hashlib.sha256).digest() for secret in secrets)
    signatures = " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
    return [("webhook-id", event), ("webhook-timestamp", str(now_s)), ("webhook-signature", signatures)]
