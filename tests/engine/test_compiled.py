"""Compiled calls: made ahead, proven before they are used, taken up between two pictures and never within one."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_models import lora_tensors
from diffserve.api.errors import ConfigError
from diffserve.api.types import GenerationRequest, ImageFinished
from diffserve.cli import warm
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.engine.image.batch import LatentPool
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.compiled_groups import DOUBT_S, check, is_worth, prove
from diffserve.engine.image.compiling import BackgroundCompiler
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.precision import cpu_bf16_unit
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.threads import computing_on
from diffserve.runtime.unet import compiled, openvino_package
from diffserve.runtime.unet.batch_invariance import GroupFacts, Trial, Try, end_of
from diffserve.runtime.unet.compiled import CompiledUNet, FlatUNet, Packages
from diffserve.runtime.unet.openvino_package import BF16_UNITS, MEMBER
from diffserve.runtime.unet.package import Package, TorchModel
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import Flag, load_settings
from tests.engine.loras import ATTENTION, KERNELS, with_folder
from tests.engine.pipelines import image_request
from tests.hardware import needs_openvino
from tests.service.server import START_S
from tests.tiny_models import ONE_LEVEL

SIZES = (1, 2)
PLAIN, COMPILED = GroupKey(64, 64, 77), GroupKey(64, 64, 77, is_compiled=True)
ADAPTED = PLAIN._replace(lora_rank=16)
slow = pytest.mark.slow
WARM = """
import os, sys
from diffserve.cli import main
config, path, cache, unusable = sys.argv[1:]
sys.argv = ["diffserve", "warm", "--config", config]
try:
    main()
except SystemExit as ended:
    assert ended.code in (0, 1), ended.code
from torch._inductor import codecache
from diffserve.settings.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.compiling import compile_group
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import load_model
from diffserve.runtime.text.conditioning import make_conditioner
from diffserve.runtime.unet import compiled
from diffserve.runtime.unet.compiled import Packages
codecache._HEADER_DIR = codecache._HEADER_LOCK_DIR = os.environ["TORCHINDUCTOR_CACHE_DIR"] = unusable
def compile(dtype, rank, sizes):
    model = load_model(path, dtype=dtype, device="cpu")
    conditioner = make_conditioner(model, EngineConfig(), is_exact=True)
    packages = Packages(model, DiskCache.at(cache))
    compile_group(model, conditioner, packages, GroupKey(64, 64, 77, lora_rank=rank), sizes)
compile("float32", 16, [1, 2])
compiled.openvino_version = lambda: None
compile("float32", 0, [1])
compile("int8", 16, [1])
assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == unusable
"""


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with the smallest UNet that has cross-attention, to keep compilation fast."""
    return Path(shutil.copytree(tiny_model(ONE_LEVEL), tmp_path_factory.mktemp("compiled") / "model"))


@pytest.fixture(scope="module")
def warmed(directory: Path) -> tuple[Path, str]:
    """Run ``diffserve warm`` for one and two rows; return the cache folder and the printed report.

    The same process, whose libraries are loaded, then compiles for another folder, ``cache-more``, where torch's
    compilers can share nothing: calls with adapters, one row without OpenVINO, and one row with adapters in int8.
    """
    home = directory.parent
    cache, config = home / "cache", home / "warm.toml"
    config.write_text(
        f'[model]\npath = "{directory}"\ndtype = "float32"\nprobe = false\n'
        f'[engine]\nmax_rows = 2\ncache_dir = "{cache}"\n'
    )
    scratch, unusable = home / "scratch", home / "shared"  # where whole files are left, or halves of such
    scratch.mkdir()
    unusable.touch()
    command = [sys.executable, "-c", WARM, *map(str, (config, directory, home / "cache-more", unusable))]
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"TMPDIR": str(scratch), "HOME": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * START_S, env=env)
    assert done.returncode == 0, done.stderr
    return cache, done.stdout


