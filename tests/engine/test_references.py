"""Reference images: rows equal diffusers' IP-Adapter pipelines, and share calls with rows that have none."""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.random_models import save_image_encoder
from diffserve.api.errors import InvalidRequest
from diffserve.api.types import TERMINAL, GenerationRequest, ImageResult, Picture
from diffserve.engine import Engine
from diffserve.models.controlnets import Control
from diffserve.models.references import WORK_SHARE, Reference, ReferenceFolder, read_reference
from diffserve.runtime import load_model
from diffserve.runtime.ip_adapter import IPAdapter
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.text.conditioning import PagedConditioner
from diffserve.runtime.threads import computing_on
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.controlnets import control_map, save_controlnet
from tests.engine.controlnets import with_folder as with_controls
from tests.engine.loras import with_folder as with_loras
from tests.engine.loras import write_folder as write_loras
from tests.engine.pipelines import load_pipeline, pipeline_latents
from tests.engine.references import (
    BASE,
    DIFFUSERS_BASE,
    DIFFUSERS_PLUS,
    ENCODER,
    PLUS,
    referenced,
    with_folder,
    write_folder,
)
from tests.engine.test_refiner import profile_of

TOLERANCE = 1e-4
PIPELINES = {"sd15": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def folders(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the adapters for the tiny model of a kind."""
    written: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in written:
            written[kind] = write_folder(tmp_path_factory.mktemp(f"references-{kind}"), tiny_model(kind))
        return written[kind]

    return folder


@pytest.fixture
def make(folders: Callable[[str], Path], _models: Callable[[str], Any]) -> MakeEngine:
    def make_engine(kind: str = "sd15", clock: Callable[[], float] = time.perf_counter, **config: Any) -> Engine:
        return Engine(with_folder(_models(kind), folders(kind)), EngineConfig(**config), clock=clock)

    return make_engine


def latents(result: ImageResult) -> Any:
    assert result.latents is not None
    return result.latents.array


def their_latents(request: GenerationRequest, kind: str, model: Path, folder: Path, **inputs: Any) -> Any:
    """Return the latents of diffusers' pipeline with the adapters of ``request``."""
    references = request.diffusion.references
    name = PIPELINES[kind].replace("Pipeline", "Img2ImgPipeline") if "image" in inputs else PIPELINES[kind]
    load_pipeline.cache_clear()  # the adapters change its UNet
    pipeline = load_pipeline(name, model)
    pipeline.feature_extractor = None
    with hushed("transformers", "diffusers"):
        pipeline.register_modules(image_encoder=None, feature_extractor=None)
        pipeline.load_ip_adapter(
            str(folder),
            subfolder="",
            weight_name=[f"{reference.name}.safetensors" for reference in references],
            image_encoder_folder=ENCODER,
        )
        pipeline.image_encoder.to(DEVICE)
    pipeline.set_ip_adapter_scale([reference.scale for reference in references])
    images = [Image.fromarray(picture.array) for picture in request.reference_images]
    try:
        return pipeline_latents(pipeline, request, kind, ip_adapter_image=images, **inputs)
    finally:
        load_pipeline.cache_clear()


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize(
    "references",
    [(Reference(BASE, 0.7),), (Reference(PLUS),), (Reference(PLUS, 0.4), Reference(BASE, 1.3))],
    ids=["base", "plus", "two"],
)
def test_latents_are_those_of_diffusers_pipelines(
    kind: str, references: tuple[Reference, ...], make: MakeEngine, tiny_model: Any, folders: Any
) -> None:
    request = referenced(*references, kind=kind)
    engine = make(kind)
    plain, result = engine.generate([referenced(kind=kind), request])
    reference = their_latents(request, kind, tiny_model(kind), folders(kind))
    assert np.abs(latents(result) - reference).max() < TOLERANCE * np.abs(reference).max()
    assert np.abs(latents(plain) - reference).max() > 100 * TOLERANCE
    engine.check_integrity()


def test_files_in_the_layout_of_diffusers_give_the_same_bytes(make: MakeEngine) -> None:
    engine = make()
    pairs = ((BASE, DIFFUSERS_BASE), (PLUS, DIFFUSERS_PLUS))
    results = engine.generate(
        [referenced(Reference(name), seed=7, sampler="euler", num_steps=2) for pair in pairs for name in pair]
    )
    for original, converted in zip(results[::2], results[1::2], strict=True):
        assert np.array_equal(latents(original), latents(converted))
    assert not np.array_equal(latents(results[0]), latents(results[2]))


@pytest.mark.slow
def test_an_image_that_starts_from_another_reads_references_too(
    make: MakeEngine, tiny_model: Any, folders: Any
) -> None:
    init = control_map(9)
    request = referenced(Reference(PLUS, 0.8), num_steps=10, strength=0.6, init_image=init)
    [result] = make().generate(request)
    inputs = {"image": Image.fromarray(init.array), "strength": 0.6}
    reference = their_latents(request, "sd15", tiny_model("sd15"), folders("sd15"), **inputs)
    assert np.abs(latents(result) - reference).max() < TOLERANCE


def company() -> list[GenerationRequest]:
    """Return requests with none, one and several references, in different steps and by different samplers."""
    half, late = Reference(BASE, 0.7, 0.0, 0.5), Reference(PLUS, 1.2, 0.5, 1.0)
    return [
        referenced(Reference(BASE), seed=1, num_steps=2),
        referenced(seed=2, num_steps=2),
        referenced(Reference(PLUS, 0.6), Reference(BASE), seed=3, num_steps=2),
        referenced(half, late, seed=4),
        referenced(seed=5, sampler="euler"),
        referenced(Reference(PLUS), seed=6, sampler="euler", guidance_scale=1.0),
        referenced(*[Reference(BASE, 0.3)] * 8, seed=7, sampler="dpmpp_2m", num_steps=3),
        referenced(Reference(BASE), seed=8, num_steps=2, prompt="dog", cache_interval=2),
        referenced(seed=9, num_steps=2, prompt="dog", cache_interval=2),
    ]


@pytest.mark.parametrize("is_measured", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rows_with_and_without_share_a_call_and_keep_the_bytes_of_solo_runs(
    is_measured: bool, make: MakeEngine
) -> None:
    options: dict[str, Any] = {}
    if is_measured:  # every call takes a second, so that a shared call is the faster one in each of these engines
        options = {"clock": itertools.count(step=1.0).__next__, "cache_dir": ""}
    alone = {request.seed: make(**options).generate(request)[0] for request in company()}
    without = make(**options).generate(referenced(seed=2, num_steps=2))[0]
    engine = make(max_rows=16, **options)
    if is_measured:
        for request in company():
            engine.generate(request)
        while engine.study():
            pass
    together = engine.generate(list(reversed(company())))
    for result in together:
        assert np.array_equal(latents(result), latents(alone[result.seed])), result.seed
        assert result.picture == alone[result.seed].picture
    assert np.array_equal(latents(alone[2]), latents(without))
    if is_measured:
        plain = {request.seed for request in company() if not request.diffusion.references}
        is_plain = {result.request_id: result.seed in plain for result in together}
        calls = [{is_plain.get(row.request_id) for row in call.rows} for tick in engine.trace for call in tick.calls]
        assert {True, False} in calls, "rows with and without references did not share a call"
    engine.check_integrity()


def test_steps_outside_start_and_end_and_scale_zero_are_those_of_a_plain_image(make: MakeEngine) -> None:
    """The first half of the steps of an image whose reference starts late equals that of one without."""
    plain, silent, late = make().generate(
        [
            referenced(num_steps=4),
            referenced(Reference(PLUS, 0.0), num_steps=4),
            referenced(Reference(PLUS, 1.0, 0.5), num_steps=4),
        ]
    )
    assert np.array_equal(latents(plain), latents(silent))
    assert not np.array_equal(latents(plain), latents(late))
    assert [reference.name for reference in late.references] == [PLUS]


def test_work_counts_the_references_of_each_step(make: MakeEngine) -> None:
    engine = make()
    references = (Reference(BASE, end=0.5), Reference(BASE))
    plain, read = (engine.admit(referenced(*each, num_steps=4)).tasks[0].total_cost for each in ((), references))
    assert read == pytest.approx(plain * (1 + (0.5 + 1) * WORK_SHARE))


def test_references_share_pages_and_return_them(make: MakeEngine) -> None:
    engine = make()
    requests = [referenced(Reference(PLUS), seed=seed, num_steps=2, sampler="euler") for seed in (1, 2)]
    ids = [engine.submit(request) for request in requests]
    while engine.num_live and not any(tick.num_rows for tick in engine.trace):
        engine.tick()
    assert engine.page_stats is not None
    tables = [task.state.references[0] for task in engine.scheduler.in_flight if task.state is not None]
    assert len(tables) == len(ids)
    assert tables[0].cond.pages == tables[1].cond.pages
    assert tables[0].uncond is not None
    assert tables[0].cond.pages != tables[0].uncond.pages
    assert tables[0].cond.tenant == pages_of(engine).specs.unet.tenant
    list(engine.events())
    assert engine.page_stats.num_tables == 0
    engine.check_integrity()


def test_a_pool_that_is_too_small_refuses_references_and_a_scarce_one_makes_them_wait(make: MakeEngine) -> None:
    roomy = make()
    conditioner = pages_of(roomy)
    pool, unet = conditioner.pool, conditioner.specs.unet.tenant
    encoding = max(pool.num_pages_for(spec.tenant, 77) for spec in conditioner.specs.encoders)
    smallest = 2 * pool.num_pages_for(unet, 77) + encoding
    many = [
        referenced(
            *[Reference(PLUS)] * 8, seed=seed, num_steps=1, prompt="dog", reference_images=control_maps(8 * seed)
        )
        for seed in (1, 2, 3)
    ]
    expected = [latents(result) for result in roomy.generate([*many, referenced(seed=4, num_steps=1)])]
    small = make(kv_pool_bytes=smallest * pool.page_bytes)
    with pytest.raises(InvalidRequest, match=r"the prompts and references take [0-9]+ pages and the whole pool has"):
        small.generate(many[0])
    small.generate(referenced(num_steps=1))
    need = 2 * pool.num_pages_for(unet, 77) + 16 * pool.num_pages_for(unet, 6)
    scarce = make(kv_pool_bytes=max(smallest, need) * pool.page_bytes)
    results = scarce.generate([*many, referenced(seed=4, num_steps=1)])
    assert all(
        np.array_equal(latents(result), expected_latents)
        for result, expected_latents in zip(results, expected, strict=True)
    )
    for engine in (roomy, small, scarce):
        engine.check_integrity()


def control_maps(first: int) -> tuple[Picture, ...]:
    """Return eight different images."""
    return tuple(control_map(seed) for seed in range(first, first + 8))


def pages_of(engine: Engine) -> PagedConditioner:
    """Return the conditioner of ``engine``, which has pages."""
    assert isinstance(engine.runners.conditioner, PagedConditioner)
    return engine.runners.conditioner


@pytest.mark.slow
def test_controlnets_and_references_of_one_image_are_those_of_diffusers(
    folders: Any, tiny_model: Any, loaded: Any, tmp_path: Path
) -> None:
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(tiny_model("sd15") / "unet"))
    save_controlnet(unet, tmp_path / "edges", 1)
    model = with_folder(with_controls(loaded("sd15"), tmp_path), folders("sd15"))
    control, images = Control("edges", 0.8), (control_map(1),)
    request = referenced(Reference(BASE, 0.7), controlnets=(control,), control_images=images)
    [result] = Engine(model, EngineConfig()).generate(request)
    with hushed("transformers", "diffusers"):
        network = import_quietly("diffusers", "ControlNetModel").from_pretrained(str(tmp_path / "edges")).to(DEVICE)
        pipeline = import_quietly("diffusers", "StableDiffusionControlNetPipeline").from_pretrained(
            str(tiny_model("sd15")), controlnet=network, safety_checker=None, requires_safety_checker=False
        )
        pipeline.load_ip_adapter(str(folders("sd15")), subfolder="", weight_name=f"{BASE}.safetensors")
    pipeline.to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.set_ip_adapter_scale(0.7)
    reference = pipeline_latents(
        pipeline,
        request,
        "sd15",
        image=[Image.fromarray(images[0].array)],
        ip_adapter_image=Image.fromarray(request.reference_images[0].array),
        controlnet_conditioning_scale=0.8,
        width=64,
        height=64,
    )
    assert np.abs(latents(result) - reference).max() < 10 * TOLERANCE  # that of ControlNets alone


@pytest.mark.slow
def test_references_with_adapters_masks_and_a_refiner_keep_their_bytes_in_company(
    folders: Any, tiny_model: Any, tmp_path: Path
) -> None:
    path = tiny_model("sdxl")
    profile = msgspec.structs.replace(
        profile_of(path, refiner=tiny_model("refiner")), reference_dir=str(folders("sdxl"))
    )
    model = load_model(path, dtype="float32", device=DEVICE, profile=profile)
    model = with_loras(model, write_loras(tmp_path, model))
    mask = np.zeros((64, 64), np.uint8)
    mask[16:40] = 255
    inpaint: dict[str, Any] = {"init_image": control_map(8), "mask_image": Picture.from_array(mask), "strength": 0.8}
    requests = [
        referenced(Reference(BASE), kind="sdxl", seed=1, prompt="cat <lora:queries>"),
        referenced(Reference(PLUS), kind="sdxl", seed=2, switch_at=0.5),
        referenced(Reference(PLUS), Reference(BASE, 0.5), kind="sdxl", seed=3, **inpaint),
        referenced(kind="sdxl", seed=4, switch_at=0.5),
        referenced(Reference(BASE), kind="sdxl", seed=5, prompt="dog"),
    ]
    alone = [Engine(model, EngineConfig(max_rows=4)).generate(request)[0] for request in requests]
    engine = Engine(model, EngineConfig(max_rows=4))
    for result, expected in zip(engine.generate(requests), alone, strict=True):
        assert np.array_equal(latents(result), latents(expected)), result.seed
    assert engine.page_stats is not None
    assert engine.page_stats.num_tables == 0
    engine.check_integrity()


def test_free_mode_computes_the_references_of_rows_together(make: MakeEngine) -> None:
    requests = [request for request in company() if request.seed != 8]
    exact = make(max_rows=16).generate(requests)
    free = make(max_rows=16, deterministic="off").generate(requests)
    for result, other in zip(exact, free, strict=True):
        assert np.abs(latents(result) - latents(other)).max() < TOLERANCE


def test_what_cannot_be_used_is_refused_in_one_sentence_and_nobody_else_is_touched(
    tmp_path: Path, folders: Callable[[str], Path], loaded: Callable[[str], Any], make: MakeEngine
) -> None:
    tensors_of_plus = load_file(folders("sd15") / f"{PLUS}.safetensors")
    copytree(folders("sd15") / ENCODER, tmp_path / ENCODER)
    for name in (BASE, PLUS):
        copyfile(folders("sd15") / f"{name}.safetensors", tmp_path / f"{name}.safetensors")
    copyfile(folders("sdxl") / f"{BASE}.safetensors", tmp_path / "xl.safetensors")
    parts = {
        "torn": {name: tensor for name, tensor in tensors_of_plus.items() if name != "image_proj.proj_in.bias"},
        "half": {name: tensor for name, tensor in tensors_of_plus.items() if not name.endswith("1.to_v_ip.weight")},
        "short": {name: tensor for name, tensor in tensors_of_plus.items() if not name.startswith("ip_adapter.1.")},
        "face": tensors_of_plus | {"image_proj.perceiver_resampler.proj_in.weight": torch.zeros(2, 2)},
        "lora": {"unet.conv_in.lora_A.weight": torch.zeros(2, 2)},
        "blind": tensors_of_plus | {"image_proj.proj_in.weight": torch.zeros(64, 40)},
        "nan": {
            name: tensor * float("nan") if name.endswith("latents") else tensor
            for name, tensor in tensors_of_plus.items()
        },
    }
    for name, tensors in parts.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / f"{BASE}.safetensors").read_bytes()[:100])
    nested: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors_of_plus.items():
        kind, _, key = name.partition(".")
        nested[kind][key] = tensor
    torch.save(nested, tmp_path / "pickle.bin")
    engine = Engine(with_folder(loaded("sd15"), tmp_path), EngineConfig())
    neighbor = engine.submit(referenced(Reference(BASE), num_steps=1))
    for request, message in (
        (
            referenced(Reference("nowhere")),
            "there is no IP-Adapter 'nowhere'; the known ones are base, nan, plus, sh",
        ),
        (referenced(Reference("xl")), "IP-Adapter 'xl' cannot be used with sd15: it makes tokens of 128 numbers"),
        (referenced(Reference("torn")), "image_proj has no proj_in.bias"),
        (referenced(Reference("half")), "some of its layers have no to_k_ip or no to_v_ip"),
        (referenced(Reference("short")), "layers, and they are not the"),
        (referenced(Reference("face")), "another kind (FaceID or full face)"),
        (referenced(Reference("lora")), "is not an IP-Adapter: it has no image_proj"),
        (referenced(Reference("blind")), "needs a CLIP image encoder of hidden_size 40, and the folder has none"),
        (referenced(Reference("cut")), "is not a complete safetensors file"),
        (referenced(Reference("pickle")), "is a pickle file"),
        (referenced(Reference()), "a reference names no IP-Adapter, and there are several: base, nan, plus; name one."),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
            engine.submit(request)
        assert refused.value.param == "references"
        assert str(tmp_path) not in refused.value.message
    with pytest.raises(InvalidRequest, match="its tokens of this image are not finite"):
        engine.generate(referenced(Reference("nan"), num_steps=1))
    with pytest.raises(InvalidRequest, match="start it with --reference-dir DIR"):
        Engine(loaded("sd15"), EngineConfig()).submit(referenced(Reference()))
    with pytest.raises(InvalidRequest, match=r"engine\.cross_attention is plain: set it to paged"):
        make(cross_attention="plain").submit(referenced(Reference(BASE)))
    for fields, message in (
        (("../base",), "give a path below the folder"),
        ((BASE, float("nan")), "the scale of a reference is nan"),
        ((BASE, 2.5), "must lie between 0 and 2"),
        ((BASE, 1.0, 0.5, 0.5), "0 <= start < end <= 1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            Reference(*fields)
    with pytest.raises(InvalidRequest, match="9 references are given; at most 8"):
        referenced(*[Reference(BASE)] * 9)
    with pytest.raises(InvalidRequest, match="1 references are requested with 0 images"):
        referenced(Reference(BASE), reference_images=())
    events = [event for event in engine.events() if event.request_id == neighbor]
    assert type(events[-1]).__name__ == "Finished"
    refusal = ReferenceFolder(str(tmp_path)).refused()["pickle"]
    program = refusal.partition('python -c "')[2].partition('"')[0]
    subprocess.run([sys.executable, "-c", program, "pickle.bin", "pickle.safetensors"], cwd=tmp_path, check=True)
    [converted] = engine.generate(referenced(Reference("pickle"), num_steps=1))
    [original] = engine.generate(referenced(Reference(PLUS), num_steps=1))
    assert np.array_equal(latents(converted), latents(original))
    (tmp_path / ENCODER / "model.safetensors").rename(tmp_path / ENCODER / "pytorch_model.bin")
    assert (
        "needs the image encoder image_encoder: pytorch_model.bin is a pickle"
        in ReferenceFolder(str(tmp_path)).refused()[BASE]
    )


def test_the_only_adapter_of_a_model_needs_no_name_and_the_nearest_encoder_is_used(
    tmp_path: Path, folders: Any, loaded: Any
) -> None:
    for kind in ("sd15", "sdxl"):
        (tmp_path / kind).mkdir()
        copyfile(folders(kind) / f"{BASE}.safetensors", tmp_path / kind / f"{BASE}.safetensors")
    for place in (tmp_path / "a", tmp_path / "sd15" / ENCODER, tmp_path):
        save_image_encoder(place / ENCODER if place == tmp_path else place)
    engine = Engine(with_folder(loaded("sd15"), tmp_path), EngineConfig())
    [result] = engine.generate(referenced(Reference(), num_steps=1))
    assert [reference.name for reference in result.references] == ["sd15/base"]
    digest = hashlib.sha256((tmp_path / "sd15" / "base.safetensors").read_bytes()).hexdigest()
    assert result.reference_digests == {"sd15/base": digest}
    label = result.references[0].label(digest)
    assert label.startswith(f"Model: sd15/base, Hash: {digest[:12]}, Weight: 1, Guidance Start: 0, Guidance End: 1, Im")
    folder = ReferenceFolder(str(tmp_path))
    assert folder.find("sd15/base")[1].directory == tmp_path / "sd15" / ENCODER
    assert folder.find("sdxl/base")[1].directory == tmp_path / "a"


def test_memory_goes_to_adapters_that_were_used_last(make: MakeEngine) -> None:
    engine = make(reference_bytes=1)
    store = engine.runners.references
    assert store.planned_bytes == 1
    [first] = engine.generate(referenced(Reference(PLUS), num_steps=1))
    gc.collect()
    assert not store._kept
    assert not store._alive, "an adapter without a request is in memory"
    [again] = engine.generate(referenced(Reference(PLUS), num_steps=1))
    assert np.array_equal(latents(first), latents(again))
    roomy = make()
    roomy.generate(referenced(Reference(PLUS), Reference(BASE), num_steps=1))
    files = [roomy.runners.references.folder.find(name)[0] for name in (BASE, PLUS)]
    assert len(roomy.runners.references._kept) == 3
    num_bytes = roomy.runners.references._kept.currsize
    assert sum(file.stat().st_size for file in files) < num_bytes < 1.5 * sum(file.stat().st_size for file in files)


def test_whoever_waits_for_an_adapter_stops_nobody_else(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_read, load = make(), threading.Event(), IPAdapter.load.__func__  # type: ignore[attr-defined]
    num_read = []

    def slowly(cls: type[IPAdapter], *args: Any) -> Any:
        assert may_read.wait(30)
        num_read.append(args)
        return load(cls, *args)

    monkeypatch.setattr(IPAdapter, "load", classmethod(slowly))
    waiting = [engine.submit(referenced(Reference(BASE), seed=seed, num_steps=2)) for seed in (1, 2)]
    neighbor = engine.submit(referenced(seed=3, num_steps=2))
    over: dict[str, str] = {}
    while neighbor not in over:
        over |= {event.request_id: type(event).__name__ for event in engine.tick() if isinstance(event, TERMINAL)}
    assert over == {neighbor: "Finished"}
    may_read.set()
    over |= {event.request_id: type(event).__name__ for event in engine.events() if isinstance(event, TERMINAL)}
    assert [over[name] for name in waiting] == ["Finished", "Finished"]
    assert len(num_read) == 1, "an adapter that two requests needed was read twice"
    engine.check_integrity()


@pytest.mark.parametrize(
    ("text", "image", "fields"),
    [
        ("cat.png", "cat.png", {}),
        ("C:\\pictures\\cat.png", "C:\\pictures\\cat.png", {}),
        ("C:\\pictures\\cat.png:plus:0.5", "C:\\pictures\\cat.png", {"name": "plus", "scale": 0.5}),
        ("cat.png:0.6", "cat.png", {"scale": 0.6}),
        ("cat.png:xl/plus", "cat.png", {"name": "xl/plus"}),
        ("cat.png:plus:0.6:0-0.8", "cat.png", {"name": "plus", "scale": 0.6, "end": 0.8}),
        ("cat.png:.2-1", "cat.png", {"start": 0.2}),
    ],
)
def test_an_option_names_image_adapter_scale_and_steps_in_order(text: str, image: str, fields: dict[str, Any]) -> None:
    assert read_reference(text) == (Reference(**fields), image)


@pytest.mark.parametrize("text", ["", ":plus", "cat.png:plus:nan", "cat.png:plus:3", "cat.png:plus:0.9-0.1"])
def test_an_option_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_reference(text)
    assert refused.value.param == "references"


def test_tokens_do_not_depend_on_the_threads_of_the_thread_that_asks(make: MakeEngine) -> None:
    """A client's thread, or one between two calls, may compute on another number of threads."""
    request = referenced(Reference(PLUS))
    first, second = make().runners.references, make().runners.references
    with computing_on(1):
        [one_thread] = first.begin(request.diffusion.references, request.reference_images).result()
    [all_threads] = second.begin(request.diffusion.references, request.reference_images).result()
    assert torch.equal(one_thread.cond, all_threads.cond)
    assert torch.equal(one_thread.uncond, all_threads.uncond)
