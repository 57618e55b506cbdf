"""What the GPU suite needs on a bare CUDA machine without a network: wheels, a small tree, and the command.

    python benchmarks/gpu_bundle.py --wheels DIR --results DIR
    python benchmarks/gpu_bundle.py --wheels DIR --results DIR --tree DIR

The machine has Python 3.12, torch with CUDA, transformers and pytest. The wheels of what it lacks are downloaded for
it, in the versions of ``constraints.txt``; pipelines of other model families are left out of the wheel of diffusers,
and compiled modules out of that of SQLAlchemy.
What has to travel is counted: the tracked files and the wheels, or with ``--tree`` a copy of the last commit without
the files that the run does not need. Exit code 1 where that is too much.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

ROOT: Final = Path(__file__).resolve().parent.parent
ENGINE: Final = ("cachetools", "diffusers", "msgspec")
"""What every row needs."""

SERVER: Final = (
    "alembic",
    "annotated-doc",
    "annotated-types",
    "fastapi",
    "mako",
    "opentelemetry-api",
    "pydantic",
    "pydantic-core",
    "python-multipart",
    "sqlalchemy",
    "starlette",
    "typing-extensions",
    "typing-inspection",
    "uvicorn",
)
"""What the HTTP server's row and the rows of ``gpu/feature_rows.py`` need in addition."""

NOT_NEEDED: Final = (
    ".assets",
    ".github",
    "CHANGELOG.md",
    "benchmarks/LOG.md",
    "benchmarks/results",
    "diffserve/training/eval/results",
    "diffserve/training/sprites-4x.webp",
    "diffserve/world/atlas.png",
    "docs",
    "examples",
    "requirements.lock",
    "tests/browser",
    "tests/training",
    "tests/experiments",
    "tests/ui",
)
"""Tracked files and folders that no row reads."""

PIPELINES: Final = ("controlnet", "stable_diffusion", "stable_diffusion_xl")
"""Folders of ``diffusers/pipelines`` that the suite and the tests import from."""

DIALECTS: Final = ("postgresql", "sqlite")
"""Folders of ``sqlalchemy/dialects`` that diffserve supports."""

LIMIT_MIB: Final = 63.0
PYTHON_VERSION: Final = "3.12"
PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def download_command(packages: Sequence[str], wheels: Path) -> list[str]:
    """Return the pip command that fetches the wheels of ``packages`` for the machine, without dependencies."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON_VERSION, "--implementation", "cp", *platforms),
        *("--constraint", str(ROOT / "constraints.txt"), "--dest", str(wheels), *packages),
    ]


def slim_wheel(wheel: Path) -> None:
    """Remove from ``wheel`` the files that ``is_imported`` excludes: half of the bytes of diffusers and SQLAlchemy."""
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as slim:
        for name in filter(is_imported, full.namelist()):
            content = full.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if is_imported(line.partition(",")[0])).encode()
            slim.writestr(name, content)
    part.replace(wheel)


def is_imported(name: str) -> bool:
    """Whether the file ``name`` of the wheel of diffusers or SQLAlchemy is imported by the suite or the tests."""
    folders = name.split("/")[:-1]
    if folders[:1] == ["sqlalchemy"]:  # works without its compiled modules, which only save time
        is_other_dialect = folders[1:2] == ["dialects"] and folders[2:3] not in ([], *([each] for each in DIALECTS))
        return not (name.endswith(".so") or folders[1:2] == ["testing"] or is_other_dialect)
    if folders[:2] == ["diffusers", "pipelines"] and len(folders) > 2:
        return folders[2] in PIPELINES
    return folders[:2] != ["diffusers", "modular_pipelines"]


def run_command(wheels: Iterable[Path], results: str, site: str = "/tmp/site") -> str:
    """Return the command line to run in the tree on the machine."""
    names = " ".join(shlex.quote(str(wheel)) for wheel in sorted(wheels))
    install = f"python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target {site} {names}"
    return f"{install} && PYTHONPATH={site} python3 benchmarks/gpu_suite.py --out {results}"


def tracked_bytes() -> int:
    """Sum the bytes of all tracked files in the working tree."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def write_tree(target: Path) -> int:
    """Write the last commit without ``NOT_NEEDED`` to ``target``; the bytes of its files."""
    paths = [f":(exclude){path}" for path in NOT_NEEDED]
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD", ".", *paths], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(target, filter="data")
        return sum(member.size for member in tar.getmembers())


def main(
    wheels: Annotated[Path, typer.Option(help="Folder for the wheels; git should ignore it.")],
    results: Annotated[str, typer.Option(help="Folder for the results on the GPU machine.")] = "gpu-results",
    tree: Annotated[
        Path | None, typer.Option(help="Folder for a copy of the repository without files that the run does not need.")
    ] = None,
    server: Annotated[bool, typer.Option(help="Include the packages for the rows that import the HTTP server.")] = True,
    download: Annotated[
        bool, typer.Option(help="Download the wheels; otherwise the existing ones are counted.")
    ] = True,
) -> None:
    """Collect, count, and print the command."""
    if download:
        wheels.mkdir(parents=True, exist_ok=True)
        packages = (*ENGINE, *SERVER) if server else ENGINE
        done = subprocess.run(download_command(packages, wheels), check=False)
        if done.returncode:
            print(f"pip could not fetch the wheels of {', '.join(packages)}; see its message.", file=sys.stderr)
            raise typer.Exit(1)
        for wheel in (*wheels.glob("diffusers-*.whl"), *wheels.glob("sqlalchemy-*.whl")):
            slim_wheel(wheel)
    files = sorted(wheels.glob("*.whl"))
    tree_bytes = tracked_bytes() if tree is None else write_tree(tree)
    wheel_bytes = sum(wheel.stat().st_size for wheel in files)
    total_mib = (tree_bytes + wheel_bytes) / 2**20
    print(f"tree {tree_bytes / 2**20:.1f} MiB, {len(files)} wheels {wheel_bytes / 2**20:.1f} MiB: {total_mib:.1f} MiB")
    if total_mib > LIMIT_MIB:
        print(
            f"{total_mib:.1f} MiB have to travel, more than {LIMIT_MIB:g}; write a smaller tree with --tree.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    print(run_command([Path(wheels.name) / wheel.name for wheel in files], results))


if __name__ == "__main__":
    typer.run(main)
