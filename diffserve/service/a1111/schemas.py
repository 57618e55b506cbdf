"""Bodies of ``/sdapi/v1``, and warnings about their fields, settings and scripts that this server does not support.

As in A1111, unknown keys are ignored, and numbers may be strings; wrong values are refused. A value without an effect
in A1111, such as a switch that is off, causes no warning, because clients send every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

from diffserve.api.fields import MAX_CLIP_SKIP, REQUEST_FIELDS, TemplateMode
from diffserve.api.types import MAX_IMAGES, MAX_PROMPT_CHARS, Priority
from diffserve.models.controlnets import MAX_RESOLUTION, MAX_THRESHOLD
from diffserve.service.http.bodies import MAX_DEADLINE_S, Body, show, show_name
from diffserve.service.images.schemas import MAX_NAME_CHARS, MAX_PICTURES, MAX_STEPS, Fraction, Guidance, Seed

MAX_SIDE: Final = 1 << 16
MAX_LABEL_CHARS: Final = 256

Prompt = Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
Count = Annotated[int, Field(ge=1, le=MAX_IMAGES)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Deadline = Annotated[float, Field(gt=0.0, le=MAX_DEADLINE_S)]
Grown = Annotated[int, Field(ge=0, le=MAX_SIDE)]
Pixels = Annotated[int, Field(ge=0, le=256)]


class A1111Body(Body):
    """Base class of A1111 bodies: numbers may be strings, null means omitted, unknown keys are ignored."""

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False)

    @property
    def warnings(self) -> list[str]:
        """Empty, because clients send every key that they know."""
        return []


class Txt2ImgBody(A1111Body):
    """``POST /sdapi/v1/txt2img``; omitted fields are read from ``infotext``, else they have the model's defaults."""

    model_config = ConfigDict(title="Txt2ImgRequest")

    prompt: Prompt | None = None
    negative_prompt: Prompt | None = None
    styles: Annotated[list[Label], Field(max_length=64)] | None = None
    seed: Seed | None = None
    subseed: Any = None  # read only with subseed_strength
    subseed_strength: Fraction | None = None
    seed_resize_from_w: Any = None
    seed_resize_from_h: Any = None
    sampler_name: Name | None = None
    sampler_index: Name | None = None
    scheduler: Name | None = None
    batch_size: Count | None = None
    n_iter: Count | None = None
    steps: Steps | None = None
    cfg_scale: Guidance | None = None
    width: Side | None = None
    height: Side | None = None
    eta: Fraction | None = None
    clip_skip: Annotated[int, Field(ge=-1, le=MAX_CLIP_SKIP)] | None = None
    restore_faces: bool | None = None
    tiling: bool | None = None
    denoising_strength: Fraction | None = None
    override_settings: dict[str, Any] | None = None
    alwayson_scripts: dict[str, Any] | None = None
    script_name: Label | None = None
    infotext: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    force_task_id: Label | None = None
    send_images: bool | None = None
    template: Annotated[TemplateMode, Field(description=REQUEST_FIELDS["template"].help)] | None = None
    refiner_checkpoint: Label | None = None
    refiner_switch_at: Fraction | None = None

    priority: Priority | None = None
    deadline_s: Deadline | None = None

    enable_hr: bool | None = None
    hr_scale: Annotated[float, Field(ge=1.0, le=8.0)] | None = None
    hr_upscaler: Label | None = None
    hr_second_pass_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None
    hr_resize_x: Grown | None = None
    hr_resize_y: Grown | None = None
    hr_sampler_name: Name | None = None
    hr_scheduler: Name | None = None
    hr_prompt: Prompt | None = None
    hr_negative_prompt: Prompt | None = None

    @property
    def num_images(self) -> int:
        """Number of images of the request, over all batches."""
        return (self.batch_size or 1) * (self.n_iter or 1)


