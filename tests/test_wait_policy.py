"""Waiting OpenMP threads spin for a short time unless the user sets a policy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from diffserve.processes import SPIN_COUNT, bound_spinning


@pytest.mark.parametrize("user_settings", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_settings_of_the_user_are_kept(user_settings: dict[str, str]) -> None:
    environment = dict(user_settings)
    bound_spinning(environment)
    assert environment == user_settings


def test_the_command_line_sets_the_policy_before_torch_is_loaded() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    script = (
        "import contextlib, os, sys\n"
        "from diffserve.cli import main\n"
        "sys.argv = ['diffserve', '--version']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-2:] == [SPIN_COUNT, "False"]
