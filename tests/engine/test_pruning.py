"""Pruned models: units that add nothing are cut first, and all layers follow the smaller widths.

A side file that belongs to another network is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from diffserve.api.errors import ConfigError, ModelLoadError
from diffserve.api.types import Event, GenerationRequest, ImageResult
from diffserve.cli import main
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.runtime.footprint import footprint_of, meta_copy
from diffserve.runtime.loading.pruned import prune_directory
from diffserve.runtime.precision import cpu_int8_unit
from diffserve.runtime.unet.compiled import _package_identity
from diffserve.runtime.unet.pruning import PRUNED_FILE, Shares, prune, widths_of
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.pipelines import image_request
from tests.engine.test_deep_cache import content, painted_by_seed

HALF = Shares(heads=0.5, channels=0.5)
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
TOLERANCE = 1e-5
"""Of the largest latent: shorter sums are rounded otherwise, and guidance multiplies that."""

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """``pair(kind)``: the tiny model with half of its heads and channels silenced, and the same one with half cut."""
    pairs: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in pairs:
            folder = tmp_path_factory.mktemp(kind)
            original = shutil.copytree(tiny_model(kind), folder / "whole")
            silence(original)
            prune_directory(original, folder / "pruned", HALF)
            pairs[kind] = original, folder / "pruned"
        return pairs[kind]

    return make


def silence(directory: Path) -> None:
    """Every second head and channel of the UNet adds nothing: its values, its gate or its output are zero, in turns."""
    weights = load_file(directory / WEIGHTS)
    for name, heads in widths_of(load_model(directory, device="meta", dtype="float32").unet.network).heads.items():
        if heads > 1:
            weights[f"{name}.to_v.weight"].unflatten(0, (heads, -1))[1::4] = 0
            weights[f"{name}.to_out.0.weight"].unflatten(1, (heads, -1))[:, 3::4] = 0
    for name in [name.removesuffix(".net.2.weight") for name in weights if name.endswith(".net.2.weight")]:
        channels = weights[f"{name}.net.2.weight"].shape[1]
        weights[f"{name}.net.2.weight"][:, 1::4] = 0
        for part in ("weight", "bias"):
            weights[f"{name}.net.0.proj.{part}"][channels + 3 :: 4] = 0
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


def engine_of(directory: Path, **config: object) -> Engine:
    model = load_model(directory, dtype="float32", device=DEVICE)
    return Engine(model, EngineConfig(**{"cache_dir": "", **config}))  # type: ignore[arg-type]


def company(kind: str) -> list[GenerationRequest]:
    """Return requests that share nothing but their size; one uses DeepCache."""
    return [
        image_request(kind, "ddim", 1, num_steps=4, cache_interval=2),
        image_request(kind, "dpmpp_2m", 2, num_steps=3, prompt="cat", guidance_scale=1.0),
        image_request(kind, "euler_a", 3, num_steps=4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_pruned_model_paints_what_the_whole_one_does_where_the_cut_adds_nothing(
    kind: str, pair: Callable[[str], Pair]
) -> None:
    original, pruned = map(widths, pair(kind))
    assert all(
        after == max(1, before // 2)
        for part in ("heads", "channels")
        for before, after in zip(original[part].values(), pruned[part].values(), strict=True)
    )
    requests = company(kind)
    before, after, plain = (
        [latents(result) for result in engine_of(directory, cross_attention=how).generate(requests)]
        for directory, how in zip((*pair(kind), pair(kind)[1]), ("paged", "paged", "plain"), strict=True)
    )
    for first_result, other, third in zip(before, after, plain, strict=True):
        bound = TOLERANCE * np.abs(first_result).max()
        np.testing.assert_allclose(other, first_result, rtol=0, atol=bound)
        np.testing.assert_allclose(third, other, rtol=0, atol=bound)


def latents(result: ImageResult) -> NDArray[np.float32]:
    assert result.latents is not None
    return result.latents.array


def widths(directory: Path) -> dict[str, dict[str, int]]:
    widths = widths_of(load_model(directory, device="meta", dtype="float32").unet.network)
    return {"heads": widths.heads, "channels": widths.channels}


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_bytes_of_a_pruned_model_depend_on_neither_company_nor_arrival_nor_loading(
    kind: str, pair: Callable[[str], Pair]
) -> None:
    alone, engine = (engine_of(pair(kind)[1], max_rows=16) for _ in range(2))
    assert alone.model.digest == engine.model.digest != load_model(pair(kind)[0], dtype="float32", device=DEVICE).digest
    expected = {request.seed: content(alone.generate(request)[0]) for request in company(kind)}
    events: list[Event] = []
    for request in reversed(company(kind)):
        engine.submit(request)
        events += engine.tick()
    assert painted_by_seed(events + list(engine.events())) == expected
    engine.check_integrity()


@pytest.mark.slow
def test_what_reads_shapes_follows_the_pruned_network(pair: Callable[[str], Pair]) -> None:
    original, pruned = pair("sd15")
    loaded = [load_model(directory, dtype="float32", device=DEVICE) for directory in (original, pruned)]
    assert _package_identity(loaded[0], is_baked=False) != _package_identity(loaded[1], is_baked=False)
    for directory, model in zip((original, pruned), loaded, strict=True):
        assert widths_of(meta_copy(model).unet.network) == widths_of(model.unet.network)
        footprint = footprint_of(directory, dtype="float32", config=EngineConfig(), profile=None, rows=(1,))
        assert footprint.model.memory_report() == model.memory_report()
    narrow = load_model(pruned, dtype="int8_dynamic" if cpu_int8_unit() else "int8", device=DEVICE).unet.network
    assert widths_of(narrow) == widths_of(loaded[1].unet.network)
    prune(loaded[0].unet.network, HALF)
    same = loaded[0].unet.network.state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in loaded[1].unet.network.state_dict().items())


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ({"format": 2}, "format is 2; this diffserve reads 1"),
        ({"more": 1}, "unknown field `more`"),
        ({"heads": {"no_block": 1}}, "for other layers than this UNet has, for example"),
        ({"first head": 0}, "Expected `int` >= 1"),
        ({"first head": 9}, "is to keep 9 heads, and the configuration has 8"),
    ],
)
def test_damaged_side_file_is_refused(
    manifest: str | dict[str, object], message: str, pair: Callable[[str], Pair], tmp_path: Path
) -> None:
    directory = shutil.copytree(pair("sd15")[1], tmp_path / "model")
    file = directory / "unet" / PRUNED_FILE
    if isinstance(manifest, dict):
        content = json.loads(file.read_text())
        if "first head" in manifest:
            manifest = {"heads": {**content["heads"], next(iter(content["heads"])): manifest["first head"]}}
        manifest = json.dumps(content | manifest)
    file.write_text(manifest)
    with pytest.raises(ConfigError, match=r"pruned\.json cannot be used: .*prune the model anew") as caught:
        load_model(directory, dtype="float32", device="meta")
    assert message in caught.value.message
    file.unlink()
    with pytest.raises(ModelLoadError, match="the configured network expects"):
        load_model(directory, dtype="float32", device="meta")


@pytest.mark.slow
def test_the_command_says_what_is_left_and_refuses_what_it_cannot_do(
    pair: Callable[[str], Pair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pair("sd15")[1]
    capsys.readouterr()  # what libraries say when they are imported

    def run(*arguments: str, output: Path = tmp_path / "new") -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main(["prune", "--model", str(model), "-o", str(output), *arguments])
        cli_output = capsys.readouterr()
        return int(str(stop.value.code)), cli_output.out + cli_output.err

    assert run("--heads", "1.5")[1] == "diffserve: heads is 1.5; it must lie between 0.0 and 0.9.\n"
    assert "remove nothing" in run()[1]
    assert "exists, and nothing is overwritten" in run("--heads", "0.5", output=tmp_path)[1]
    assert "/proc/x cannot be written: " in run("--heads", "0.5", output=Path("/proc/x"))[1]
    assert not list(tmp_path.iterdir())
    code, cli_output = run("--heads", "0.25", "--channels", "0.25")
    assert (code, [line.split()[0] for line in cli_output.splitlines()[1:4]]) == (0, ["million", "MiB", "GFLOP"])
    assert set(widths(tmp_path / "new")["heads"].values()) == {3}  # of the four that were left