class Img2ImgBody(Txt2ImgBody):
    """``POST /sdapi/v1/img2img``."""

    model_config = ConfigDict(title="Img2ImgRequest")

    init_images: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_PICTURES)] | None = None
    mask: str | None = None
    resize_mode: Annotated[int, Field(ge=0, le=3)] | None = None
    mask_blur: Pixels | None = None
    mask_blur_x: Pixels | None = None
    mask_blur_y: Pixels | None = None
    inpainting_fill: Annotated[int, Field(ge=0, le=3)] | None = None
    inpaint_full_res: bool | None = None
    inpaint_full_res_padding: Pixels | None = None
    inpainting_mask_invert: Annotated[int, Field(ge=0, le=1)] | None = None
    include_init_images: bool | None = None


class DetectBody(A1111Body):
    """``POST /controlnet/detect`` of A1111's ControlNet extension; -1 is the module's own value."""

    model_config = ConfigDict(title="DetectRequest")

    controlnet_module: Label | None = None
    controlnet_input_images: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_PICTURES)]
    controlnet_processor_res: Annotated[int, Field(ge=-1, le=MAX_RESOLUTION)] | None = None
    controlnet_threshold_a: Annotated[float, Field(ge=-1.0, le=MAX_THRESHOLD)] | None = None
    controlnet_threshold_b: Annotated[float, Field(ge=-1.0, le=MAX_THRESHOLD)] | None = None


class PngInfoBody(A1111Body):
    """``POST /sdapi/v1/png-info``."""

    model_config = ConfigDict(title="PngInfoRequest")

    image: Annotated[str, Field(min_length=1)]


class ProgressBody(A1111Body):
    """``POST /internal/progress``."""

    model_config = ConfigDict(title="TaskProgressRequest")

    id_task: Label
    id_live_preview: int | None = None
    live_preview: bool | None = None


class OptionsBody(A1111Body):
    """``POST /sdapi/v1/options``: any keys; the supported ones are stored for the client."""

    model_config = ConfigDict(title="OptionsRequest")

    sd_model_checkpoint: Label | None = None
    CLIP_stop_at_last_layers: Annotated[int, Field(ge=1, le=100)] | None = None


CONTROLNET: Final = "controlnet"
STRETCH, STRETCH_LATENTS = 0, 3
FILL, LATENT_NOISE = 0, 2

DYNAMIC_PROMPTS: Final = "dynamic prompts"
"""Beginning of the name of the script of the extension sd-dynamic-prompts, which a version follows, in lower case."""

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
    sentences = [f"{name} has no effect." for name in names]
    sentences += [f"the script {show(name)} is not supported." for name in _active_scripts(body.alwayson_scripts or {})]
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
        yield f"resize_mode {STRETCH_LATENTS} (latent upscale) is not supported; the image was stretched."
    if body.mask and (body.inpainting_fill or FILL) >= LATENT_NOISE:
        yield (
            f"inpainting_fill {body.inpainting_fill} (latents) is not supported; the masked area was filled with the "
            "surrounding colors."
        )
    blurs = {blur for blur in (body.mask_blur_x, body.mask_blur_y) if blur is not None}
    if body.mask and body.mask_blur is None and len(blurs) > 1:
        yield f"mask_blur_x and mask_blur_y differ; the larger, {max(blurs)}, was used for both."


def _active_scripts(scripts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of scripts that are not served, unless their first argument, A1111's switch, is off."""
    for name, script in sorted(scripts.items()):
        arguments = script.get("args") if isinstance(script, dict) else script
        is_off = isinstance(arguments, list) and any(switch is False for switch in arguments[:1])
        is_served = name.lower() == CONTROLNET or name.lower().startswith(DYNAMIC_PROMPTS)
        if not is_served and arguments and not is_off:
            yield name


def template_of(body: Txt2ImgBody) -> TemplateMode | None:
    """Return the template mode of ``body``: its field, or what the arguments of the script "Dynamic Prompts" say.

    The first argument of that script is its switch, the second one chooses combinatorial generation.
    """
    if body.template is not None:
        return body.template
    for name, script in (body.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if name.lower().startswith(DYNAMIC_PROMPTS) and isinstance(arguments, list) and True in arguments[:1]:
            return "combinatorial" if True in arguments[1:2] else "random"
    return None


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
