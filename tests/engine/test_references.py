"""Reference images: rows equal diffusers' IP-Adapter pipelines, and share calls with rows that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest, ImageResult, Picture
from diffserve.engine import Engine
from diffserve.models.references import Reference
from diffserve.runtime.loading.library_imports import hushed
from diffserve.runtime.text.conditioning import PagedConditioner
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.controlnets import control_map
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
    def make_engine(kind: str = "sd15", **config: Any) -> Engine:
        return Engine(with_folder(_models(kind), folders(kind)), EngineConfig(**config))

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
    assert np.abs(latents(result) - reference).max() < TOLERANCE
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
    alone = {request.seed: make().generate(request)[0] for request in company()}
    without = make().generate(referenced(seed=2, num_steps=2))[0]
    engine = make(max_rows=16)
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
        seeds = {result.request_id: result.seed for result in together}
        calls = [{seeds.get(row.request_id) for row in call.rows} for tick in engine.trace for call in tick.calls]
        assert any({1, 2, 3} <= call for call in calls), "rows with and without references did not share a call"
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
    least = 2 * pool.num_pages_for(unet, 77) + encoding
    many = [
        referenced(
            *[Reference(PLUS)] * 8, seed=seed, num_steps=1, prompt="dog", reference_images=control_maps(8 * seed)
        )
        for seed in (1, 2, 3)
    ]
    expected = [latents(result) for result in roomy.generate([*many, referenced(seed=4, num_steps=1)])]
    small = make(kv_pool_bytes=least * pool.page_bytes)
    with pytest.raises(InvalidRequest, match=r"the prompts and references take [0-9]+ pages and the whole pool has"):
        small.generate(many[0])
    small.generate(referenced(num_steps=1))
    need = 2 * pool.num_pages_for(unet, 77) + 16 * pool.num_pages_for(unet, 6)
    scarce = make(kv_pool_bytes=max(least, need) * pool.page_bytes)
    results = scarce.generate([*many, referenced(seed=4, num_steps=1)])
    assert all(np.array_equal(latents(result), wanted) for result, wanted in zip(results, expected, strict=True))
    for engine in (roomy, small, scarce):
        engine.check_integrity()


def control_maps(first: int) -> tuple[Picture, ...]:
    """Return eight different images."""
    return tuple(control_map(seed) for seed in range(first, first + 8))


def pages_of(engine: Engine) -> PagedConditioner:
    """Return the conditioner of ``engine``, which has pages."""
    assert isinstance(engine.runners.conditioner, PagedConditioner)
    return engine.runners.conditioner
