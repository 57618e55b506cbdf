"""Threads that wait spin shortly, unless the user said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diffserve.processes.wait_policy import SPIN_COUNT, bound_spinning


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_what_the_user_says_of_waiting_is_kept(said: dict[str, str]) -> None:
    environment = dict(said)
    bound_spinning(environment)
    assert environment == said


def test_the_command_line_decides_before_torch_is_loaded() -> None:
    silent = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = (
        "import contextlib, os, sys\n"
        "from diffserve.cli import main\n"
        "sys.argv = ['diffserve', '--version']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], env=silent, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-2:] == [SPIN_COUNT, "False"]
