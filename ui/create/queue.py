"""The queue of the Create tab: requests that wait as jobs on the server, where all pages of a key find them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import Images, StoredJob
from diffserve.client.images import EDITS, GENERATIONS
from diffserve.client.jobs import OVER, UNFINISHED
from ui import captions
from ui.create.layout import CreateTab
from ui.create.painting import FinishedPicture, finished_picture
from ui.create.parameters import CheckedForm, StartFile
from ui.create.view import Screen, Update, gallery, shown_with_facts
from ui.events import MAX_PRESSES, on_report
from ui.server import Server, sentence
from ui.visitors import Visitor, Visitors, ask_for_visitor

PREFIX: Final = "page-"
"""Beginning of the IDs of the page's jobs; a part for the tab and a random one follow."""

NUM_UNFINISHED: Final = 20
NUM_FINISHED: Final = 6
"""Jobs that the queue shows at most."""

RECENT_S: Final = 24 * 3600.0
"""Age up to which the queue shows finished jobs; the images are in the history, too."""

PAGE: Final = 100

log = logging.getLogger("diffserve.page")


class Press(msgspec.Struct):
    """A pressed button of the list."""

    action: str
    job: str = ""


class Queue:
    """Jobs of the page and the events of their list, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors) -> None:
        self._server = server
        self._visitors = visitors

    def connect(self, tab: CreateTab) -> None:
        """Bind the events; call it inside the page's context."""
        queue = tab.showing.queue
        on_report([queue.click, queue.tick], self.act, "diffserve.pressed.queue.splice(0)", list(tab.showing))

    async def add(self, visitor: Visitor, request: CheckedForm, start: StartFile | None) -> bool:
        """Create a job for ``request``; return False if the server stores nothing without keys.

        Raises:
            DiffserveError: The server refuses it, or the image to edit no longer exists.
        """
        body: dict[str, Any] = {"prompt": request.prompt, **request.fields}
        del body["partial_images"]
        if start is not None:
            body |= {"image": await asyncio.to_thread(start.read), "mask": start.mask, "strength": start.strength}
        fields = {name: value for name, value in body.items() if value is not None}
        job_id = f"{_prefix_of(visitor)}{secrets.token_hex(8)}"
        try:
            await self._server.client.put_job(job_id, GENERATIONS if start is None else EDITS, fields)
        except DiffserveError as error:
            if error.code == "keys_needed":
                return False
            raise
        visitor.expect(job_id)
        return True

    async def look(self, request: gr.Request) -> list[Update]:
        """Show the current state of the jobs, and the images of this tab with those of finished jobs.

        The last update of a request that was generated meanwhile may have replaced a newer gallery.
        """
        ask_for_visitor(request)
        visitor = self._visitors.of(request.session_hash)
        values = await self.shown(visitor)
        return Screen().draw(**values | {"gallery": gallery(visitor)})

    async def act(self, presses: Any, request: gr.Request) -> list[Update]:
        """Run the actions of the buttons that were pressed since the last request, and show the list."""
        visitor = self._visitors.of(request.session_hash)
        ask_for_visitor(request)
        values: dict[str, Update] = {}
        for press in _presses_in(presses):
            try:
                values = await self._run(visitor, press.action, press.job)
            except (DiffserveError, OSError) as error:
                is_removed = getattr(error, "code", "") == "job_not_found"
                text = "This request is no longer in the queue." if is_removed else sentence(error)
                values = {"caption": captions.status(text, is_error=True)}
        return Screen().draw(**await self.shown(visitor) | values)

    async def _run(self, visitor: Visitor, action: str, job_id: str) -> dict[str, Update]:
        """Run an action on one job or all, and return the values of the page that change."""
        client = self._server.client
        if action == "clear":
            await self._cancel_all()
        elif action == "clear-finished":
            await self._delete_finished()
        elif not job_id:
            return {}
        elif action == "cancel":
            await self._cancel(job_id)
        elif action == "resume":
            await client.resume_job(job_id)
        elif action == "retry":
            await client.retry_job(job_id)
            visitor.expect(job_id)
        elif action == "show":
            pictures = [picture for picture in visitor.pictures if picture.job == job_id and picture.path.is_file()]
            if not pictures:
                pictures = await self._pictures_of(await client.job(job_id))
                visitor.receive(pictures)
            return shown_with_facts(visitor, sorted(pictures, key=lambda picture: picture.number))
        return {}

    async def shown(self, visitor: Visitor) -> dict[str, Update]:
        """Return the list of jobs, and the newly finished images of this tab if no other request is shown."""
        old_trouble = visitor.trouble
        try:
            page = await self._server.client.jobs(prefix=PREFIX, status=UNFINISHED, order="asc", limit=NUM_UNFINISHED)
            pictures = await self._take_finished(visitor, page.data)
            finished = await self._server.client.jobs(prefix=PREFIX, status=OVER, limit=NUM_FINISHED)
        except (DiffserveError, OSError) as error:
            if getattr(error, "code", "") != "keys_needed":
                log.warning("the queue cannot be shown: %s", sentence(error))
            return {}
        recent = [job for job in finished.data if time.time() - (job.finished_at or 0) < RECENT_S]
        jobs = {job.id: job for job in (*page.data, *recent)}
        values: dict[str, Update] = {"queue": captions.queue_list(list(jobs.values()), has_more=page.has_more)}
        if visitor.trouble not in (None, old_trouble):
            values["caption"] = captions.status(visitor.trouble or "", is_error=True)
        elif pictures and not visitor.is_busy:
            values |= shown_with_facts(visitor, pictures)
        return values

    async def _take_finished(self, visitor: Visitor, unfinished: Sequence[StoredJob]) -> list[FinishedPicture]:
        """Add the images of this tab's finished jobs to its gallery, and return those of the last one."""
        open_ids = [job.id for job in unfinished]
        for job_id in open_ids:
            if job_id.startswith(_prefix_of(visitor)):
                visitor.expect(job_id)  # after a restart of the server
        latest: list[FinishedPicture] = []
        for job_id in [job_id for job_id in visitor.expected if job_id not in open_ids]:
            try:
                job = await self._server.client.job(job_id)
            except InvalidRequest:  # deleted
                visitor.forget(job_id)
                continue
            if not job.is_over or not visitor.forget(job_id):
                continue
            if job.status == "succeeded":
                latest = await self._pictures_of(job)
                visitor.receive(latest)
            elif job.error is not None:
                visitor.trouble = sentence(DiffserveError(job.error.message))
        return latest

    async def _pictures_of(self, job: StoredJob) -> list[FinishedPicture]:
        """Download and store the images of a finished job.

        Raises:
            DiffserveError: It has none, or the server does not answer.
            OSError: A file cannot be written.
        """
        images = msgspec.json.decode(await self._server.client.job_result(job.id), type=Images)
        return [
            await finished_picture(
                self._server, event, job.prompt or "", rewrites=event.revised_prompt is not None, job=job.id
            )
            for event in images.completed
        ]

    async def _cancel(self, job_id: str) -> None:
        """Cancel a job and remove it; one that has just finished stays."""
        try:
            await self._server.client.cancel_job(job_id)
        except InvalidRequest as error:
            if error.code not in ("job_over", "job_not_found"):
                raise
            return
        await self._server.client.delete_job(job_id)

    async def _cancel_all(self) -> None:
        page = await self._server.client.jobs(prefix=PREFIX, status=UNFINISHED, limit=PAGE)
        while page.data:
            for job in page.data:
                await self._cancel(job.id)
            page = await self._server.client.jobs(prefix=PREFIX, status=UNFINISHED, limit=PAGE)

    async def _delete_finished(self) -> None:
        page = await self._server.client.jobs(prefix=PREFIX, status=OVER, limit=PAGE)
        while page.data:
            for job in page.data:
                await self._server.client.delete_job(job.id)
            page = await self._server.client.jobs(prefix=PREFIX, status=OVER, limit=PAGE)


def _presses_in(presses: object) -> list[Press]:
    """Return what the browser reports as pressed; none if it is malformed, because only our page sends it."""
    try:
        return msgspec.convert(presses, list[Press])[:MAX_PRESSES]
    except msgspec.ValidationError:
        return []


def _prefix_of(visitor: Visitor) -> str:
    """Return the beginning of the IDs of the jobs that the visitor's tab created."""
    return f"{PREFIX}{visitor.name}-"
