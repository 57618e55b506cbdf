"""Adapters of single requests: rows with different ones share UNet calls, and each is as if the model were merged."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import load_file, save_file

from benchmarks.random_models import lora_tensors
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import TERMINAL, GenerationRequest, ImageFinished, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image.task import GroupKey
from diffserve.media.infotext import parse_infotext, write_infotext
from diffserve.models.lora_layers import LayerChange
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import hushed
from diffserve.runtime.loading.lora import LoRAFile
from diffserve.runtime.low_rank import adaptable, factor_bytes, random_set, shape_of
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.loras import QUERIES, kohya_tensors, with_folder, write_folder
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, pipeline_latents

MakeEngine = Callable[..., Engine]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _models: Callable[[str], Any]) -> Path:
    return write_folder(tmp_path_factory.mktemp("loras"), _models("sd15"))


@pytest.fixture
def make(folder: Path, _models: Callable[[str], Any]) -> MakeEngine:
    def make_engine(kind: str = "sd15", **config: Any) -> Engine:
        return Engine(with_folder(_models(kind), folder), EngineConfig(**config))

    return make_engine


def lora_request(
    *loras: str, seed: int = 1, sampler: str = "ddim", kind: str = "sd15", **extra_fields: Any
) -> GenerationRequest:
    tags = "".join(f" <lora:{lora}>" for lora in loras)
    return image_request(kind, sampler, seed, prompt=f"cat{tags}", **({"num_steps": 2} | extra_fields))


def latents(result: ImageResult) -> Any:
    assert result.latents is not None
    return result.latents.array


def everybody() -> list[GenerationRequest]:
    return [
        lora_request("queries", seed=1),
        lora_request("kernels", seed=4),
        lora_request("attention:0.7", seed=2, guidance_scale=1.0),
        lora_request(seed=3),
        lora_request("queries:-1.5", "kernels:0.3", seed=5, sampler="euler_a", num_steps=3),
        lora_request("everything", seed=6),
        lora_request("queries", seed=7, cache_interval=2, num_steps=4),
    ]


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("sd15", "sdxl") for way in ("paged", "plain")],
)
@pytest.mark.slow
def test_a_picture_is_that_of_the_merged_model(
    kind: str, way: Any, tiny_model: Callable[[str], Path], loaded: Callable[[str], Any], tmp_path: Path
) -> None:
    """``everything`` changes linear layers, convolutions of every kind, keys and values, and the text encoders."""
    model = with_folder(loaded(kind), write_folder(tmp_path, loaded(kind)))
    (tmp_path / "adapter.json").write_text(json.dumps({"base": str(tiny_model(kind))}))
    (tmp_path / "pytorch_lora_weights.safetensors").symlink_to(tmp_path / "everything.safetensors")
    merged = load_model(tmp_path, dtype="float32", device=DEVICE)
    [reference] = Engine(merged, EngineConfig(cross_attention=way)).generate(lora_request(seed=6))
    engine = Engine(model, EngineConfig(cross_attention=way))
    plain, result, again = engine.generate(
        [lora_request(seed=6), lora_request("everything", seed=6), lora_request(seed=6)]
    )
    assert np.abs(latents(result) - latents(reference)).max() < TOLERANCE
    assert np.abs(latents(plain) - latents(reference)).max() > 100 * TOLERANCE
    assert plain.picture == again.picture, "a text was told as an adapter had it"
    assert (result.prompt, [str(lora) for lora in result.loras]) == ("cat", ["everything:1"])
    engine.check_integrity()


def test_adapters_add_up_in_proportion_to_their_scales(make: MakeEngine) -> None:
    """The first step's change of a linear layer at scales that cancel is none; two halves are a whole."""
    engine = make()
    none, cancelled, full_result, halves = engine.generate(
        [
            lora_request(),
            lora_request("attention:0.6", "attention:-0.6"),
            lora_request("attention"),
            lora_request("attention:0.5", "attention:.5"),
        ]
    )
    assert np.abs(latents(cancelled) - latents(none)).max() < TOLERANCE
    assert np.abs(latents(halves) - latents(full_result)).max() < TOLERANCE
    assert np.abs(latents(full_result) - latents(none)).max() > 10 * TOLERANCE


