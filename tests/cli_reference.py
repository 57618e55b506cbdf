"""Write ``docs/cli-reference.md`` from the options of the command line: ``python tests/cli_reference.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer.main

from diffserve.cli.app import app

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "cli-reference.md"
HEAD: Final = """\
# Command line reference

Generated from the program by `python tests/cli_reference.py`. [Command line](cli.md) explains the commands with
examples. `diffserve COMMAND --help` prints the same text.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "diffserve")]).rstrip() + "\n"


def _sections(command: Any, name: str) -> Iterator[str]:
    """Yield the sections of a command and, for a group, of the commands in it."""
    if commands := getattr(command, "commands", None):
        for child_name, child in commands.items():
            if not child.hidden:
                yield from _sections(child, f"{name} {child_name}")
        return
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"## {name}\n\n`{' '.join([name, *command.collect_usage_pieces(context)])}`\n"
    yield f"{inspect.cleandoc(command.help or '')}\n\n| option | meaning |\n|---|---|"
    for option in command.params:
        if record := option.get_help_record(context):
            names, meaning = (" ".join(cell.split()).replace("|", "\\|") for cell in record)
            yield f"| `{names}` | {meaning.replace('<', '&lt;')} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
