"""OpenMP threads that wait spin for a short time, and heaps have few arenas, unless the user sets something else."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from diffserve.processes import MALLOC_ARENA_MAX, MALLOC_ARENAS, SPIN_COUNT, bound_spinning

COUNT_ARENAS = """
import ctypes, threading
from diffserve.processes import limit_own_arenas
limit_own_arenas()
barrier = threading.Barrier(9)
def work():
    block = bytearray(10_000)
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
stdout = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, stdout)
libc.fflush(stdout)
barrier.wait()
"""
"""Prints the state of glibc's heap while eight threads hold a block."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
@pytest.mark.parametrize(("user_setting", "num_arenas"), [(None, MALLOC_ARENAS), ("5", 5)])
def test_threads_share_the_arenas_of_the_heap(user_setting: str | None, num_arenas: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MALLOC_ARENA_MAX}
    if user_setting is not None:
        environment[MALLOC_ARENA_MAX] = user_setting
    command = [sys.executable, "-c", COUNT_ARENAS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.count("<heap nr=") == num_arenas


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
