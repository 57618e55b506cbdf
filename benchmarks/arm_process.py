"""Benchmark arm in its own process: it describes itself, and then answers every line of JSON with another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from diffserve.processes import CHOSEN_BY_USER, bound_spinning


class ArmProcess:
    """Python process of one arm; ``about`` is the first line that it printed.

    bounds_spinning  as diffserve's own commands do; else torch's threads wait as their library is built to
    """

    def __init__(self, arguments: Sequence[str], *, bounds_spinning: bool = True) -> None:
        inherited = (*CHOSEN_BY_USER, "OMP_NUM_THREADS")
        environment = {key: value for key, value in os.environ.items() if key not in inherited}
        if bounds_spinning:
            bound_spinning(environment)
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self.answer()

    def ask(self, question: Any) -> dict[str, Any]:
        """Send ``question`` and wait for the answer."""
        self.say(question)
        return self.answer()

    def say(self, question: Any) -> None:
        """Send ``question`` without waiting, so that several processes can work at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Read the next line of output. Raises RuntimeError if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an arm ended with exit code {self.process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Stop the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
