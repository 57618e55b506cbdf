"""Pytest plugin that prints each failure when it is known: pytest prints them at the end, which a run may not reach."""

from __future__ import annotations

import os
from typing import Final

import pytest

MOST_CHARS: Final = 8000


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the end of the traceback; with xdist in the controlling process, which gets the reports of all workers."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n-- {report.when} of {report.nodeid}\n{report.longreprtext[-MOST_CHARS:]}\n", flush=True)
