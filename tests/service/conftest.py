"""Clients of the ``openai`` package for the shared servers of ``tests/conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.service.server import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    """Return an ``openai`` client of the shared server."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def text_client(text_server: RunningServer) -> Iterator[OpenAI]:
    """Return an ``openai`` client of the shared server with a language model."""
    with OpenAI(base_url=f"{text_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client
