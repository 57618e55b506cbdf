"""Two models behind one server: selected by name, loaded on demand, and restored after the engine was lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffserve.client import Client
from tests.service.server import SOON_S, error_of, files_of, running_server, wait_for

pytestmark = pytest.mark.slow


def test_a_server_generates_with_the_requested_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    config = (
        f'[model]\ndtype = "float32"\n[engine]\nmax_rows = 4\nkv_pool_bytes = "auto"\n'
        f'[models]\nother = "{tiny_model("sd2")}"\nbroken = "{broken}"\n'
    )
    with running_server(tiny_model("sd15"), tmp_path, config=config) as server, Client(server.url) as client:
        server.wait_until_ready()
        states = {model.id: (model.loaded, model.problem) for model in client.models() if model.loaded is not None}
        assert {name: is_loaded for name, (is_loaded, _) in states.items()} == {
            "sd15": True, "other": False, "broken": False,
        }  # fmt: skip
        assert "broken is not a safetensors file" in states["broken"][1]
        capabilities = client.model("other").capabilities
        assert capabilities is not None
        assert capabilities.image is not None
        assert (capabilities.image.family, capabilities.image.default_spacing) == ("sd2", "trailing")

        names = ["sd15", "other", None, "other", "sd15", "other"]
        with ThreadPoolExecutor(len(names)) as pool:
            answers = [
                {"size": "64x64", "seed": seed} | ({"model": name} if name else {}) for seed, name in enumerate(names)
            ]
            together = [pool.submit(server.paint, **fields) for fields in answers]  # type: ignore[arg-type]
            assert server.status("/readyz") == 200, "while the other one is loaded"
            files = [files_of(painting.result()) for painting in together]
        assert len({file for (file,) in files}) == len(names)
        assert client.model("other").loaded
        assert [painting.result().json()["model"] for painting in together[:3]] == ["sd15", "other", "sd15"]
        assert files == [files_of(server.paint(**fields)) for fields in answers]  # type: ignore[arg-type]
        painted = re.findall(
            r'^diffserve_images_total\{model="(\w+)",outcome="painted"\} (\S+)$',
            server.client.get("/metrics").text,
            re.M,
        )
        assert {name: float(number) for name, number in painted} == {"sd15": 7.0, "other": 6.0, "broken": 0.0}

        for name, status in (("nobody", 404), ("../other", 404), (str(broken), 404), ("broken", 500)):
            answer = server.paint(model=name)
            assert (answer.status_code, error_of(answer)["param"]) == (status, "model"), name
            assert str(tmp_path) not in answer.text.replace(str(broken), "")

        server.engine.kill()
        wait_for(lambda: server.status("/readyz") == 503, SOON_S, "the loss")
        server.wait_until_ready()
        assert client.model("other").loaded is False
        assert files_of(server.paint(**answers[1])) == files[1]  # type: ignore[arg-type]
