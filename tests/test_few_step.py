"""Few-step models are recognized by their files and names, and get the right defaults; other models do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy import zeros
from safetensors.numpy import save_file

from diffserve.api.types import DiffusionParams
from diffserve.models.loras import Lora
from diffserve.models.profiles import begin_with_loras, find_few_step
from diffserve.runtime import load_model
from diffserve.settings.layers import load_settings

TRAILING = {"timestep_spacing": "trailing"}
LEADING = {"timestep_spacing": "leading"}
EULER, ANCESTRAL, LCM, SDE, SINGLESTEP, MULTISTEP = (
    {"_class_name": f"{name}Scheduler"}
    for name in (
        "EulerDiscrete", "EulerAncestralDiscrete", "LCM", "DPMSolverSDE", "DPMSolverSinglestep", "DPMSolverMultistep",
    )
)  # fmt: skip
STYLES = ("lightning-bolts", "hyper_realism_lora", "turbocat_lora", "flash_photography_xl_lora", "tcd")
START = ("sampler", "num_steps", "guidance_scale", "spacing")


def directory(path: Path, scheduler: dict[str, Any], unet: dict[str, Any] | None = None) -> Path:
    for part, content in (("scheduler/scheduler_config.json", scheduler), ("unet/config.json", unet or {})):
        (path / part).parent.mkdir(parents=True)
        (path / part).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "scheduler", "unet", "start"),
    [
        ("sd-turbo", EULER | TRAILING, {}, ("euler", 4, 1.0, "trailing")),
        ("models--stabilityai--sdxl-turbo/snapshots/f4b0", ANCESTRAL | TRAILING, {}, ("euler_a", 4, 1.0, "trailing")),
        ("Hyper-SDXL-1step-Unet", EULER | TRAILING, {}, ("euler", 1, 1.0, "trailing")),
        ("some-distilled", LCM, {"time_cond_proj_dim": 256}, ("lcm", 4, 8.5, "leading")),
        ("some-merged", LCM, {}, ("lcm", 4, 1.0, "leading")),
        ("lcm-ssd", EULER, {}, ("lcm", 4, 1.0, "leading")),
        ("RealVisXL_V4.0_Lightning", SDE, {}, ("euler", 4, 1.0, "trailing")),
        ("mix-lightning", SINGLESTEP, {}, ("euler", 4, 1.0, "trailing")),
        ("Juggernaut-XL-Lightning", EULER | LEADING, {}, ("euler", 4, 1.0, "trailing")),
        ("dreamshaper-xl-v2-turbo", MULTISTEP | LEADING, {}, ("euler", 4, 1.0, "trailing")),
        ("Hyper-RealVis-4steps", MULTISTEP | LEADING, {}, ("euler", 4, 1.0, "trailing")),
        ("some-consistent", {"_class_name": "TCDScheduler"}, {}, ("tcd", 4, 1.0, "leading")),
        ("flash-sdxl", EULER | LEADING, {}, ("lcm", 4, 1.0, "leading")),
        ("sdxl-dmd2", LCM, {}, ("lcm simple", 4, 1.0, "trailing")),
        ("PixelWave-PCM-8step", LCM, {}, ("lcm", 8, 1.0, "leading")),
    ],
)
def test_few_step_directories_get_the_right_defaults(
    tmp_path: Path, name: str, scheduler: dict[str, Any], unet: dict[str, Any], start: tuple[Any, ...]
) -> None:
    model = load_settings(model=str(directory(tmp_path / name, scheduler, unet)), env={}).model
    assert tuple(getattr(model, key) for key in START) == start


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("sdxl_lightning_8step", ("euler", 8, 1.0, "trailing")),
        ("sdxl_lightning_2step_unet", ("euler", 2, 1.0, "trailing")),
        ("Hyper-SDXL-8steps-CFG", ("euler", 8, 5.0, "trailing")),
        ("sd_xl_turbo_1.0_fp16", ("euler_a", 4, 1.0, "trailing")),
        ("DreamShaperXL_Turbo_v2_1", ("euler_a", 4, 1.0, "trailing")),
        ("dreamshaper_8LCM", ("lcm", 4, 1.0, "leading")),
    ],
)
def test_few_step_files_get_the_right_defaults(tmp_path: Path, name: str, start: tuple[Any, ...]) -> None:
    save_file({"conditioner.embedders.1.model.ln_final.weight": zeros(2)}, tmp_path / f"{name}.safetensors")
    model = load_settings(model=str(tmp_path / f"{name}.safetensors"), env={}).model
    assert tuple(getattr(model, key) for key in START) == start
    assert (model.good_sizes == ((512, 512),)) == ("turbo" in name.lower())


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("sdxl_lightning_4step_lora", ("euler", 4, 1.0, "trailing")),
        ("Hyper-SD15-8steps-CFG-lora", ("euler", 8, 5.0, "trailing")),
        ("sd_xl_turbo_lora_v1", ("euler_a", 4, 1.0, "trailing")),
        ("lcm-lora-sdv1-5", ("lcm", 4, 1.0, "leading")),
        ("dmd2_sdxl_4step", ("lcm simple", 4, 1.0, "trailing")),
        ("TCD-SDXL", ("tcd", 4, 1.0, "leading")),
        ("PCM_SDXL_smallcfg_4step_converted", ("tcd", 4, 1.0, "leading")),
        ("pcm_sd15_normalcfg_8step_converted", ("tcd", 8, 7.5, "leading")),
        ("pcm_sdxl_lcmlike_lora_converted", ("lcm", 4, 1.0, "leading")),
        ("FlashSDXL", ("lcm", 4, 1.0, "leading")),
        *((style, (None, None, None, None)) for style in STYLES),
    ],
)
def test_few_step_loras_set_the_unset_fields_of_a_request(name: str, start: tuple[Any, ...], tmp_path: Path) -> None:
    params, warnings = begin_with_loras(DiffusionParams(loras=(Lora("ink"), Lora(name))))
    assert tuple(getattr(params, key) for key in START) == start
    assert [f"LoRA {name!r} is a few-step adapter" in text for text in warnings] == [True] * (start[0] is not None)
    explicit = DiffusionParams(
        loras=(Lora(name),), sampler="ddim", num_steps=30, guidance_scale=7.0, spacing="linspace"
    )
    assert begin_with_loras(explicit) == (explicit, warnings)
    subtracted = DiffusionParams(loras=(Lora(name, -1.0),))
    assert begin_with_loras(subtracted) == (subtracted, ())
    if warnings:
        base = directory(tmp_path / "base", EULER | {"timestep_spacing": "leading"})
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.json").write_text(json.dumps({"base": str(base)}))
        model = load_settings(model=str(tmp_path / name), env={}).model
        assert tuple(getattr(model, key) for key in START) == start, "as for the merged model"


def test_a_name_alone_does_not_identify_a_few_step_directory(tmp_path: Path) -> None:
    for name in ("turbo-tests", "lightning", "turbocat", "flash-photography"):
        assert find_few_step(directory(tmp_path / name, EULER | LEADING)) is None
    assert find_few_step(directory(tmp_path / "turbos", EULER | TRAILING)) is None
    assert find_few_step(tmp_path / "none") is None


def test_settings_override_the_detected_defaults_and_load_model_detects_them(
    tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tiny-lightning-2step"
    path.symlink_to(tiny_model("sd2"))  # its scheduler is "trailing"
    config = tmp_path / "own.toml"
    config.write_text("[model]\nnum_steps = 7\n")
    settings = load_settings(model=str(path), config=config, env={})
    assert (settings.model.num_steps, settings.model.spacing, settings.origins["model.spacing"]) == (
        7,
        "trailing",
        str(path),
    )
    with caplog.at_level("INFO", "diffserve"):
        profile = load_model(path, dtype="float32", device="cpu").profile
    assert tuple(getattr(profile, key) for key in START) == ("euler", 2, 1.0, "trailing")
    reason = "the name 'tiny-lightning-2step' and trailing timesteps"
    assert f"is a few-step model (lightning), recognized by {reason}" in caplog.text
    assert "defaults are sampler euler, steps 2, spacing trailing, guidance 1" in caplog.text
