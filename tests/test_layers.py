"""Import rules: imports point to lower layers without cycles, and each library is used in one package only.

schedulers   0   numerics, numpy only (torch in the update kernel)
mortar       1   types, errors, config and other shared code; no torch; client/ imports only errors
runtime      2   tensors and memory; world/ has the same level: scenes, captions and their recognition
rewriting    3   rules for rewritten prompts
engine       4   scheduling
service      5   HTTP; no runtime, no torch; experiments/ has the same level, with torch in its metrics/ alone
training     6   the recipe of the shipped models
cluster      6   the service over replicas and distributed work; the only package that imports Ray
cli, ui      6   entry points
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MORTAR = ("api", "settings", "media", "models", "processes", "faults", "disk_cache", "logs", "version")
"""Shared packages and modules, which import neither torch nor what is built on them."""

FLOORS = {
    "schedulers": 0,
    **{f"diffserve.{name}": 1 for name in MORTAR},
    "diffserve.client": 1,
    "diffserve.store": 1,
    "diffserve.runtime": 2,
    "diffserve.world": 2,
    "diffserve.rewriting": 3,
    "diffserve.engine": 4,
    "diffserve.service": 5,
    "diffserve.experiments": 5,
    "diffserve.cluster": 6,
    "diffserve.training": 6,
    "diffserve.cli": 6,
    "diffserve.__main__": 6,
    "ui": 6,
}
FACADE = "diffserve"
"""The package itself: it looks names up on first use, so it may import any package, and any package may import it."""

OUTSIDE = ("benchmarks", "tests")
HEAVY = ("diffserve.runtime", "diffserve.training", *OUTSIDE)
ONLY_IN = {
    "torch": (
        "schedulers.update",
        "diffserve.runtime",
        "diffserve.engine",
        "diffserve.training",
        "diffserve.experiments.metrics",
        "diffserve.experiments.search",
        *OUTSIDE,
    ),
    "torchmetrics": ("diffserve.experiments.metrics", "tests"),
    "matplotlib": ("diffserve.experiments.plots", "diffserve.experiments.chart_drawing", *OUTSIDE),
    "diffusers": HEAVY,
    "transformers": HEAVY,
    "torchao": HEAVY,
    "fastapi": ("diffserve.service", "tests"),
    "starlette": ("diffserve.service", "tests"),
    "uvicorn": ("diffserve.service", "tests"),
    "httpx": ("diffserve.client", *OUTSIDE),
    "typer": ("diffserve.cli", "diffserve.training", *OUTSIDE),
    "rich": ("diffserve.cli", "diffserve.training", "benchmarks"),
    "mcp": ("diffserve.cli.mcp", "tests"),
    "opentelemetry": ("diffserve.service.telemetry", "tests"),
    "gradio": ("ui", "tests.ui"),
    "llguidance": ("diffserve.api.json_schemas", "diffserve.runtime.decoding"),
    "gradio_client": ("tests",),
    "sqlalchemy": ("diffserve.store", "tests"),
    "alembic": ("diffserve.store", "tests"),
    "psycopg": ("diffserve.store", "tests"),
    "playwright": ("tests",),
    "ray": ("diffserve.cluster", *OUTSIDE),
    "pickle": ("tests",),
    "shelve": (),
    "marshal": (),
}
WITHOUT_TORCH = (
    *(f"diffserve.engine.image.{name}" for name in ("admission", "buckets", "outputs", "policy", "scheduler", "task")),
    "diffserve.engine.records",
    "diffserve.engine.time_share",
)
"""Scheduling policy is tested in milliseconds."""

WITHOUT_ENGINE = tuple(
    f"diffserve.experiments.{name}"
    for name in (
        "analysis", "axes", "charts", "estimates", "generation", "intervals", "labels", "measure", "plan", "prompts",
        "records", "series", "summary",
    )
)  # fmt: skip
"""What a page needs of an experiment: it asks a server to paint."""

SEEN_BY_UI = ("diffserve.client", "diffserve.experiments.plots", "diffserve.world", *WITHOUT_ENGINE)
"""Allowed in addition to the shared packages."""

NEVER = {
    "diffserve.service": ("diffserve.engine", "diffserve.runtime", "diffserve.training"),
    "ui": ("diffserve.engine", "diffserve.runtime", "diffserve.service", "diffserve.cli", "schedulers"),
    "schedulers": ("diffserve", "ui"),
}


class Arrow(NamedTuple):
    """``module`` imports ``target`` at ``place`` (file:line)."""

    module: str
    target: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.module} -> {self.target}"


def python_files() -> list[Path]:
    tops = ("schedulers", "diffserve", "ui", "benchmarks", "tests")
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement in ``node``, at any depth: imports stand in no expression, and of these there are many more."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        parts = getattr(node, name, ())
        for part in parts if isinstance(parts, list) else ():
            yield part
            yield from statements(part)


def arrows(path: Path) -> Iterator[Arrow]:
    """Every import of a file, at any depth, relative ones resolved; ``from package import module`` is of the module."""
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node, ast.Import):
            yield from (Arrow(module, alias.name, place) for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                is_module = (ROOT / name.replace(".", "/") / f"{alias.name}.py").is_file()
                full_name = f"{name}.{alias.name}"
                yield Arrow(module, full_name if is_module or is_package(full_name) else name, place)


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").is_file()


def within(name: str, *places: str) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@cache
def floor_of(name: str) -> int | None:
    places = [place for place in FLOORS if within(name, place)]
    return FLOORS[max(places, key=len)] if places else None


def circle(arrows: Iterable[Arrow]) -> list[str]:
    """Modules each of which imports the next, the last the first again; empty where there are none."""
    modules = {module_of(path) for path in python_files()}
    below: dict[str, set[str]] = {}
    for arrow in arrows:
        if arrow.target in modules and arrow.target != arrow.module:
            below.setdefault(arrow.module, set()).add(arrow.target)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def all_arrows() -> tuple[Arrow, ...]:
    """Return the imports of the full tree, collected by the first test that needs them to keep test collection fast."""
    return tuple(arrow for path in python_files() for arrow in arrows(path))


def test_every_module_stands_on_a_floor() -> None:
    modules = {module_of(path) for path in python_files()} - {FACADE}
    homeless = sorted(name for name in modules if not within(name, *OUTSIDE) and floor_of(name) is None)
    assert not homeless, f"say in FLOORS where these stand: {homeless}"


def test_imports_point_down() -> None:
    def points_up(arrow: Arrow) -> bool:
        mine, target_floor = floor_of(arrow.module), floor_of(arrow.target)
        return mine is not None and target_floor is not None and target_floor > mine

    assert not [str(arrow) for arrow in all_arrows() if points_up(arrow)]


def test_no_import_goes_in_a_circle() -> None:
    assert not circle(arrow for arrow in all_arrows() if not within(arrow.module, *OUTSIDE))


def test_rooms_that_never_see_each_other() -> None:
    wrong = [
        str(arrow)
        for arrow in all_arrows()
        for room, forbidden in NEVER.items()
        if within(arrow.module, room) and within(arrow.target, *forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_stays_in_its_room(library: str) -> None:
    wrong = [str(a) for a in all_arrows() if within(a.target, library) and not within(a.module, *ONLY_IN[library])]
    assert not wrong, f"{library} belongs in {', '.join(ONLY_IN[library]) or 'no room'}"


def test_the_client_knows_errors_and_nothing_else_of_the_house() -> None:
    allowed = ("diffserve.client", "diffserve.api.errors")
    wrong = [
        str(arrow)
        for arrow in all_arrows()
        if within(arrow.module, "diffserve.client")
        and within(arrow.target, "diffserve", "schedulers", "ui")
        and not within(arrow.target, *allowed)
    ]
    assert not wrong


def test_scheduling_policy_needs_no_torch() -> None:
    assert not [str(a) for a in all_arrows() if within(a.target, "torch") and within(a.module, *WITHOUT_TORCH)]


def test_what_a_page_needs_of_an_experiment_needs_no_engine() -> None:
    heavy = ("torch", "diffserve.engine", "diffserve.runtime")
    at_runtime = [a for a in all_arrows() if within(a.module, *WITHOUT_ENGINE) and within(a.target, *heavy)]
    assert not list(map(str, at_runtime))


def test_a_page_paints_through_the_client_and_sees_of_the_rest_what_needs_no_engine() -> None:
    allowed = (*SEEN_BY_UI, *(f"diffserve.{name}" for name in MORTAR))
    wrong = [
        str(arrow)
        for arrow in all_arrows()
        if within(arrow.module, "ui") and within(arrow.target, FACADE) and not within(arrow.target, *allowed)
    ]
    assert not wrong


def test_schedulers_need_numpy_alone() -> None:
    allowed = {"numpy", "schedulers", *sys.stdlib_module_names}
    wrong = [
        str(arrow)
        for arrow in all_arrows()
        if within(arrow.module, "schedulers")
        and arrow.target.split(".")[0] not in allowed
        and not (arrow.module == "schedulers.update" and within(arrow.target, "torch"))
    ]
    assert not wrong


def test_importing_it_does_not_load_torch() -> None:
    rooms = "diffserve schedulers diffserve.cli diffserve.client diffserve.service.app diffserve.experiments ui.page"
    modules = [*rooms.split(), *(f"diffserve.{module}" for module in MORTAR)]
    code = f"""
import sys
from importlib import import_module
for module in {modules}:
    import_module(module)
    assert not {{"torch", "diffusers", "transformers"}} & {{*sys.modules}}, module
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_rule_is_able_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "diffserve" / "runtime" / "bad.py"
    source.parent.mkdir(parents=True)
    source.write_text("def f():\n    from ..engine import loop\n    import torch.nn as nn\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    import_arrows = [str(arrow) for arrow in arrows(source)]
    assert import_arrows == [
        "diffserve/runtime/bad.py:2: diffserve.runtime.bad -> diffserve.engine",
        "diffserve/runtime/bad.py:3: diffserve.runtime.bad -> torch.nn",
    ]
    assert (floor_of("diffserve.runtime.bad") or 0) < (floor_of("diffserve.engine") or 0)


def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "diffserve"
    room.mkdir()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (room / f"{name}.py").write_text(f"def f():\n    from diffserve import {other}\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    all_arrows = [arrow for path in python_files() for arrow in arrows(path)]
    assert set(circle(all_arrows)) == {"diffserve.a", "diffserve.b", "diffserve.c"}
    assert not circle(arrow for arrow in all_arrows if arrow.module != "diffserve.c")
