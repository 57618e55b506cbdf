"""Decoding on a GPU: a tick does not wait for the image that it starts to decode while there are steps to run."""

from __future__ import annotations

import pytest

from diffserve.api.types import ImageFinished, Progress
from diffserve.runtime.vae.vae import Decoded
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request


def test_steps_go_on_while_pictures_are_decoded_and_the_bytes_are_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [image_request("sd15", "ddim", seed=seed, num_steps=2 + 2 * (seed == 2)) for seed in range(4)]
    at_once = make_engine().generate(requests)
    monkeypatch.setattr(Decoded, "is_here", False)
    engine = make_engine()
    for request in requests:
        engine.submit(request)
    events, pictures = [], {}
    while engine.has_work:
        for event in engine.tick():
            if isinstance(event, ImageFinished):
                pictures[event.request_id] = event.result.picture.data
            if isinstance(event, Progress | ImageFinished):
                events.append((type(event), event.request_id))
            if len(events) == 9:  # of the eight steps of short ones and the third of the long one
                engine.cancel(requests[0].request_id)
    last_step = max(at for at, (kind, _) in enumerate(events) if kind is Progress)
    assert {kind for kind, _ in events[last_step + 1 :]} == {ImageFinished}
    assert [kind for kind, _ in events[: last_step + 1]].count(ImageFinished) == 0
    assert pictures == {result.request_id: result.picture.data for result in at_once if result.request_id in pictures}
    assert set(pictures) == {request.request_id for request in requests[1:]}