@pytest.mark.parametrize("max_rows", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_rows_with_different_adapters_share_calls_and_none_depends_on_another(max_rows: int, make: MakeEngine) -> None:
    company = everybody()[: max_rows // 2]
    alone = {request.seed: make().generate(request)[0] for request in company}
    engine = make(max_rows=max_rows)
    engine.runners.groups.learn(engine.runners.group_of_short_prompts(64, 64)._replace(lora_rank=16))
    engine.generate(company)  # adapters are read in the background; all are loaded from now on
    together = engine.generate(company)
    for result in together:
        assert np.array_equal(latents(result), latents(alone[result.seed]))
        assert result.picture == alone[result.seed].picture
    asked_for = {result.request_id: result.loras for result in together}
    calls = [call for tick in engine.trace for call in tick.calls]
    kinds = [{asked_for[row.request_id] for row in call.rows} for call in calls]
    assert max(map(len, kinds)) == min(4, max_rows // 2), "rows of different adapters did not share a call"
    engine.check_integrity()


@pytest.mark.slow
def test_over_int8_weights_adapters_change_what_they_change_in_full(
    folder: Path, tiny_model: Callable[[str], Path], make: MakeEngine
) -> None:
    quantised = load_model(tiny_model("sd15"), dtype="int8", device=DEVICE)
    engine = Engine(with_folder(quantised, folder), EngineConfig())
    base, result = engine.generate([lora_request(seed=6), lora_request("everything", seed=6)])
    exact_base, exact = make().generate([lora_request(seed=6), lora_request("everything", seed=6)])
    change, exact_change = latents(result) - latents(base), latents(exact) - latents(exact_base)
    assert np.linalg.norm(change - exact_change) < 0.1 * np.linalg.norm(exact_change)


def test_outside_of_their_calls_nothing_is_left_of_adapters(make: MakeEngine) -> None:
    engine = make()
    engine.generate(lora_request("everything"))
    networks = [engine.model.unet.network, *(encoder.network for encoder in engine.model.text.encoders)]
    assert not any(module._forward_hooks for network in networks for module in network.modules())


def test_parameters_tell_the_digest_of_a_file_as_a1111_does_whatever_is_written_into_its_header(
    make: MakeEngine, folder: Path
) -> None:
    engine = make(result_cache_bytes=1 << 20)
    text = (folder / "queries.safetensors").read_bytes()
    digest = hashlib.sha256(text[8 + int.from_bytes(text[:8], "little") :]).hexdigest()
    for _ in ("painted", "known"):
        [result] = engine.generate(lora_request("queries:0.5"))
        fields = parse_infotext(write_infotext(result, width_px=64, height_px=64)).fields
        assert fields["Lora hashes"] == f"queries: {digest[:12]}"
    assert "Lora hashes" not in write_infotext(engine.generate(lora_request())[0], width_px=64, height_px=64)


def test_memory_goes_to_the_most_recent_and_a_changed_file_is_read_again(
    folder: Path, tmp_path: Path, loaded: Callable[[str], Any]
) -> None:
    model = with_folder(loaded("sd15"), write_folder(tmp_path, loaded("sd15")))
    engine = Engine(model, EngineConfig(result_cache_bytes=1 << 20, lora_bytes=1))
    shelf = engine.runners.loras
    first, again = engine.generate(lora_request("queries")), engine.generate(lora_request("queries"))
    assert (again[0].cached, len(shelf._kept), len(shelf._alive)) == ("hit", 0, 0)
    save_file(lora_tensors(model, QUERIES, seed=99, rank=2), tmp_path / "queries.safetensors")
    [other] = engine.generate(lora_request("queries"))
    assert other.cached is None
    assert other.picture != first[0].picture
    adapters = shelf.take(lora_request("kernels").diffusion.loras)
    assert shelf.take(lora_request("kernels").diffusion.loras) is adapters, "one that is in use was read twice"


def test_what_cannot_be_taken_is_refused_in_one_sentence_and_nobody_else_is_touched(
    tmp_path: Path, loaded: Callable[[str], Any]
) -> None:
    model = with_folder(loaded("sd15"), write_folder(tmp_path, loaded("sd15")))
    good = load_file(tmp_path / "queries.safetensors")
    names = [*good]
    save_file(lora_tensors(loaded("sdxl"), (".to_q",), 0, 4), tmp_path / "xl.safetensors")
    save_file(good | {names[0]: torch.ones(3, 32)}, tmp_path / "torn.safetensors")
    save_file(good | {"unet.conv_in.oft_blocks": torch.ones(4, 8, 8)}, tmp_path / "turned.safetensors")
    save_file({"image_proj.norm.bias": torch.ones(4)}, tmp_path / "face.safetensors")
    save_file(lora_tensors(model, (".attn1.to_q",), 0, 300), tmp_path / "huge.safetensors")
    save_file(lora_tensors(model, (".attn1.to_q",), 0, 256), tmp_path / "wide.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "queries.safetensors").read_bytes()[:100])
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    engine = Engine(model, EngineConfig())
    neighbour = engine.submit(lora_request("queries", seed=5))
    for tags, message in {
        ("nowhere",): "there is no LoRA 'nowhere'; the known ones are attention, everything",
        ("xl",): "LoRA 'xl' cannot be used: tensor ",
        ("torn",): "their ranks must be equal",
        ("turned",): "is OFT",
        ("face",): "LoRA 'face' cannot be used: face.safetensors holds an IP-Adapter",
        ("cut",): "is not a complete safetensors file",
        ("huge",): "has rank 300; at most 256 is allowed",
        ("queries", "wide"): "the ranks of these LoRAs are 258 together; at most 256",
        ("queries", "style/queries:0.5"): "there is no LoRA 'style/queries'",
    }.items():
        with pytest.raises(InvalidRequest, match=message) as refused:
            engine.submit(lora_request(*tags))
        assert refused.value.param == "loras"
        assert str(tmp_path) not in refused.value.message
    for malformed, message in {
        ("../queries",): "give a path below the folder",
        ("queries:nan",): "scale of LoRA 'queries' is nan",
        ("queries:x",): "write NAME or NAME:SCALE",
        ("queries",) * 50: "50 LoRAs are given",
    }.items():
        with pytest.raises(InvalidRequest, match=message) as refused:
            lora_request(*malformed)
        assert refused.value.param == "loras"
    assert engine.num_live == 1
    painted = [event.result for _ in range(50) for event in engine.tick() if isinstance(event, ImageFinished)]
    [alone] = Engine(model, EngineConfig()).generate(lora_request("queries", seed=5))
    assert [(result.request_id, result.picture) for result in painted] == [(neighbour, alone.picture)]


def test_an_adapter_with_non_finite_numbers_is_refused_by_name(loaded: Callable[[str], Any], tmp_path: Path) -> None:
    model = with_folder(loaded("sd15"), write_folder(tmp_path, loaded("sd15")))
    tensors = load_file(tmp_path / "queries.safetensors")
    save_file({name: tensor * math.inf for name, tensor in tensors.items()}, tmp_path / "broken.safetensors")
    with pytest.raises(InvalidRequest, match=r"the LoRA 'broken' has non-finite numbers in .*to_q") as refused:
        Engine(model, EngineConfig()).generate(lora_request("broken"))
    assert refused.value.param == "loras"


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl"])
@pytest.mark.slow
def test_diffusers_and_peft_paint_the_same_with_two_adapters_at_their_scales(
    kind: str,
    loaded: Callable[[str], Any],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One as diffusers names its layers, the other as kohya's trainer does, with alphas."""
    theirs_of = lora_conversion_utils._convert_text_encoder_lora_key
    monkeypatch.setattr(
        lora_conversion_utils,
        "_convert_text_encoder_lora_key",
        lambda *names: re.sub(r"\.to_(\w+)_lora\.", r".\1_proj.lora_linear_layer.", theirs_of(*names)),
    )  # transformers 5 drops the attention of text encoders, "unexpected", by the name that diffusers 0.42 gives it
    model = with_folder(loaded(kind), write_folder(tmp_path, loaded(kind)))
    pipeline = load_pipeline.__wrapped__(PIPELINES[kind], tiny_model(kind))
    kohya = kohya_tensors(load_file(tmp_path / "everything.safetensors"), pipeline)
    assert not [name for name in kohya if not name.startswith("lora_")]
    assert any("input_blocks" in name for name in kohya) == (kind == "sdxl")
    save_file(kohya, tmp_path / "kohya.safetensors")
    with hushed("transformers", "diffusers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are two
        for name in ("kohya", "attention"):
            pipeline.load_lora_weights(str(tmp_path / f"{name}.safetensors"), adapter_name=name)
    pipeline.set_adapters(["kohya", "attention"], [0.7, -0.4])
    request, plain = (lora_request(*loras, kind=kind, num_steps=4) for loras in (("kohya:0.7", "attention:-0.4"), ()))
    result, without = Engine(model, EngineConfig()).generate([request, plain])
    reference = pipeline_latents(pipeline, request, kind)
    assert np.abs(latents(result) - reference).max() < TOLERANCE
    assert np.abs(latents(without) - reference).max() > 100 * TOLERANCE


def test_a_slow_disk_stops_nobody_else(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_read, read = make(), threading.Event(), LoRAFile.read

    def slowly(file: LoRAFile, change: LayerChange, shape: tuple[int, ...]) -> Any:
        assert may_read.wait(30)
        return read(file, change, shape)

    monkeypatch.setattr(LoRAFile, "read", slowly)
    waiting = engine.submit(lora_request("queries", seed=1))
    late = engine.submit(lora_request("queries", seed=2, deadline_s=0.01))
    neighbour = engine.submit(lora_request(seed=3))
    over: dict[str, str] = {}
    while not {neighbour, late} <= over.keys():
        over |= {event.request_id: type(event).__name__ for event in engine.tick() if isinstance(event, TERMINAL)}
    assert over == {neighbour: "Finished", late: "Failed"}
    may_read.set()
    over |= {event.request_id: type(event).__name__ for event in engine.events() if isinstance(event, TERMINAL)}
    assert over[waiting] == "Finished"
    engine.check_integrity()


def test_room_counts_the_factors_of_rows(make: MakeEngine) -> None:
    room = make(activation_bytes=1 << 26).runners.room
    layers = adaptable(room.model.unet.network).values()
    factors = random_set(layers, 16, torch.empty(0)).num_bytes
    assert factors == factor_bytes(map(shape_of, layers), 16, 4)
    row = room._margin * room._bound.of_row(8 * 8, 77)
    room._now_bytes, room.__dict__["activations"] = int(10 * row), room._bound
    rows = [room.rows(GroupKey(64, 64, 77, lora_rank=rank)) for rank in (0, 16)]
    assert rows == [10, int(10 * row / (row + factors))]
