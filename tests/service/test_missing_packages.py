"""A server on a machine that lacks packages which only one feature needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.missing_packages import environment_without
from tests.service.server import error_of, running_server
from tests.service.test_chat import CHAT, says

MISSING = ("llguidance", "openvino", "torchao", "torchmetrics", "matplotlib", "scipy", "gradio", "ray", "mcp", "c2pa")


@pytest.mark.slow
def test_a_server_starts_without_optional_packages(tmp_path: Path) -> None:
    environment = environment_without(MISSING, tmp_path)
    with running_server(Path("embedded"), tmp_path / "server", env=environment) as server:
        server.wait_until_ready()
        assert server.paint(num_steps=1).status_code == 200
        body = {"messages": says("a fox"), "max_tokens": 2}
        assert server.client.post(CHAT, json=body).status_code == 200
        response = server.client.post(CHAT, json=body | {"response_format": {"type": "json_object"}})
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == ("response_format", "unsupported_value")
        assert "pip install llguidance" in error["message"]
