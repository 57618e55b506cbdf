"""Compile a module by AOTInductor: its options, the tools that must be installed, and how packages are linked."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

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

CXX_LIBRARY: Final = "libstdc++.so.6"
LINKER_SCRIPT: Final = """#!/bin/sh
for word do
    case $word in
        -c | -E | -S | -fsyntax-only | c++-header) exec {compiler} "$@" ;;
    esac
done
exec {compiler} "$@" {library}
"""
PROBE: Final = "#include <locale>\nstd::locale probe() { return std::locale(); }\n"


def compile_package(module: nn.Module, tensors: Sequence[Tensor], path: Path, options: dict[str, Any]) -> None:
    """Compile ``module`` for inputs like ``tensors`` into a package.

    Args:
        module: The network.
        tensors: Example inputs.
        path: The package; its folder takes temporary files.
        options: ``WEIGHTS_IN_PACKAGE`` or ``WEIGHTS_AT_LOAD``.

    Raises:
        Exception: What ``torch.export`` and the compilers raise.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    options = known_options() | shared_library_option(path.parent) | options
    with torch.no_grad(), fresh_cache(dir=str(path.parent), delete=False):
        program = torch.export.export(module.eval(), tuple(tensors))
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def shared_library_option(folder: Path) -> dict[str, Any]:
    """Return the option of Inductor that links packages to the C++ library that torch has loaded, if it is needed.

    Some compilers link this library statically, for example if only ``libstdc++.a`` is installed. A package then has a
    second copy, and ``std::regex`` in its start-up code crashes on locale objects of the first (``parse_device_str`` in
    ``aoti_runtime/model_base.h``). The option is a script in ``folder`` that names the loaded library to the linker
    before the compiler adds its own.
    """
    library = _loaded_cxx_library()
    compiler = _cxx_command()
    if library is None or not _links_statically(compiler, folder):
        return {}
    script = folder / "g++"  # Inductor chooses its options by the name
    script.write_text(LINKER_SCRIPT.format(compiler=shlex.join(compiler), library=shlex.quote(library)))
    script.chmod(0o700)
    return {"cpp.cxx": (None, str(script))}


def _loaded_cxx_library() -> str | None:
    """Return the path of the GNU C++ library in this process, or ``None`` (not Linux, or another library)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if CXX_LIBRARY in line)
    return next((path for path in paths if path.startswith("/")), None)


def _links_statically(compiler: list[str], folder: Path) -> bool:
    """Whether ``compiler`` puts a copy of the C++ library into a shared object that it links."""
    source, output = folder / "probe.cpp", folder / "probe.so"
    source.write_text(PROBE)
    command = [*compiler, "-shared", "-fPIC", str(source), "-o", str(output)]
    try:
        subprocess.run(command, check=True, capture_output=True)
        return CXX_LIBRARY.encode() not in output.read_bytes()
    except (OSError, subprocess.CalledProcessError):
        return False  # Inductor's own error says what is wrong with the compiler
    finally:
        source.unlink(missing_ok=True)
        output.unlink(missing_ok=True)


def _cxx_command() -> list[str]:
    return shlex.split(os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++"))


def known_options() -> dict[str, Any]:
    """Return the ``OPTIONS`` that the installed torch has; it refuses to compile with an unknown one."""
    from torch._inductor import list_options

    names = frozenset(list_options())
    return {name: value for name, value in OPTIONS.items() if name in names}


def missing_tools(device: torch.device) -> str | None:
    """Return a clause that names what AOTInductor needs for ``device`` and is not installed, or ``None``.

    Checked before a compile begins, because the compiler's own error comes minutes later and is hard to read. The
    wrapper code needs a C++ compiler, and on CUDA the toolkit's headers (``aoti_runtime/device_utils.h``); Triton
    compiles its launcher against Python's headers. nvcc is not needed.
    """
    compiler = _cxx_command()[0]
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler!r} was not found; install one, or set CXX to another one"
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
