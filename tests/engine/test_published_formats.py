"""Checkpoints as the tools of the field write them: what they paint is what diffusers paints from the same files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import ImageResult
from diffserve.engine import Engine
from diffserve.models.model_files import find_weights
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.text.clip_vocabulary import END, VOCABULARY_SIZE, clip_tokenizer
from diffserve.settings.layers import load_settings
from schedulers.samplers import SAMPLERS
from tests.device import DEVICE, tolerance
from tests.engine.pipelines import PIPELINES, image_request, load_pipeline, pipeline_latents
from tests.runtime.original_layout import save_single_file, vae_tensors
from tests.runtime.test_single_file import LUGGAGE
from tests.tiny_models import build_pipeline, scheduler, text_encoder

TOLERANCE = 1e-3
STEM = "diffusion_pytorch_model"
BEFORE_0_17 = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
TinyModel = Callable[[str], Path]


@pytest.fixture
def copy_tiny(tiny_model: TinyModel, tmp_path: Path) -> TinyModel:
    """Return ``copy_tiny(kind)``, which copies the tiny model so that a test can change its format."""
    return lambda kind: Path(shutil.copytree(tiny_model(kind), tmp_path / kind))


def rename_tensors(file: Path, words: dict[str, str]) -> None:
    tensors = load_file(file)
    for old, new in words.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)


def engine_of(path: Path, env: dict[str, str] | None = None) -> Engine:
    """Return an engine on ``path`` with the settings of its kind, for small images."""
    profile = replace(load_settings(model=str(path), env=env or {}).model, good_sizes=((64, 64),), probe=False)
    return Engine(load_model(path, dtype="float32", device=DEVICE, profile=profile))


def paint(path: Path, env: dict[str, str] | None = None, kind: str = "sd15", **fields: Any) -> ImageResult:
    [result] = engine_of(path, env).generate(image_request(kind, "ddim", 3, **{"num_steps": 2} | fields))
    return result


@torch.no_grad()
def decoded(pipeline: Any, latents: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pixels (h, w, 3), 0 to 255, of latents (C, h / 8, w / 8) as diffusers decodes them."""
    image = pipeline.vae.decode(torch.tensor(latents, device=DEVICE)[None] / pipeline.vae.config.scaling_factor).sample
    pixels: NDArray[np.float32] = (image[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy() * 255
    return pixels.round()


@pytest.mark.parametrize("kind", ["sd15", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sd2", "sdxl"))])
def test_vae_with_attention_named_as_before_diffusers_0_17_decodes_as_there(copy_tiny: TinyModel, kind: str) -> None:
    path = copy_tiny(kind)
    rename_tensors(path / "vae" / f"{STEM}.safetensors", BEFORE_0_17)
    assert "decoder.mid_block.attentions.0.proj_attn.weight" in load_file(path / "vae" / f"{STEM}.safetensors")
    actual = paint(path, kind=kind)
    assert actual.latents is not None
    pipeline = load_pipeline(PIPELINES[kind], path)
    reference = pipeline_latents(pipeline, image_request(kind, "ddim", 3, num_steps=2), kind)
    assert np.abs(actual.latents.array - reference).max() < TOLERANCE
    assert np.abs(actual.pixels.astype(float) - decoded(pipeline, reference)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("non_ema", torch.float32)]
)
def test_variants_in_shards_and_a_whole_clip_s_configuration_paint_as_in_diffusers(
    copy_tiny: TinyModel, variant: str, dtype: torch.dtype
) -> None:
    path = copy_tiny("sd15")
    pipeline = load_pipeline("StableDiffusionPipeline", path)
    for name in ("unet", "vae", "text_encoder"):
        for file in (path / name).glob("*.safetensors"):
            file.unlink()
        part = getattr(pipeline, name).to(dtype=dtype)
        part.save_pretrained(path / name, variant=variant, max_shard_size="200KB" if name == "unet" else "1GB")
    assert len(list((path / "unet").glob(f"*{variant}*.safetensors"))) > 1
    file = path / "text_encoder" / "config.json"
    file.write_text(
        json.dumps({"model_type": "clip", "projection_dim": 64, "text_config": json.loads(file.read_text())})
    )
    actual = paint(path)
    with hushed("transformers", "diffusers"):
        pipeline = (
            import_quietly("diffusers", "StableDiffusionPipeline")
            .from_pretrained(str(path), variant=variant, safety_checker=None)
            .to(dtype=torch.float32)
        )
        pipeline.set_progress_bar_config(disable=True)
    reference = pipeline_latents(pipeline, image_request("sd15", "ddim", 3, num_steps=2), "sd15")
    assert actual.latents is not None
    assert np.abs(actual.latents.array - reference).max() < TOLERANCE
    assert np.abs(actual.pixels.astype(float) - decoded(pipeline, reference)).max() <= 1


@pytest.mark.parametrize(
    ("dtype", "there", "expected_variant"),
    [
        ("float32", ("fp16", "bf16", "non_ema"), "fp16"),
        ("bfloat16", ("", "fp16", "bf16"), "bf16"),
        ("float32", ("non_ema",), "non_ema"),
        ("float32", ("", "fp16", "non_ema"), ""),
    ],
)
def test_variant_that_fits_is_read_of_those_that_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, there: tuple[str, ...], expected_variant: str
) -> None:
    names = {variant: f"{STEM}.{variant}.safetensors" if variant else f"{STEM}.safetensors" for variant in there}
    for name in names.values():
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with caplog.at_level(logging.INFO):
        assert find_weights(tmp_path, STEM, dtype=dtype) == [tmp_path / names[expected_variant]]
    assert f"{names[expected_variant]} is read" in caplog.text
    assert all(name in caplog.text for name in names.values()), "what was not read is told too"


@pytest.mark.parametrize(
    "index", ["safetensors.index.fp16.json", "fp16.safetensors.index.json", "safetensors.fp16.index.json"]
)
def test_sharded_variant_is_found_by_each_name_of_its_index(tmp_path: Path, index: str) -> None:
    shard = f"{STEM}.fp16-00001-of-00001.safetensors"
    save_file({"x": torch.zeros(1)}, tmp_path / shard)
    (tmp_path / f"{STEM}.{index}").write_text(json.dumps({"weight_map": {"x": shard}}))
    assert find_weights(tmp_path, STEM, dtype="float32") == [tmp_path / shard]


STABLE_DIFFUSION_1_5 = {
    "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "trained_betas": None, "clip_sample": False,
}  # fmt: skip
"""Its scheduler_config.json as published: no timestep_spacing."""

SAMPLERS_AND_SPACINGS = {
    "ddim": "leading", "plms": "leading", "euler": "linspace", "euler_a": "linspace", "heun": "linspace",
    "dpmpp_2m": "linspace", "unipc": "linspace",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised in diffusers
def test_each_sampler_takes_its_own_spacing_where_the_scheduler_s_file_names_none(copy_tiny: TinyModel) -> None:
    path = copy_tiny("sd15")
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(STABLE_DIFFUSION_1_5))
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "PNDMScheduler"]}))
    pipeline = load_pipeline("StableDiffusionPipeline", path)
    published = pipeline.scheduler.config
    asked_for = [
        image_request("sd15", sampler, seed=3, num_steps=4, spacing=None, negative_prompt="")
        for sampler in SAMPLERS_AND_SPACINGS
    ]
    for request, result in zip(asked_for, engine_of(path).generate(asked_for), strict=True):
        assert result.latents is not None
        assert result.spacing == SAMPLERS_AND_SPACINGS[result.sampler]
        scheduler = import_quietly("diffusers", SAMPLERS[result.sampler].diffusers_class)
        pipeline.scheduler = scheduler.from_config(published)
        reference = pipeline_latents(pipeline, request, "sd15", keep_scheduler=True)
        assert np.abs(result.latents.array - reference).max() < TOLERANCE, result.sampler


