"""The OpenAPI document, checked by schemathesis against a live server.

Neither valid nor invalid requests may cause a server error or an undocumented answer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.server import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "6"))
PATIENCE_S = 3.0
CHECKS: Any = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def cancel_experiments(server: RunningServer) -> None:
    """Cancel the experiments that the cases have created, so that the engine becomes idle."""
    for experiment in server.client.get("/v1/experiments", params={"limit": 100}).json()["data"]:
        server.client.post(f"/v1/experiments/{experiment['id']}/cancel")


@pytest.mark.parametrize("is_good", [True, False], ids=["allowed", "not-allowed"])
def test_no_request_causes_a_server_error(text_server: RunningServer, is_good: bool) -> None:
    """Run ``TEST_EXAMPLES`` cases per operation; images that take longer than ``PATIENCE_S`` are abandoned."""
    schema: Any = schemathesis.openapi.from_url(f"{text_server.url}/openapi.json")
    mode = schemathesis.GenerationMode.POSITIVE if is_good else schemathesis.GenerationMode.NEGATIVE
    num_answered = 0
    for operation in schema.get_all_operations():
        operation_result = operation.ok()

        @settings(
            max_examples=NUM_EXAMPLES,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation_result.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            nonlocal num_answered
            try:
                answer = case.call(base_url=text_server.url, timeout=PATIENCE_S)
            except requests.RequestException:
                return
            num_answered += 1
            case.validate_response(answer, checks=CHECKS)

        with suppress(Unsatisfiable):  # no invalid request exists for this operation
            ask()
    cancel_experiments(text_server)
    assert num_answered > 50
