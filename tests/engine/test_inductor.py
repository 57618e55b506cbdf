"""AOTInductor on other machines: options of other torch versions, missing build tools, and packages on CUDA."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.engine.image.compiled_groups import CompiledGroups, compiles_in_background
from diffserve.engine.image.compiling import CompilerProcess
from diffserve.runtime import load_model
from diffserve.runtime.unet import compiled, inductor
from diffserve.runtime.unet.call import UNetArguments
from diffserve.runtime.unet.compiled import CompiledUNet, Packages
from diffserve.runtime.unet.inductor import CXX_LIBRARY, known_options, missing_tools, shared_library_option
from diffserve.runtime.unet.package import Package
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create all files that a CUDA compile looks for in a folder, and point the search paths there."""
    for name in ("bin/g++", "bin/clang++", "bin/cl", "include/cuda.h", "include/cuda_runtime.h", "include/Python.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "triton.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_INC_PATH", raising=False)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "include"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_option_that_this_torch_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = known_options()
    assert before["cpp.dynamic_threads"] is True
    monkeypatch.setitem(inductor.OPTIONS, "aot_inductor.of_a_later_torch", True)
    assert known_options() == before


def test_nothing_is_missing_where_compiler_and_headers_are_installed(tools: Path) -> None:
    assert missing_tools(CPU) is None
    assert missing_tools(CUDA) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "include/cuda.h",
            "CUDA's cuda.h was not found in {}; install the CUDA toolkit, or set CUDA_HOME to its folder",
        ),
        ("include/cuda_runtime.h", "CUDA's cuda_runtime.h was not found in {}; install the CUDA toolkit"),
        ("include/Python.h", "Python.h was not found in {}; install Python's development package"),
    ],
)
def test_a_missing_header_is_named_on_cuda_only(tools: Path, name: str, message: str) -> None:
    (tools / name).unlink()
    assert missing_tools(CPU) is None
    assert (missing_tools(CUDA) or "").startswith(message.format(tools / "include"))


def test_headers_in_cuda_inc_path_are_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert missing_tools(CUDA) == (
        "CUDA's cuda.h was not found; install the CUDA toolkit, or set CUDA_HOME to its folder"
    )
    monkeypatch.setenv("CUDA_INC_PATH", str(tools / "include"))
    assert missing_tools(CUDA) is None


def test_a_missing_compiler_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "my-compiler -v")
    for device in (CPU, CUDA):
        assert missing_tools(device) == (
            "the C++ compiler 'my-compiler' was not found; install one, or set CXX to another one"
        )


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("g++") is None, reason="needs g++ on Linux")
@pytest.mark.parametrize("flags", ["", "-static-libstdc++"])
def test_packages_share_the_cxx_library_of_the_process_also_where_the_compiler_links_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    source, output = tmp_path / "code.cpp", tmp_path / "code.so"
    source.write_text(
        '#include <regex>\nbool match(const char* s) { return std::regex_match(s, std::regex("[a-z]+")); }\n'
    )
    monkeypatch.setenv("CXX", f"g++ {flags}".strip())
    option = shared_library_option(tmp_path)
    assert bool(option) == bool(flags), "an ordinary compiler needs no option"
    compiler = shlex.split(os.environ["CXX"]) if not option else [option["cpp.cxx"][1]]
    subprocess.run([*compiler, "-c", "-fPIC", source, "-o", tmp_path / "code.o"], check=True)
    subprocess.run([*compiler, "-shared", tmp_path / "code.o", "-o", output], check=True)
    assert CXX_LIBRARY.encode() in output.read_bytes()


def test_a_compiler_that_does_not_work_is_left_to_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert shared_library_option(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "compile", "deterministic", "is_expected"),
    [
        (CUDA, "auto", False, True),
        (CUDA, "auto", True, False),
        (CUDA, "warm", False, False),
        (CPU, "auto", False, False),
        (CPU, "background", False, True),
    ],
)
def test_an_engine_on_cuda_compiles_in_the_background_unless_bytes_must_stay(
    make_engine: Callable[..., Engine], device: torch.device, compile: Any, deterministic: bool, is_expected: bool
) -> None:
    loaded = make_engine(cache_dir="").model
    model = replace(loaded, choice=replace(loaded.choice, device=device))
    config = EngineConfig(compile=compile, deterministic=deterministic)
    assert compiles_in_background(model, config) is is_expected


