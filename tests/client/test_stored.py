"""Tests of files, batches, history and usage through the clients of a real server."""

from __future__ import annotations

import asyncio
import json

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.client import AsyncClient, Client, batch_lines
from tests.service.server import RunningServer, wait_for

pytestmark = pytest.mark.slow


def test_a_batch_produces_images_history_and_usage(server: RunningServer) -> None:
    bodies = [{"prompt": f"hill {seed}", "seed": seed, "size": "64x64", "num_inference_steps": 1} for seed in range(3)]
    with Client(server.url) as client:
        client.forget_all()
        before = sum(day.pictures for day in client.usage())
        file = client.upload(batch_lines(bodies), 'a "name"\n.jsonl')
        assert client.files(limit=1).data == (file,) == (client.file(file.id),)
        batch = client.begin_batch(file.id, metadata={"for": "a test"})
        finished = wait_for(lambda: state if (state := client.batch(batch.id)).is_over else None, 120.0, "the batch")
        assert (finished.status, finished.request_counts.completed, finished.metadata) == (
            "completed",
            3,
            {"for": "a test"},
        )
        assert client.batches(limit=1).data == (finished,)
        assert finished.output_file_id is not None
        lines = [json.loads(line) for line in client.file_content(finished.output_file_id).splitlines()]
        assert sorted(line["custom_id"] for line in lines) == ["0", "1", "2"]
        with pytest.raises(InvalidRequest, match="nothing to cancel"):
            client.cancel_batch(finished.id)
        assert [client.delete_file(file.id), client.delete_file(file.id)] == [True, False]
        assert sum(day.pictures for day in client.usage()) - before == 3
        assert client.usage_by_key() == client.usage(), "without API keys, all usage has one owner"

        images = client.generate("a fox", num_inference_steps=1, idempotency_key="client")
        assert client.generate("a fox", num_inference_steps=1, idempotency_key="client") == images

        async def use_history() -> None:
            async with AsyncClient(server.url) as async_client:
                page = await async_client.history(q="hill", limit=2)
                assert ([len(page.data), page.has_more], len((await async_client.history(q="hill")).data)) == (
                    [2, True],
                    3,
                )
                entry = await async_client.history_entry(page.data[0].id)
                assert await async_client.history_picture(entry.id) == client.history_picture(entry.id)
                assert await async_client.history_thumbnail(entry.id) == client.history_thumbnail(entry.id)
                assert (await async_client.add_favorite(entry.id)).favorite
                assert [each.id for each in (await async_client.history(favorite=True)).data] == [entry.id]
                assert not (await async_client.remove_favorite(entry.id)).favorite
                assert [await async_client.forget(entry.id), await async_client.forget(entry.id)] == [True, False]

                with pytest.raises(InvalidRequest, match="no entry"):
                    await async_client.add_favorite(entry.id)

        asyncio.run(use_history())
        assert client.forget_all() == 3
