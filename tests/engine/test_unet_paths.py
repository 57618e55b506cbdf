"""UNet paths: chosen once per shape, stored by a server, and never changed while an engine runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import ConfigError
from diffserve.api.types import GenerationRequest, ServedModel, UNetPath
from diffserve.engine import Engine
from diffserve.engine.image import compiling
from diffserve.engine.image.compiling import CompileError, compile_group
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.unet import compiled
from diffserve.runtime.unet.batch_invariance import GroupFacts
from diffserve.runtime.unet.compiled import Packages
from diffserve.settings.config import EngineConfig
from diffserve.store.unet_paths import FILE, UNetPathFile
from tests.engine.capturing import captures_of, resume
from tests.engine.pipelines import image_request
from tests.hardware import needs_openvino
from tests.tiny_models import ONE_LEVEL

slow = pytest.mark.slow
# builds at start need OpenVINO: packages of another compiler are only built by ``diffserve warm``
NATIVE = GroupKey(64, 64, 77)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> DiffusionModel:
    return load_model(tiny_model(ONE_LEVEL), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def packages(model: DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with unchecked packages of one and two rows at the native size."""
    cache = tmp_path_factory.mktemp("packages")
    engine = engine_of(model, cache)
    packages = engine.runners.groups.compiled.packages
    assert packages is not None
    compile_group(model, engine.runners.conditioner, packages, NATIVE, (1, 2))
    return cache


def engine_of(model: DiffusionModel, cache: Path, paths: Sequence[UNetPath] | None = None, **config: Any) -> Engine:
    served = None if paths is None else tuple(paths)
    return Engine(model, EngineConfig(max_rows=2, cache_dir=str(cache), served_paths=served, **config))


def request(seed: int = 1) -> GenerationRequest:
    return image_request("sd15", "ddim", seed=seed, num_steps=2)


def latents(engine: Engine, seed: int = 1) -> Any:
    return engine.generate(request(seed))[0].latents