def test_without_a_compiler_packages_are_refused_before_anything_is_exported(
    make_engine: Callable[..., Engine], tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: None)
    monkeypatch.setattr("torch.export.export", None)
    monkeypatch.setenv("CXX", "my-compiler")
    model = make_engine(cache_dir="").model
    packages = Packages(model, DiskCache(tools / "cache"))
    assert packages.reason is None, "packages made elsewhere can be used"
    with pytest.raises(ConfigError, match=r"AOTInductor cannot compile: the C.* compiler 'my-compiler' was not found"):
        packages.compile(random_call(model, (64, 64, 77), 1))


def test_an_engine_without_cuda_headers_says_so_once_and_compiles_nothing(
    make_engine: Callable[..., Engine], tools: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tools / "include" / "cuda.h").unlink()
    loaded = make_engine(cache_dir="").model
    model = replace(loaded, choice=replace(loaded.choice, device=CUDA))
    config = EngineConfig(cache_dir=str(tools / "cache"), compile="background", deterministic=False, cuda_graphs=False)
    monkeypatch.setattr(compiled, "hardware_name", str)
    with caplog.at_level(logging.WARNING):
        groups = CompiledGroups(model, config)
    assert groups._compiler is None
    assert [message.partition(";")[0] for message in caplog.messages] == [
        f"UNet calls are not compiled but made by the network: CUDA's cuda.h was not found in {tools / 'include'}"
    ]


def test_a_compiled_call_on_cuda_that_fails_once_is_kept_for_memory_may_have_run_out(
    make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: None)
    model = make_engine(cache_dir="").model
    packages = Packages(model, DiskCache(tmp_path))
    packages.device, packages.is_baked = CUDA, False
    call = random_call(model, (64, 64, 77), 1)
    fails = [True, False, True, True]

    def package(tensors: list[torch.Tensor]) -> torch.Tensor:
        if fails.pop(0):
            raise RuntimeError("run_func_(...) API call failed")
        return tensors[0]

    monkeypatch.setattr(packages, "load", lambda path, num_rows: package)
    path = packages.path(call.kind, 1)
    assert path is not None
    path.parent.mkdir()
    path.touch()
    unet = CompiledUNet(packages)
    assert unet.load(call.kind, (1,)) == (1,)
    with pytest.raises(torch.OutOfMemoryError, match="perhaps for lack of memory"):
        unet.run(call)
    assert unet.run(call) is not None, "memory was freed meanwhile"
    with pytest.raises(torch.OutOfMemoryError):
        unet.run(call)
    assert [unet.run(call), unet.run(call)] == [None, None], "it failed twice in a row"
    assert not fails


def test_a_package_on_cuda_is_opened_for_one_thread_so_that_calls_do_not_wait_and_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[Any, ...]] = []

    class Loader:
        def __init__(self, *arguments: Any) -> None:
            opened.append(arguments)

        def get_constant_fqns(self) -> list[str]:
            return []

    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", Loader)
    Package(tmp_path / "call.pt2", torch.device("cuda:1"))
    assert opened == [(str(tmp_path / "call.pt2"), "model", True, 1, 1)]


def test_a_package_on_cuda_is_called_once_before_an_engine_can_find_it(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_model("sd15"), dtype="int8", device="cpu")
    packages, call, tried = Packages(model, DiskCache(tmp_path)), random_call(model, (64, 64, 77), 1), list[Path]()
    path = packages.path(call.kind, 1)
    assert path is not None
    packages.device = CUDA

    def compile_call(call: UNetArguments, part: Path) -> None:
        part.write_bytes(b"code")

    def crash(part: Path, call: UNetArguments) -> None:
        tried.append(part)
        raise RuntimeError("the call failed")

    monkeypatch.setattr(compiled, "missing_tools", lambda device: None)
    monkeypatch.setattr(packages, "_compile_by_inductor", compile_call)
    monkeypatch.setattr(packages, "_call_once", crash)
    with pytest.raises(RuntimeError, match="the call failed"):
        packages.compile(call)
    assert not list(path.parent.iterdir())
    monkeypatch.setattr(packages, "_call_once", lambda part, call: tried.append(part))
    assert packages.compile(call) == path
    assert path.read_bytes() == b"code"
    assert len(tried) == 2
    assert path not in tried


def test_the_signal_that_ended_a_compiler_is_named() -> None:
    process = CompilerProcess({})
    os.kill(process._process.pid, signal.SIGSEGV)
    code = process.exit_code(60.0)
    assert code == -signal.SIGSEGV
    assert process.last_line(code) == "the compiler process was killed by SIGSEGV"
    process.close()
