"""``POST /v1/images/generations/{id}/interrupt`` ends a request early with its unfinished images."""

from __future__ import annotations

import pytest

from diffserve.client import Client, CompletedImage, Progress
from diffserve.media.images import decode_image, read_infotext
from tests.service.server import SOON_S, RunningServer, wait_for

LONG = 900


def interrupt_after_a_step(client: Client, num_images: int) -> list[CompletedImage]:
    """Request images of many steps, interrupt them once, and return the answer."""
    completed, is_interrupted = [], False
    for event in client.generate_stream("a red fox", num_inference_steps=LONG, seed=1, size="64x64", n=num_images):
        if isinstance(event, Progress) and event.step and not is_interrupted:
            is_interrupted = client.interrupt(event.id)
            assert is_interrupted
        if isinstance(event, CompletedImage):
            completed.append(event)
    return completed


@pytest.mark.slow
def test_interrupted_stream_ends_with_the_unfinished_images(server: RunningServer) -> None:
    with Client(server.url) as client:
        completed = interrupt_after_a_step(client, 2)
        assert len(completed) == 2
        for event in completed:
            assert decode_image(event.file).width_px == 64
            assert "Interrupted after: " in str(read_infotext(event.file))
        assert f"of {LONG} steps; the image is unfinished." in str([event.warnings for event in completed])
        wait_for(lambda: not client.interrupt(completed[0].id), SOON_S, "it to be over")
        assert not client.interrupt("img-unknown")


@pytest.mark.slow
def test_interrupted_request_frees_its_slots(server: RunningServer) -> None:
    with Client(server.url) as client:
        num_finished = server.num_ended("finished")
        [completed] = interrupt_after_a_step(client, 1)
        assert "Interrupted after: " in str(read_infotext(completed.file))
        server.wait_until_idle()
        assert server.num_ended("finished") == num_finished + 1
