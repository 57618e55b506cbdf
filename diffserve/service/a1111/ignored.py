"""Warnings about A1111's fields, settings and scripts that this server does not support.

A value without an effect in A1111, such as a switch that is off, causes no warning, because clients send every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from diffserve.service.a1111.schemas import Img2ImgBody, Txt2ImgBody
from diffserve.service.http.bodies import show, show_name

CONTROLNET: Final = "controlnet"
STRETCH, STRETCH_LATENTS = 0, 3
FILL, LATENT_NOISE = 0, 2

Neutral = tuple[object, ...]
"""Values of a field that have no effect in A1111; None and "" never have one."""

FIELDS: Final[dict[str, Neutral]] = {
    "restore_faces": (False,),
    "tiling": (False,),
    "s_churn": (0,),
    "s_noise": (1,),
    "s_min_uncond": (0,),
    "disable_extra_networks": (False,),
}
HIRES_FIELDS: Final[dict[str, Neutral]] = {
    "hr_checkpoint_name": ("use same checkpoint", "none"),
    "firstpass_image": (),
    "firstphase_width": (0,),
    "firstphase_height": (0,),
}
IMG2IMG_FIELDS: Final[dict[str, Neutral]] = {"initial_noise_multiplier": (1,), "latent_mask": ()}
SETTINGS: Final[dict[str, Neutral]] = {
    "always_discard_next_to_last_sigma": (False,),
    "comma_padding_backtrack": (20,),
    "emphasis": ("original",),
    "eta_ancestral": (1,),
    "eta_ddim": (0,),
    "eta_noise_seed_delta": (0,),
    "hires_fix_use_firstpass_conds": (False,),
    "img2img_background_color": ("#ffffff",),
    "img2img_color_correction": (False,),
    "img2img_extra_noise": (0,),
    "initial_noise_multiplier": (1,),
    "pad_cond_uncond": (False,),
    "randn_source": ("cpu",),
    "s_churn": (0,),
    "s_min_uncond": (0,),
    "s_noise": (1,),
    "sd_hypernetwork": ("none",),
    "sd_lora": ("none",),
    "sd_unet": ("automatic", "none"),
    "sd_vae": ("automatic", "none"),
    "sgm_noise_multiplier": (False,),
    "skip_early_cond": (0,),
    "tiling": (False,),
    "token_merging_ratio": (0,),
    "token_merging_ratio_hr": (0,),
    "token_merging_ratio_img2img": (0,),
    "use_old_emphasis_implementation": (False,),
    "use_old_hires_fix_width_height": (False,),
    "use_old_karras_scheduler_sigmas": (False,),
    "use_old_scheduling": (False,),
}


def ignored(body: Txt2ImgBody) -> list[str]:
    """Return a sentence for everything in ``body`` that A1111 applies and this server does not."""
    fields, values = dict(FIELDS), dict(body.model_extra or {}) | dict(body)
    if isinstance(body, Img2ImgBody):
        fields |= IMG2IMG_FIELDS
    elif body.enable_hr:
        fields |= HIRES_FIELDS
    names = [name for name, neutral in fields.items() if has_effect(values.get(name), neutral)]
    if all(_number(side) > 0 for side in (body.seed_resize_from_w, body.seed_resize_from_h)):
        names.append("seed_resize_from_w")
    names += [f"override_settings.{name}" for name in ignored_settings(body.override_settings or {})]
    sentences = [f"{name} changes nothing here." for name in names]
    sentences += [f"the script {show(name)} is not here." for name in _active_scripts(body.alwayson_scripts or {})]
    return sentences + (list(_img2img(body)) if isinstance(body, Img2ImgBody) else [])


def ignored_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of ``settings`` that A1111 applies and this server does not."""
    return [name for name, neutral in SETTINGS.items() if has_effect(settings.get(name), neutral)]


def ignored_refiner(body: Txt2ImgBody, refiner: str) -> list[str]:
    """Return a warning if ``body`` names another refiner than ``refiner``, the only one of the model."""
    name = (body.refiner_checkpoint or "").partition(" [")[0]
    if name in ("", "None") or name == refiner.partition(" [")[0]:
        return []
    return [f"refiner_checkpoint is {show_name(name)}; the refiner of this model, {refiner}, was used."]


def _img2img(body: Img2ImgBody) -> Iterator[str]:
    if body.resize_mode == STRETCH_LATENTS:
        yield f"resize_mode {STRETCH_LATENTS} (latent upscale) is not here; the picture was stretched."
    if body.mask and (body.inpainting_fill or FILL) >= LATENT_NOISE:
        yield f"inpainting_fill {body.inpainting_fill} (latents) is not here; colors around it filled the mask."
    blurs = {blur for blur in (body.mask_blur_x, body.mask_blur_y) if blur is not None}
    if body.mask and body.mask_blur is None and len(blurs) > 1:
        yield f"mask_blur_x and mask_blur_y differ; the larger, {max(blurs)}, was used for both."


def _active_scripts(scripts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of scripts other than ControlNet, unless their first argument, A1111's switch, is off."""
    for name, script in sorted(scripts.items()):
        arguments = script.get("args") if isinstance(script, dict) else script
        is_off = isinstance(arguments, list) and any(switch is False for switch in arguments[:1])
        if name.lower() != CONTROLNET and arguments and not is_off:
            yield name


def has_effect(value: object, neutral: Neutral) -> bool:
    """Return whether ``value`` changes the image in A1111; ``neutral`` are values that do not."""
    return value not in (None, "", [], {}) and not any(_is_same(value, other) for other in neutral)


def _is_same(value: object, other: object) -> bool:
    """Compare two values; numbers and switches may be strings, as clients of A1111 send them."""
    if isinstance(other, str):
        return isinstance(value, str) and value.strip().lower() == other
    return _number(value) == _number(other)


def _number(value: object) -> float:
    """Return a number, a switch or their text as a number; NaN for anything else."""
    text = str(value).strip().lower()
    try:
        return {"true": 1.0, "false": 0.0}[text] if text in ("true", "false") else float(text)
    except ValueError:
        return float("nan")