@pytest.fixture
def write_file(tmp_path: Path, tiny_model: TinyModel) -> Callable[..., Path]:
    """Return ``write_file(extra, without, kind)``, which writes a single file with its configurations next to it.

    Tensors whose names start with ``without`` are left out.
    """

    def write(
        extra: dict[str, torch.Tensor] | None = None, *, without: tuple[str, ...] = (), kind: str = "sd15"
    ) -> Path:
        (tmp_path / "file").symlink_to(tiny_model(kind), target_is_directory=True)
        pipeline = load_pipeline(PIPELINES[kind], tiny_model(kind))
        file = save_single_file(pipeline, tmp_path / "file.safetensors", extra)
        if without:
            save_file({name: tensor for name, tensor in load_file(file).items() if not name.startswith(without)}, file)
        return file

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl"])
def test_single_file_with_extra_tensors_generates_as_in_diffusers(
    write_file: Callable[..., Path], tiny_model: TinyModel, kind: str
) -> None:
    """Diffusers gets the second encoder of SDXL separately: it tells encoders apart by width, which is equal here."""
    file = write_file(
        {name: tensor for name, tensor in LUGGAGE.items() if kind == "sd15" or "cond_" not in name}, kind=kind
    )
    actual = paint(file, kind=kind)
    second = (
        {"text_encoder_2": load_pipeline(PIPELINES[kind], tiny_model(kind)).text_encoder_2} if kind == "sdxl" else {}
    )
    optional = second or {"safety_checker": None}
    with hushed("transformers", "diffusers"):
        pipeline = import_quietly("diffusers", PIPELINES[kind]).from_single_file(
            str(file), config=str(tiny_model(kind)), local_files_only=True, **optional
        )
        pipeline.set_progress_bar_config(disable=True)
        reference = pipeline_latents(pipeline, image_request(kind, "ddim", 3, num_steps=2), kind)
    assert actual.latents is not None
    assert np.abs(actual.latents.array - reference).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd2", "sdxl"])
