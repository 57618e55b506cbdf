"""What AOTInductor needs to compile a UNet call: its options, and the tools that must be installed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

# Each option only saves time, so one that this torch does not know is left out.
OPTIONS: Final[dict[str, Any]] = {
    "cpp.dynamic_threads": True,  # as many as the engine sets when it calls
    "cpp.vec_isa_ok": True,  # do not test by a compile whether the processor has the instructions that it reports
    "aot_inductor.precompile_headers": False,  # takes longer than it saves, and torch shares the result between users
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.compile_wrapper_opt_level": "Og",  # for the code that calls the kernels; they are compiled at -O3
}
WEIGHTS_IN_PACKAGE: Final[dict[str, Any]] = {"freezing": True}
WEIGHTS_AT_LOAD: Final[dict[str, Any]] = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else tensors of up to 8 numbers, such as conv_out.bias, become code
}

CUDA_HEADERS: Final = ("cuda.h", "cuda_runtime.h")
COMPILERS: Final = {"darwin": "clang++", "win32": "cl"}
"""Inductor's default C++ compiler by platform; ``g++`` elsewhere."""


def known_options() -> dict[str, Any]:
    """Return the ``OPTIONS`` that the installed torch has; it refuses to compile with an unknown one."""
    from torch._inductor import list_options

    names = frozenset(list_options())
    return {name: value for name, value in OPTIONS.items() if name in names}


def missing_tools(device: torch.device) -> str | None:
    """Return what AOTInductor needs to compile for ``device`` and is not installed, as a clause, or ``None``.

    Checked before a compile begins, because the compiler's own error comes minutes later and is hard to read. The
    wrapper code needs a C++ compiler, and on CUDA the toolkit's headers (``aoti_runtime/device_utils.h``); Triton
    compiles its launcher against Python's headers. nvcc is not needed.
    """
    compiler = shlex.split(os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++"))[0]
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler!r} was not found; install one, or name yours in CXX"
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    folders = _cuda_include_folders()
    if absent := _absent(CUDA_HEADERS, folders):
        looked = f" in {', '.join(folders)}" if folders else ""
        return f"CUDA's {absent} was not found{looked}; install the CUDA toolkit, or set CUDA_HOME to its folder"
    if find_spec("triton") is None:
        return "triton is not installed"
    if absent := _absent(("Python.h",), [sysconfig.get_path("include")]):
        return f"{absent} was not found in {sysconfig.get_path('include')}; install Python's development package"
    return None


def _cuda_include_folders() -> list[str]:
    """Return the folders in which Inductor looks for CUDA's headers (``torch.utils.cpp_extension.include_paths``)."""
    from torch.utils.cpp_extension import CUDA_HOME

    home = [] if CUDA_HOME is None else [str(Path(CUDA_HOME) / "include")]
    return [*home, *filter(None, [os.environ.get("CUDA_INC_PATH")])]


def _absent(names: Iterable[str], folders: Iterable[str]) -> str | None:
    folders = list(folders)
    return next((name for name in names if not any((Path(folder) / name).is_file() for folder in folders)), None)