@pytest.fixture(scope="module")
def adapters(directory: Path, model: DiffusionModel) -> Path:
    """Save a folder of adapters, all of one padded rank."""
    folder = directory.parent / "loras"
    folder.mkdir()
    for seed, (name, ends) in enumerate({"attention": ATTENTION, "kernels": KERNELS, "everything": ("",)}.items()):
        save_file(lora_tensors(model, ends, seed, rank=4), folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def compiled_already(warmed: tuple[Path, str]) -> Path:
    """Return the cache folder of calls with adapters, of one row by Inductor, and of one row in int8."""
    return warmed[0].with_name("cache-more")


def order_of(model: DiffusionModel, directory: Path, **options: Any) -> dict[str, Any]:
    """Return the order that an engine gives its background compiler."""
    order = {
        "path": str(directory),
        "dtype": model.choice.dtype,
        "device": "cpu",
        "cross_attention": "paged",
        "num_threads": 1,
    }
    return order | {"profile": msgspec.to_builtins(model.profile)} | options


@pytest.fixture(scope="module")
def model(directory: Path) -> DiffusionModel:
    return load_model(directory, dtype="float32", device="cpu")


def engine_of(model: DiffusionModel, cache: Path | str, **config: Any) -> Engine:
    return Engine(model, EngineConfig(**{"max_rows": 2, "cache_dir": str(cache), **config}))


def study_all(engine: Engine) -> None:
    while engine.study():
        pass


def picture(number: int, num_steps: int = 3, **fields: Any) -> GenerationRequest:
    return image_request("sd15", "ddim", seed=number, num_steps=num_steps, **fields)


def pixels(engine: Engine, *requests: GenerationRequest) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(result.image) for result in engine.generate(list(requests))]