def test_single_file_whose_keys_say_velocity_and_zero_snr_paints_as_in_diffusers(kind: str, tmp_path: Path) -> None:
    """No configuration files: only shapes, CLIP's vocabulary and two marker keys are available."""
    pipeline = build_pipeline(kind, tmp_path / "parts")
    pipeline.scheduler = scheduler("sd2")
    fields: dict[str, Any] = {"vocabulary_size": VOCABULARY_SIZE}
    if kind == "sdxl":
        pipeline.text_encoder, pipeline.tokenizer = text_encoder(width=64, **fields), clip_tokenizer(pad=END)
        pipeline.text_encoder_2 = text_encoder(width=64, layers=4, act="gelu", projection=32, **fields)
        pipeline.tokenizer_2 = clip_tokenizer(pad="!")
    else:
        pipeline.text_encoder, pipeline.tokenizer = (
            text_encoder(width=64, act="gelu", **fields),
            clip_tokenizer(pad="!"),
        )
    marks = {"v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}
    actual = paint(save_single_file(pipeline, tmp_path / "file.safetensors", marks), kind=kind, spacing=None)
    request = image_request(kind, "ddim", 3, num_steps=2)
    reference = pipeline_latents(pipeline, request, kind, keep_scheduler=True)
    assert actual.latents is not None
    assert actual.spacing == "trailing"
    assert np.abs(actual.latents.array - reference).max() < TOLERANCE
    pipeline.scheduler = scheduler("sd15")
    assert np.abs(pipeline_latents(pipeline, request, kind, keep_scheduler=True) - reference).max() > 10 * TOLERANCE


def test_parts_that_a_file_lacks_are_read_where_settings_name_them(
    write_file: Callable[..., Path], tiny_model: TinyModel
) -> None:
    folder = tiny_model("sd15")
    file = write_file(without=("first_stage_model.", "cond_stage_model."))
    env = {"DIFFSERVE_MODEL_VAE": str(folder / "vae"), "DIFFSERVE_MODEL_TEXT_ENCODER": str(folder)}
    with pytest.raises(ModelLoadError, match=r"holds a UNet but no text encoder; .*--text-encoder"):
        paint(file)
    with pytest.raises(ModelLoadError, match=r"holds no VAE; .* \(--vae, model.vae\)"):
        paint(file, env | {"DIFFSERVE_MODEL_VAE": ""})
    with pytest.raises(ModelLoadError, match=r"scheduler holds neither vae/config.json nor .* \(model.vae\)"):
        paint(file, env | {"DIFFSERVE_MODEL_VAE": str(folder / "scheduler")})
    actual, expected = paint(file, env), paint(folder)
    assert actual.latents == expected.latents
    assert np.array_equal(actual.pixels, expected.pixels)


def test_vae_may_be_a_file_by_itself_in_either_layout(
    copy_tiny: TinyModel, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = copy_tiny("sd15")
    expected = paint(folder)
    tensors = dict(vae_tensors(load_pipeline("StableDiffusionPipeline", folder).vae))
    bare = {name.removeprefix("first_stage_model."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(bare | {"loss.logvar": torch.zeros(1)}, tmp_path / "vae-ft-mse.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "part.safetensors")
    shutil.copytree(tiny_model("sd15") / "vae", tmp_path / "other")
    rename_tensors(tmp_path / "other" / f"{STEM}.safetensors", BEFORE_0_17)
    for name in ("vae-ft-mse.safetensors", "part.safetensors", f"other/{STEM}.safetensors"):
        shutil.rmtree(folder / "vae", ignore_errors=True)
        actual = paint(folder, {"DIFFSERVE_MODEL_VAE": str(tmp_path / name)})
        assert np.array_equal(actual.pixels, expected.pixels), name
    del bare["decoder.conv_in.weight"]
    save_file(bare, tmp_path / "half.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "none.safetensors")
    for name, message in (
        ("half", r"'decoder.conv_in.weight' .* is missing from"),
        ("none", "is not a VAE in the original"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            paint(folder, {"DIFFSERVE_MODEL_VAE": str(tmp_path / f"{name}.safetensors")})


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_tiny_autoencoders_encode_and_decode_as_in_diffusers(copy_tiny: TinyModel, kind: str) -> None:
    path = copy_tiny(kind)
    shutil.rmtree(path / "vae")
    torch.manual_seed(0)
    widths = (8, 8, 8, 8)
    vae = import_quietly("diffusers", "AutoencoderTiny")(
        encoder_block_out_channels=widths, decoder_block_out_channels=widths
    )
    vae.save_pretrained(path / "vae")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"vae": ["diffusers", "AutoencoderTiny"]}))
    engine = engine_of(path)
    [result] = engine.generate(image_request(kind, "ddim", 3, num_steps=2))
    assert result.latents is not None
    pipeline = load_pipeline(PIPELINES[kind], path)
    assert type(pipeline.vae).__name__ == "AutoencoderTiny"
    reference = pipeline_latents(pipeline, image_request(kind, "ddim", 3, num_steps=2), kind)
    assert np.abs(result.latents.array - reference).max() < TOLERANCE
    assert np.abs(result.pixels.astype(float) - decoded(pipeline, reference)).max() <= 1
    pixels = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    images = torch.tensor(pixels, device=DEVICE).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    with torch.no_grad():
        expected = pipeline.vae.encode(images).latents
    for generators in (None, [torch.Generator().manual_seed(1)]):
        assert torch.allclose(engine.model.vae.encode(pixels, generators), expected, atol=tolerance(1e-5))


@pytest.mark.parametrize("kind", ["sd2", "sdxl"])
def test_family_of_a_file_without_text_encoders_is_read_off_its_unet(
    kind: str, tmp_path: Path, tiny_model: TinyModel
) -> None:
    folder = tiny_model(kind)
    name = "StableDiffusionXLPipeline" if kind == "sdxl" else "StableDiffusionPipeline"
    file = save_single_file(load_pipeline(name, folder), tmp_path / "file.safetensors", {"v_pred": torch.zeros(1)})
    text = ("cond_stage_model.", "conditioner.")
    save_file({key: tensor for key, tensor in load_file(file).items() if not key.startswith(text)}, file)
    env = {"DIFFSERVE_MODEL_TEXT_ENCODER": str(folder)}
    profile = load_settings(model=str(file), env=env).model
    loaded_model = load_model(file, dtype="float32", device=DEVICE, profile=replace(profile, probe=False))
    expected = load_model(folder, dtype="float32", device=DEVICE)
    assert (loaded_model.family, loaded_model.digest == expected.digest) == (expected.family, False)
    texts = [
        model.text.encode("a red fox", "dog", width_px=64, height_px=64).cond for model in (loaded_model, expected)
    ]
    assert torch.equal(texts[0], texts[1])
    unets = [model.unet.network.state_dict() for model in (loaded_model, expected)]
    assert all(torch.equal(tensor, unets[1][key]) for key, tensor in unets[0].items())
    if kind == "sdxl":
        other_profile = replace(profile, text_encoder=str(folder / "text_encoder"))
        with pytest.raises(ModelLoadError, match="is one text encoder, and the model has 2"):
            load_model(file, dtype="float32", device=DEVICE, profile=other_profile)
