"""A refiner and a scorer over HTTP: selected by a field, recorded in the answer, the stream and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.client import Client, CompletedImage, Progress
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from tests.service.server import running_server
from tests.tiny_models import save_clip


@pytest.mark.slow
def test_an_image_is_refined_and_the_best_of_several_is_delivered(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config = "".join(
        f"{name} = {json.dumps(str(value))}\n"
        for name, value in (("refiner", tiny_model("refiner")), ("scorer", save_clip(tmp_path / "clip")))
    )
    config = f'[model]\ndtype = "float32"\n{config}'
    with running_server(tiny_model("sdxl"), tmp_path / "server", config=config) as server:
        server.wait_until_ready()
        with Client(server.url) as client:
            [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
            assert image is not None
            assert image.scorer == "clip"
            plain, refined = (
                client.generate("a cat", seed=1, num_inference_steps=4, sampler="ddim", refiner=refiner)
                for refiner in (False, True)
            )
            assert plain.images[0].file != refined.images[0].file
            assert (plain.refiner, plain.switch_at) == (None, None)
            assert (refined.refiner, refined.switch_at) == (image.refiner, 0.8)
            fields = parse_infotext(read_infotext(refined.images[0].file) or "").fields
            assert (fields["Refiner"], fields["Refiner switch at"]) == (image.refiner, "0.8")
            best = client.generate("a cat", seed=1, num_inference_steps=1, n=2, best_of=3)
            scores = [image.score or 0.0 for image in best.images]
            assert scores == sorted(scores, reverse=True)
            assert len(set(scores)) == 2
            assert best.usage.num_evaluations == 6
            again = client.generate("a cat", seed=best.images[0].seed, num_inference_steps=1)
            assert again.images[0].score is None
            events = list(client.generate_stream("a cat", seed=1, num_inference_steps=1, best_of=3))
            assert {event.image_index for event in events if isinstance(event, Progress)} == {None, 0, 1, 2}
            assert [(event.image_index, event.score) for event in events if isinstance(event, CompletedImage)] == [
                (0, scores[0])
            ]