class FakePackages:
    """Packages that are empty files, checked before, whose calls return zeros.

    opened   the numbers of rows of the packages that were loaded, in order
    damaged  numbers of rows whose packages do not load
    """

    def __init__(self, model: DiffusionModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[int] = []
        self.damaged: set[int] = set()
        self.error: Exception = ValueError("some bytes are wrong")
        monkeypatch.setattr(compiled, "openvino_version", lambda: "0.0")
        monkeypatch.setattr(Packages, "load", lambda _, path, num_rows: self.load(num_rows))
        self._groups = self.engine(model, cache).runners.groups
        packages, kind = self._groups.compiled.packages, self._groups._kind(NATIVE)
        assert packages is not None
        monkeypatch.setattr(packages.__class__, "num_streams", lambda _, num_rows: 1)
        for num_rows in (1, 2, 4):
            path = packages.path(kind, num_rows)
            assert path is not None
            path.parent.mkdir(exist_ok=True)
            path.touch()
        self.write_facts(1, 2, 4)

    def engine(self, model: DiffusionModel, cache: Path, paths: Sequence[UNetPath] | None = None) -> Engine:
        served = None if paths is None else tuple(paths)
        return Engine(model, EngineConfig(max_rows=4, cache_dir=str(cache), served_paths=served))

    def write_facts(self, *sizes: int) -> None:
        facts = GroupFacts(buckets=sizes, counts=self._groups.threads.counts[:1], seconds=dict.fromkeys(sizes, 1e-6))
        compiled_group = NATIVE._replace(is_compiled=True)
        self._groups._disk.write(self._groups._name_of_packages(compiled_group, sizes), facts)

    def load(self, num_rows: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        if num_rows in self.damaged:
            raise self.error
        self.opened.append(num_rows)
        return lambda tensors: torch.zeros_like(tensors[0])


@pytest.fixture
def fake(model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackages:
    return FakePackages(model, tmp_path, monkeypatch)


def never_compile(*_: Any) -> None:
    raise AssertionError("an engine compiled although its packages were there")


def copied_from(packages: Path, cache: Path) -> Callable[..., None]:
    """Return a compiler that copies packages and takes no time."""

    def compile_in_child(*_: Any) -> None:
        shutil.copytree(packages / "compiled", cache / "compiled", dirs_exist_ok=True)

    return compile_in_child


@slow
def test_an_engine_takes_packages_at_its_first_image(model: DiffusionModel, packages: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(packages, tmp_path / "cache"))
    engine = engine_of(model, cache)
    compiled = latents(engine)
    (path,) = engine.unet_paths
    assert (path.path, path.width_px, path.height_px) == ("compiled", 64, 64)
    assert "found in the cache folder" in path.reason
    assert not np.array_equal(compiled, latents(engine_of(model, cache, compile="off")))


@slow
def test_a_seed_keeps_its_bytes_when_packages_appear_while_the_engine_runs(
    model: DiffusionModel, packages: Path, tmp_path: Path
) -> None:
    engine = engine_of(model, tmp_path)
    before = latents(engine)
    assert [path.path for path in engine.unet_paths] == ["plain"]
    shutil.copytree(packages / "compiled", tmp_path / "compiled", dirs_exist_ok=True)
    while engine.study():
        pass
    assert np.array_equal(latents(engine), before)
    restarted = engine_of(model, tmp_path, engine.unet_paths)
    restarted.warm_up()
    assert np.array_equal(latents(restarted), before), "a stored path must be kept by the next engine"


@slow
def test_a_captured_image_continues_by_the_calls_that_began_it(
    model: DiffusionModel, packages: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Path(shutil.copytree(packages, tmp_path / "cache"))
    order = image_request("sd15", "dpmpp_2m", seed=1, num_steps=6)
    with_packages, without = partial(engine_of, model, cache), partial(engine_of, model, tmp_path / "none")
    compiled, [by_packages] = captures_of(with_packages(), order)
    plain, [by_network] = captures_of(without(), order)
    assert by_packages.latents != by_network.latents
    for capture, engine, expected in (
        (compiled[-1], with_packages(), by_packages),
        (plain[-1], without(), by_network),
        (plain[-1], with_packages(), by_network),
    ):
        [result], num_rows = resume(engine, order, capture)
        assert result.latents == expected.latents
        assert num_rows < expected.num_evaluations
    assert "captured state" not in caplog.text
    [result], num_rows = resume(without(), order, compiled[-1])
    assert "its UNet calls were compiled, and here they are not" in caplog.text
    assert (result.latents, num_rows) == (by_network.latents, by_network.num_evaluations)


@slow
@needs_openvino
def test_a_served_engine_builds_missing_packages_before_it_is_ready_and_a_lost_cache_changes_no_bytes(
    model: DiffusionModel, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_in_child", copied_from(packages, tmp_path / "first"))
    first = engine_of(model, tmp_path / "first", ())
    first.warm_up()
    (path,) = first.unet_paths
    assert path.path == "compiled"
    assert "built at start" in path.reason
    monkeypatch.setattr(compiling, "compile_in_child", never_compile)
    again = engine_of(model, tmp_path / "first", (path,))
    again.warm_up()
    monkeypatch.setattr(compiling, "compile_in_child", copied_from(packages, tmp_path / "second"))
    elsewhere = engine_of(model, tmp_path / "second", (path,))
    elsewhere.warm_up()
    expected = latents(first)
    assert np.array_equal(latents(again), expected)
    assert np.array_equal(latents(elsewhere), expected)


@pytest.mark.parametrize("setting", ["warm", "off"])
def test_a_server_with_building_disabled_uses_the_network(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Any
) -> None:
    monkeypatch.setattr(compiling, "compile_in_child", never_compile)
    engine = engine_of(model, tmp_path, (), compile=setting)
    engine.warm_up()
    assert not any(path.path == "compiled" for path in engine.unet_paths)


def test_an_engine_outside_a_server_opens_only_the_packages_that_it_calls(
    model: DiffusionModel, fake: FakePackages, tmp_path: Path
) -> None:
    engine = fake.engine(model, tmp_path)
    engine.generate(request())
    assert [path.path for path in engine.unet_paths] == ["compiled"]
    assert fake.opened == [2]
    engine.generate(request())
    assert fake.opened == [2], "a package is opened once"
    engine.generate([request(1), request(2)])
    assert fake.opened == [2, 4]


def test_a_server_opens_all_packages_before_it_is_ready(
    model: DiffusionModel, fake: FakePackages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_in_child", never_compile)
    fake.engine(model, tmp_path, ()).warm_up()
    assert fake.opened == [1, 2, 4]


def test_where_the_first_package_does_not_load_the_others_are_used(
    model: DiffusionModel, fake: FakePackages, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.damaged, engine = {2}, fake.engine(model, tmp_path)
    fake.write_facts(1, 4)
    engine.generate(request())
    assert [path.path for path in engine.unet_paths] == ["compiled"]
    assert fake.opened == [1, 4]
    assert "some bytes are wrong" in caplog.text


def test_where_no_package_loads_an_image_is_painted_by_the_network(
    model: DiffusionModel, fake: FakePackages, tmp_path: Path
) -> None:
    fake.damaged, fake.error = {1, 2, 4}, ConfigError("OpenVINO does not load", param="compile")
    engine = fake.engine(model, tmp_path)
    painted = latents(engine)
    assert [path.path for path in engine.unet_paths] == ["plain"]
    assert np.array_equal(painted, latents(engine_of(model, tmp_path, compile="off")))


def test_a_package_that_does_not_load_later_is_replaced_by_those_of_other_sizes(
    model: DiffusionModel, fake: FakePackages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.damaged, engine = {4}, fake.engine(model, tmp_path)
    fake.write_facts(1, 2)
    engine.generate(request())
    monkeypatch.setattr(model.unet.network, "forward", never_compile)
    assert len(engine.generate([request(1), request(2)])) == 2
    assert engine.buckets[NATIVE._replace(is_compiled=True)] == (1, 2)


def test_an_engine_outside_a_server_never_compiles(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_in_child", never_compile)
    engine = engine_of(model, tmp_path)
    engine.warm_up()
    (path,) = engine.unet_paths
    assert path.path == "plain"
    assert "diffserve warm --size 64x64" in path.reason


@needs_openvino
def test_where_compiling_fails_the_network_serves_and_the_reason_is_reported(
    model: DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("No space left on device")

    monkeypatch.setattr(compiling, "compile_in_child", fail)
    engine = engine_of(model, tmp_path, ())
    engine.warm_up()
    (path,) = engine.unet_paths
    assert path.path == "plain"
    assert path.reason == "compiling failed: No space left on device"
    assert latents(engine) is not None
    stored = msgspec.structs.replace(path, path="compiled")
    engine_of(model, tmp_path, (stored,)).warm_up()
    assert "stored as compiled, but compiling failed" in caplog.text


def test_choices_of_another_setting_model_or_compiler_are_not_followed(model: DiffusionModel, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    packages = engine.runners.groups.compiled.packages
    assert isinstance(packages, Packages)
    keys = {compiling.path_key(model, packages, setting) for setting in ("auto", "warm")}
    assert len(keys) == 2


def served(*paths: UNetPath) -> list[ServedModel]:
    return [ServedModel(name="model", info=None, is_loaded=True, unet_paths=paths)]


def test_stored_paths_are_kept_unless_they_are_overwritten(tmp_path: Path) -> None:
    plain = UNetPath(key="k", height_px=64, width_px=64, num_tokens=77, reason="first")
    compiled = msgspec.structs.replace(plain, path="compiled", reason="second")
    larger = msgspec.structs.replace(plain, width_px=128)
    server, other = UNetPathFile(tmp_path), UNetPathFile(tmp_path)
    assert not server.exists()
    server.remember(served(plain))
    other.remember(served(compiled, larger))
    assert server.paths() == other.paths() == (plain, larger)
    other.store([compiled], overwrite=True)
    assert set(UNetPathFile(tmp_path).paths()) == {compiled, larger}
    server.remember(served(plain, larger))
    assert set(UNetPathFile(tmp_path).paths()) == {compiled, larger}, "a running server does not undo `warm`"


def test_paths_stay_in_memory_where_the_folder_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = UNetPath(key="k", height_px=64, width_px=64, num_tokens=77)
    file = UNetPathFile(tmp_path / "missing")
    file.remember(served(path))
    file.remember(served(path, msgspec.structs.replace(path, width_px=128)))
    assert len(file.paths()) == 2
    assert caplog.text.count("UNet paths cannot be stored") == 1
    (tmp_path / FILE).write_text("{damaged")
    assert UNetPathFile(tmp_path).paths() == ()