@slow
def test_warm_compiles_every_size_once_and_says_what_it_saves(warmed: tuple[Path, str]) -> None:
    cache, report = warmed
    assert len(list((cache / "compiled").iterdir())) == len(SIZES)
    assert not [path for path in (cache.parent / "scratch").rglob("*") if path.is_file()], "nothing is left behind"
    assert "64x64: compiling for 2 rows, 1 of 2 left" in report, "silent without a terminal"
    assert [line.split()[0] for line in report.splitlines()[-2:]] == ["1", "2"]


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_openvino_compiles_a_network_of_many_arguments_and_rows_have_their_bytes_in_calls_of_every_size(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    if dtype == "bfloat16" and cpu_bf16_unit() not in BF16_UNITS:
        pytest.skip("this CPU has no bfloat16 unit: AOTInductor compiles for it")
    model = load_model(tiny_model("sdxl"), dtype=dtype, device="cpu")
    conditioner = make_conditioner(model, EngineConfig(), is_exact=True)
    monkeypatch.setattr(compiled, "num_cores", lambda: 2)
    with computing_on(2):
        packages = Packages(model, DiskCache(tmp_path))
    assert packages.is_by_openvino
    assert [packages.num_streams(num_rows) for num_rows in (1, 3, 16)] == [1, 1, 2]
    unet = CompiledUNet(packages)
    calls = {num_rows: random_call(model, (64, 64, 77), num_rows, conditioner) for num_rows in (1, 3, 8, 16)}
    full_call = calls[16]
    assert full_call.added
    for num_rows in (1, 3, 8):
        packages.compile(calls[num_rows])
    assert unet.load(full_call.kind, (1, 3, 8, 16)) == (1, 3, 16), "of four rows a stream there is none"
    output = unet.run(full_call)
    assert output is not None
    with torch.no_grad():
        network = FlatUNet(model.unet.network, full_call)
        expected = network(*full_call.tensors).float()
        exact = network.float()(*(tensor.float() for tensor in full_call.tensors))
    off, other_error = ((tensor.float() - exact).norm() / exact.norm() for tensor in (output, expected))
    assert off < 1.2 * other_error + 1e-5
    for num_rows in (1, 3):
        package = unet._loaded[full_call.kind, num_rows]  # type: ignore[index]
        for start in range(0, 16 - num_rows, num_rows):
            part = package([tensor[start : start + num_rows] for tensor in full_call.tensors])
            assert torch.equal(part, output[start : start + num_rows])
    monkeypatch.setattr(openvino_package, "MOST_ROOM", 0)
    roomless = CompiledUNet(packages)
    assert roomless.load(full_call.kind, (16,)) == (16,)
    for candidate in (unet, roomless):
        tensors = [tensor.clone() for tensor in full_call.tensors]
        alive = [weakref.ref(tensor) for tensor in tensors]
        assert torch.equal(candidate._loaded[full_call.kind, 16](tensors), output)  # type: ignore[index]
        del tensors
        gc.collect()
        assert not [ref for ref in alive if ref() is not None], "what a call was told stays in memory"


@slow
def test_warm_proves_what_it_has_just_compiled(
    directory: Path,
    warmed: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compile_group(*_: Any) -> None:
        shutil.copytree(warmed[0] / "compiled", tmp_path / "compiled", dirs_exist_ok=True)

    monkeypatch.setattr("diffserve.engine.image.compiled_groups.LEAST_SAVED", -math.inf)
    monkeypatch.setattr("diffserve.engine.image.compiling.compile_group", compile_group)
    flags = {
        "engine.cache_dir": Flag("--cache", str(tmp_path)),
        "engine.max_rows": Flag("--rows", 2),
        "model.dtype": Flag("--dtype", "float32"),
    }
    assert warm.run(load_settings(model=str(directory), flags=flags, env={}), ["64x64"]) == 0
    assert "64x64: used from the next start" in capsys.readouterr().out


@slow
def test_what_was_compiled_paints_the_same_pictures_alone_and_in_company_without_the_network(
    model: DiffusionModel, warmed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diffserve.engine.image.compiled_groups.LEAST_SAVED", -math.inf)
    engine = engine_of(model, shutil.copytree(warmed[0], tmp_path / "cache"))
    engine.warm_up()
    study_all(engine)
    requests = [picture(number, num_steps=2 + number) for number in range(4)]
    expected = pixels(engine_of(model, "", compile="off"), *requests)
    monkeypatch.setattr(type(model.unet.network), "forward", None)  # the network must not be called
    before, gather = torch.get_num_threads(), LatentPool.gather
    between: list[int] = []

    def watched(*args: Any) -> Any:
        between.append(torch.get_num_threads())
        return gather(*args)

    monkeypatch.setattr(LatentPool, "gather", watched)
    together = pixels(engine, *requests)
    alone = [pixels(engine, request)[0] for request in requests]
    for image, other, plain in zip(together, alone, expected, strict=True):
        assert np.array_equal(image, other)
        assert np.abs(image.astype(int) - plain.astype(int)).max() <= 1
    assert COMPILED in engine.buckets
    assert between == [1] * len(between) != [], "torch's threads look out for work while calls have theirs"
    assert torch.get_num_threads() == before
    assert "torch._dynamo" not in sys.modules or not torch._dynamo.utils.counters["frames"]
    again = engine_of(model, tmp_path / "cache")  # proven is proven: no study
    assert np.array_equal(pixels(again, requests[0])[0], together[0])


@slow
@pytest.mark.parametrize(("dtype", "sizes", "closeness"), [("float32", SIZES, 1), ("int8", (1,), 8)])
def test_compiled_calls_are_shared_by_all_adapters(
    directory: Path,
    adapters: Path,
    compiled_already: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    sizes: tuple[int, ...],
    closeness: int,
) -> None:
    """Compare compiled calls with the network in 16 bits over quantized weights, alone and in a batch."""
    monkeypatch.setattr("diffserve.engine.image.compiled_groups.LEAST_SAVED", -math.inf)
    model = with_folder(load_model(directory, dtype=dtype, device="cpu"), adapters)
    cache = shutil.copytree(compiled_already, tmp_path / "cache")
    engine = engine_of(model, cache)
    group = engine.runners.group_of_short_prompts(64, 64)._replace(lora_rank=16)
    engine.runners.groups.learn(group)
    assert engine.runners.groups.best(group).is_compiled
    tags = ("<lora:attention>", "<lora:kernels:-0.7>", "<lora:everything:0.5>", "<lora:attention:2> <lora:kernels>")
    fields: dict[str, Any] = {"guidance_scale": 1.0}
    requests = [picture(number, 2 + number, prompt=f"cat {tag}", **fields) for number, tag in enumerate(tags)]
    expected = pixels(engine_of(model, "", compile="off"), *requests)
    without = [picture(number, 2 + number, prompt="cat", **fields) for number in range(4)]
    bare = pixels(engine_of(model, "", compile="off"), *without)
    monkeypatch.setattr(type(model.unet.network), "forward", None)  # the network must not be called
    packages = {path.name for path in (tmp_path / "cache" / "compiled").iterdir()}
    compiled = group._replace(is_compiled=True)
    known_group = engine.runners.groups.facts_of(compiled)
    assert known_group.curve.buckets == sizes
    engine.runners.groups._facts_by_group[compiled] = known_group._replace(curve=CostCurve(sizes[-1:]))
    together = pixels(engine, *requests)
    calls = [len({row.request_id for row in call.rows}) for tick in engine.trace for call in tick.calls]
    assert max(calls) == sizes[-1], "no rows of two adapters shared a call"
    engine.runners.groups._facts_by_group[compiled] = known_group._replace(curve=CostCurve((1,)))
    alone = [pixels(engine, request)[0] for request in requests]
    for image, other, eager, plain in zip(together, alone, expected, bare, strict=True):
        assert np.array_equal(image, other)
        off, changed = (np.abs(eager.astype(int) - image.astype(int)).max() for image in (image, plain))
        assert off <= closeness
        assert changed > 2 * off
    assert {path.name for path in (tmp_path / "cache" / "compiled").iterdir()} == packages, "something was compiled"
    assert "torch._dynamo" not in sys.modules or not torch._dynamo.utils.counters["frames"]


@slow
def test_where_there_are_two_threads_a_call_of_two_rows_is_two_calls_of_one(
    model: DiffusionModel, compiled_already: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: None)
    cache = DiskCache.at(str(shutil.copytree(compiled_already, tmp_path / "cache")))
    call = random_call(model, (64, 64, 77), 2, make_conditioner(model, EngineConfig(), is_exact=True))
    requested_rows: list[int] = []
    honest = Package.__call__

    def watched(package: Package, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        requested_rows.append(len(tensors[0]))
        return honest(package, tensors)

    monkeypatch.setattr(Package, "__call__", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        unet = CompiledUNet(packages := Packages(model, cache))
        first_path, two = (packages.path(call.kind, num_rows) for num_rows in SIZES)
        assert first_path is not None
        assert two is not None
        shutil.copy(first_path, two)  # the file exists and is never called
        assert unet.load(call.kind, SIZES) == SIZES
        with torch.no_grad():
            side_by_side, full_output = unet.run(call), FlatUNet(model.unet.network, call)(*call.tensors)
    finally:
        torch.set_num_threads(before)
    assert requested_rows == [1, 1]
    assert side_by_side is not None
    assert torch.allclose(side_by_side, full_output, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(side_by_side[0], side_by_side[1], atol=1e-3), "each row is its own"


@slow
def test_a_package_opened_for_one_thread_gives_the_same_bytes(
    model: DiffusionModel, compiled_already: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: None)
    packages = Packages(model, DiskCache.at(str(compiled_already)))
    call = random_call(model, (64, 64, 77), 1, make_conditioner(model, EngineConfig(), is_exact=True))
    path = packages.path(call.kind, 1)
    assert path is not None
    alone = TorchModel(str(path), -1, is_single_threaded=True)
    with torch.no_grad():
        expected = packages.load(path, 1)(call.tensors)
        for _ in range(2):
            assert torch.equal(alone.run(list(call.tensors)), expected)


@slow
def test_a_picture_is_painted_one_way_from_its_first_step_to_its_last(
    model: DiffusionModel, warmed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also in an engine that is not deterministic, which takes packages into use between two pictures."""
    monkeypatch.setattr("diffserve.engine.image.compiled_groups.LEAST_SAVED", -math.inf)
    monkeypatch.setattr(BackgroundCompiler, "enqueue", lambda *_: None)
    cache = shutil.copytree(warmed[0], tmp_path / "cache")
    shutil.rmtree(cache / "shapes")  # where it says that they are proven
    engine = engine_of(model, cache, deterministic=False, compile="background")
    before, after = picture(1, num_steps=12), picture(2, num_steps=12)
    engine.submit(before)
    for _ in range(3):
        engine.tick()
    study_all(engine)
    engine.submit(after)
    painted: dict[str, Any] = {}
    while engine.has_work:
        painted |= {
            event.request_id: event.result.latents for event in engine.tick() if isinstance(event, ImageFinished)
        }
    network = engine_of(model, "", compile="off")
    plain = {number: latents_of(network, picture(number, num_steps=12)) for number in (1, 2)}
    assert np.array_equal(painted[before.request_id], plain[1])
    assert not np.array_equal(painted[after.request_id], plain[2])
    assert np.array_equal(painted[after.request_id], latents_of(engine, picture(2, num_steps=12)))


def latents_of(engine: Engine, request: GenerationRequest) -> Any:
    return engine.generate(request)[0].latents


@slow
def test_damaged_packages_and_those_that_compute_something_else_are_not_used(
    model: DiffusionModel,
    warmed: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("diffserve.engine.image.compiled_groups.LEAST_SAVED", -math.inf)
    plain = pixels(engine_of(model, "", compile="off"), picture(1))[0]
    other = shutil.copytree(warmed[0], tmp_path / "other")
    shutil.rmtree(other / "shapes")
    honest = CompiledUNet.run
    monkeypatch.setattr(CompiledUNet, "run", lambda self, call: None if (o := honest(self, call)) is None else 1.1 * o)
    engine = engine_of(model, other)
    engine.warm_up()
    study_all(engine)
    assert np.array_equal(pixels(engine, picture(1))[0], plain)
    assert COMPILED not in engine.buckets
    monkeypatch.setattr(CompiledUNet, "run", honest)
    for has_end in (True, False):
        for package in (other / "compiled").iterdir():
            data = bytearray(package.read_bytes())
            middle = len(data) // 2
            data[middle : middle + 4096] = bytes(4096)
            package.write_bytes(data if has_end else data[:middle])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine = engine_of(model, other)
            engine.warm_up()
            study_all(engine)
            assert np.array_equal(pixels(engine, picture(1))[0], plain)
        assert "a compiled call failed" in caplog.text
        packages = engine.runners.groups.compiled.packages
        assert packages is not None
        kind = random_call(model, (64, 64, 77), 1, engine.runners.conditioner).kind
        paths = [packages.path(kind, num_rows // packages.num_streams(num_rows)) for num_rows in SIZES]
        assert not [path for path in paths if path is None or path.exists()]
        shutil.copytree(warmed[0] / "compiled", other / "compiled", dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("openvino", "member"),
    [pytest.param("2026.4", MEMBER, marks=needs_openvino), (None, "part/data/aotinductor/model/call.wrapper.so")],
)
def test_a_truncated_package_is_compiled_again(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openvino: str | None, member: str
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: openvino)
    packages = Packages(model, DiskCache(tmp_path))
    kind = random_call(model, (64, 64, 77), 1, make_conditioner(model, EngineConfig(), is_exact=True)).kind
    path = packages.path(kind, 1)
    assert path is not None
    path.parent.mkdir()
    for content, is_damaged in ((b"code", False), (b"cod3", True)):
        with ZipFile(path, "w") as package:
            package.writestr(member, b"code")
        path.write_bytes(path.read_bytes().replace(b"code", content, 1))
        assert CompiledUNet(packages).load(kind, (1,)) == ()
        is_gone = is_damaged or openvino is not None  # which is compiled again within a minute
        assert path.exists() is not is_gone, "what merely does not load may be whole"


@needs_openvino
def test_whichever_byte_of_a_package_is_another_it_is_not_used_and_nobody_fails(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: "2026.4")
    packages = Packages(model, DiskCache(tmp_path))
    kind = random_call(model, (64, 64, 77), 1, make_conditioner(model, EngineConfig(), is_exact=True)).kind
    path = packages.path(kind, 1)
    assert path is not None
    path.parent.mkdir()
    with ZipFile(path, "w") as package:
        package.writestr(MEMBER, b"no blob")
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        assert CompiledUNet(packages).load(kind, (1,)) == ()
        assert not path.exists()


@needs_openvino
def test_openvino_that_does_not_load_is_left_out(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "openvino_version", lambda: "2026.4")
    monkeypatch.setitem(sys.modules, "openvino", None)
    openvino_package._core.cache_clear()
    packages = Packages(model, DiskCache(tmp_path))
    call = random_call(model, (64, 64, 77), 1, make_conditioner(model, EngineConfig(), is_exact=True))
    path = packages.path(call.kind, 1)
    assert path is not None
    with pytest.raises(ConfigError, match=r"OpenVINO 2026\S* does not load \(.+\); repair or uninstall it"):
        packages.compile(call)
    with ZipFile(path, "w") as package:
        package.writestr(MEMBER, b"a blob")
    with caplog.at_level(logging.WARNING):
        assert CompiledUNet(packages).load(call.kind, (1,)) == ()
    assert "does not load" in caplog.text
    assert path.exists()


@needs_openvino
def test_openvino_is_imported_without_a_word_to_its_makers(tmp_path: Path) -> None:
    code = """
import sys
from diffserve.runtime.loading.library_imports import import_openvino
import_openvino().Core()
from openvino.frontend.pytorch import fx_decoder
found = [name for name in sys.modules if "telemetry" in name or name == "openvino.tools.ovc"]
assert not found, found
"""
    env = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*openvino*"))


def test_a_group_is_compiled_in_the_background_once_even_when_the_package_does_not_load(
    make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"compile": "background", "deterministic": False}
    groups = make_engine(cache_dir=str(tmp_path), **config).runners.groups.compiled
    compiler = groups._compiler
    assert compiler is not None
    expected_keys: list[GroupKey] = []
    monkeypatch.setattr(compiler, "enqueue", lambda group, _: expected_keys.append(group))
    monkeypatch.setattr(compiler, "poll", lambda: COMPILED if expected_keys else None)  # at once, and of no use
    for _ in range(5):
        if groups.is_new(COMPILED, 0.0):
            assert groups.load(COMPILED, lambda: None, SIZES) == ()
    assert expected_keys == [COMPILED]


@slow
def test_an_engine_uses_packages_compiled_in_the_background(
    model: DiffusionModel, warmed: tuple[Path, str], tmp_path: Path
) -> None:
    cache = shutil.copytree(warmed[0], tmp_path / "cache")
    moved = replace(model, profile=msgspec.structs.replace(model.profile, path=str(warmed[0].parent / "model")))
    compiler = BackgroundCompiler(moved, EngineConfig(cache_dir=str(cache)))
    compiler.enqueue(COMPILED, SIZES)
    assert compiler.poll() is None
    until_s = time.monotonic() + START_S
    while (done := compiler.poll()) is None and time.monotonic() < until_s:
        time.sleep(0.1)
    assert done == COMPILED
    compiler.close()


@slow
def test_the_background_compiler_ends_with_its_engine(model: DiffusionModel, warmed: tuple[Path, str]) -> None:
    order = order_of(
        model,
        warmed[0].parent / "model",
        group=PLAIN,
        sizes=[1],
        cache_dir="",
        in_background=True,
        needs_weights=True,
        memory_format="contiguous",
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "diffserve.engine.image.compiling"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(order) + "\n")
    child.stdin.close()
    assert child.wait(START_S) != 0


def test_the_oldest_packages_go_and_what_a_killed_compiler_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_PACKAGES", 2)
    now_s = time.time()
    for age_s, name in enumerate(("c.pt2", "b.openvino", "a.pt2")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now_s, now_s - age_s))
    for age_s, name in ((60, ".going"), (int(compiled.LONGEST_COMPILE_S) + 60, ".left")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.pt2").touch()
        os.utime(tmp_path / name, (now_s, now_s - age_s))
    compiled._remove_oldest(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"c.pt2", "b.openvino", ".going"}


@slow
def test_packages_of_int8_use_the_weights_of_the_network_and_nothing_that_another_compiler_left(
    directory: Path, compiled_already: Path
) -> None:
    model, cache = load_model(directory, dtype="int8", device="cpu"), compiled_already
    conditioner = make_conditioner(model, EngineConfig(), is_exact=True)
    packages = Packages(model, DiskCache.at(str(cache)))
    assert not packages.is_baked
    suffixes = sorted(entry.suffix for entry in (cache / "compiled").iterdir())
    assert suffixes == [".openvino", ".openvino", ".pt2", ".pt2"]
    with torch.no_grad():
        call = random_call(model, (64, 64, 77), 1, conditioner, lora_rank=16)
        path = packages.path(call.kind, 1)
        assert path is not None
        package = packages.load(path, 1)
        expected = FlatUNet(model.unet.network, call)(*call.tensors)
        assert torch.allclose(package(call.tensors).float(), expected.float(), rtol=0.02, atol=0.02)
        model.unet.network.conv_out.weight.zero_()
        changed = FlatUNet(model.unet.network, call)(*call.tensors)
        assert (changed - expected).abs().mean() > 0.1
        assert torch.allclose(package(call.tensors).float(), changed.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"cache_dir": ""}, "cache_dir is empty"), ({"cache_dir": "x"}, "int8_static are not compiled")],
)
def test_the_reason_for_not_compiling_is_reported(
    make_engine: Callable[..., Engine], config: dict[str, str], reason: str
) -> None:
    loaded = make_engine(cache_dir="").model
    in_static = replace(loaded, choice=replace(loaded.choice, dtype="int8_static"))
    packages = Packages(in_static if "int8_static" in reason else loaded, DiskCache.at(config["cache_dir"]))
    assert packages.reason is not None
    assert reason in packages.reason
    assert packages.path(((1,),), 1) is None


def trial(scale: float, wall_s: float, odd_size: int = 0) -> Try:
    """Return calls that output their row numbers, except for a wrong output in calls of ``odd_size`` rows."""

    def attempt(rows: range, _num_threads: int) -> Trial:
        output = scale * (1.0 + torch.arange(max(rows) + 1)[list(rows)].float().view(-1, 1, 1, 1))
        return Trial(output + 1e-4 * (len(rows) == odd_size), wall_s * len(rows))

    return attempt


def proven(compiled: Try, sizes: tuple[int, ...] = (1, 2, 4)) -> tuple[GroupFacts, CostCurve]:
    curve = CostCurve(sizes)
    going = prove(trial(1.0, 1.0), compiled, sizes, counts=(1,), closeness=1e-3, curve=curve, is_exact=True)
    return end_of(going), curve


def test_packages_without_a_size_that_decides_bytes_are_refused_with_a_reason() -> None:
    calls: dict[str, Any] = {"counts": (1,), "closeness": 1e-3}
    with pytest.raises(ArithmeticError, match="no package of 1 or of 4 rows"):
        end_of(check(trial(1.0, 1.0), trial(1.0, 0.5), (2,), **calls, is_exact=True))
    assert end_of(check(trial(1.0, 1.0), trial(1.0, 0.5), (2,), **calls, is_exact=False)).buckets == (2,)


def test_compiled_calls_are_timed_in_pairs_and_used_where_they_save_something() -> None:
    facts, curve = proven(trial(1.0, 0.5))
    assert facts.buckets == (1, 2, 4)
    assert facts.seconds == {1: 0.5, 2: 1.0, 4: 2.0}
    assert is_worth(COMPILED, facts, curve, (1, 2, 4))
    slower, curve = proven(trial(1.0, 0.99))
    assert not is_worth(COMPILED, slower, curve, (1, 2, 4))


def test_what_a_size_costs_is_what_its_calls_take_one_after_the_other() -> None:
    """The first call after another network's call starts with cold caches."""
    last: list[str] = []

    def report_attempt(name: str, attempt: Try, cold_s: float = 0.0) -> Try:
        def call(rows: range, count: int) -> Trial:
            is_cold = last[-1:] != [name]
            last.append(name)
            return (done := attempt(rows, count))._replace(wall_s=done.wall_s + is_cold * cold_s)

        return call

    sizes = (1, 2, 4)
    options: Any = {"counts": (1,), "closeness": 1e-3, "curve": CostCurve(sizes), "is_exact": True}
    facts = end_of(
        prove(
            report_attempt("network", trial(1.0, 1.0)), report_attempt("ours", trial(1.0, 0.5), 0.4), sizes, **options
        )
    )
    assert facts.seconds == {1: 0.5, 2: 1.0, 4: 2.0}
    assert facts.is_complete


def test_on_a_busy_machine_the_verdict_comes_from_agreeing_pairs() -> None:
    loads = itertools.cycle((1.0, 3.0, 2.0))

    def run_in_background(attempt: Try, load: Callable[[], float]) -> Try:
        return lambda rows, count: (done := attempt(rows, count))._replace(wall_s=load() * done.wall_s)

    now = [1.0]

    def paired() -> float:  # as busy for both of a pair
        now[0] = next(loads)
        return now[0]

    curve = CostCurve(SIZES)
    curve.observe(1, 1.0)
    curve.observe(2, 2.0)  # as they were on a quiet machine
    options: Any = {"counts": (1,), "closeness": 1e-3, "curve": curve, "is_exact": True}
    facts = end_of(
        prove(
            run_in_background(trial(1.0, 1.0), paired),
            run_in_background(trial(1.0, 0.5), lambda: now[0]),
            SIZES,
            **options,
        )
    )
    assert facts.is_complete
    assert is_worth(COMPILED, facts, curve, SIZES)
    alone = end_of(prove(trial(1.0, 1.0), run_in_background(trial(1.0, 0.5), lambda: next(loads)), SIZES, **options))
    assert not alone.is_complete


def test_who_was_not_clearly_faster_is_looked_at_again_later(make_engine: Callable[..., Engine]) -> None:
    compiled = make_engine(cache_dir="").runners.groups.compiled
    compiled.load(COMPILED, lambda: None, SIZES)
    assert not compiled.is_new(COMPILED, 0.0)
    compiled.doubt(COMPILED, 0.0)
    assert COMPILED in compiled._doubted
    assert not compiled.is_new(COMPILED, DOUBT_S - 1.0)
    assert compiled.is_new(COMPILED, DOUBT_S)
    compiled.load(COMPILED, lambda: None, SIZES)
    assert COMPILED not in compiled._doubted


def test_a_size_whose_rows_differ_is_left_out() -> None:
    facts, _ = proven(trial(1.0, 0.5, odd_size=2))
    assert facts.buckets == (1, 4)
    facts, _ = proven(trial(1.0, 0.5, odd_size=1))
    assert facts.buckets == (2, 4)


def test_what_computes_something_else_is_refused() -> None:
    with pytest.raises(ArithmeticError, match=r"compiled call of 1 rows is 0\.1 off"):
        proven(trial(1.1, 0.5))
    with pytest.raises(ArithmeticError):
        proven(trial(math.nan, 0.5))
