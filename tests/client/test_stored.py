"""Files, batches, history and usage by our own clients, of a real server."""

from __future__ import annotations

import asyncio
import json

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.client import AsyncClient, Client, batch_lines
from tests.service.server import RunningServer, wait_for

pytestmark = pytest.mark.slow


def test_a_batch_from_its_lines_to_its_pictures_history_and_usage(server: RunningServer) -> None:
    bodies = [{"prompt": f"hill {seed}", "seed": seed, "size": "64x64", "num_inference_steps": 1} for seed in range(3)]
    with Client(server.url) as client:
        client.forget_all()
        before = sum(day.pictures for day in client.usage())
        file = client.upload(batch_lines(bodies), 'a "name"\n.jsonl')
        assert client.files(limit=1).data == (file,) == (client.file(file.id),)
        begun = client.begin_batch(file.id, metadata={"for": "a test"})
        over = wait_for(
            lambda: next((one for one in [client.batch(begun.id)] if one.is_over), None), 120.0, "the batch"
        )
        assert (over.status, over.request_counts.completed, over.metadata) == ("completed", 3, {"for": "a test"})
        assert client.batches(limit=1).data == (over,)
        assert over.output_file_id is not None
        lines = [json.loads(line) for line in client.file_content(over.output_file_id).splitlines()]
        assert sorted(line["custom_id"] for line in lines) == ["0", "1", "2"]
        with pytest.raises(InvalidRequest, match="nothing to cancel"):
            client.cancel_batch(over.id)
        assert [client.delete_file(file.id), client.delete_file(file.id)] == [True, False]
        assert sum(day.pictures for day in client.usage()) - before == 3
        assert client.usage_by_key() == client.usage(), "without keys, all is nobody's"

        once = client.generate("a fox", num_inference_steps=1, idempotency_key="client")
        assert client.generate("a fox", num_inference_steps=1, idempotency_key="client") == once

        async def look() -> None:
            async with AsyncClient(server.url) as other:
                page = await other.history(q="hill", limit=2)
                assert ([len(page.data), page.has_more], len((await other.history(q="hill")).data)) == ([2, True], 3)
                entry = await other.history_entry(page.data[0].id)
                assert await other.history_picture(entry.id) == client.history_picture(entry.id)
                assert await other.history_thumbnail(entry.id) == client.history_thumbnail(entry.id)
                assert [await other.forget(entry.id), await other.forget(entry.id)] == [True, False]

        asyncio.run(look())
        assert client.forget_all() == 3
