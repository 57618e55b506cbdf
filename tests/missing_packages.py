"""Pytest plugin that skips tests, modules and folders which need a package that is not installed.

A machine with a GPU has few packages, and its tests of the engine must run there all the same. On CI, where every
package is installed, a missing one stays an error.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
OURS: Final = ("", "benchmarks", "diffserve", "schedulers", "tests", "ui")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module or a folder that imports a missing package."""
    report = yield
    call: pytest.CallInfo[None] | None = vars(report).get("call")  # absent if `--last-failed` made the report
    if call and _skip(report, call, collector.path):
        del vars(report)["call"]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails since a package is missing."""
    report = yield
    _skip(report, call, item.path)
    return report


def _skip(report: pytest.CollectReport | pytest.TestReport, call: pytest.CallInfo[None], path: Path) -> bool:
    """Turn the failure in ``report`` into a skip if a missing package caused it, and return whether it did."""
    package = missing_package(call.excinfo.value) if report.failed and call.excinfo else ""
    if not package or "CI" in os.environ:
        return False
    report.outcome = "skipped"
    report.longrepr = (str(path), 0, f"Skipped: the package {package} is not installed")
    return True


def missing_package(error: BaseException | None) -> str:
    """Return the package that an import lacked, if that caused ``error``; otherwise an empty string."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    package = "" if error is None or error.name is None else error.name.partition(".")[0]
    return "" if package in OURS or (package and importlib.util.find_spec(package)) else package


def environment_without(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """Return environment variables for Python processes in which ``packages`` cannot be imported.

    Args:
        packages: Names of top-level packages.
        folder: An existing folder, which gets a ``sitecustomize.py``.
    """
    lines = ("import sys", *(f"sys.modules[{name!r}] = None" for name in packages), "")
    (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
    paths = (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
