"""Bodies of ``/sdapi/v1``.

As in A1111, unknown keys are ignored, and numbers may be strings; wrong values are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

from diffserve.api.fields import MAX_CLIP_SKIP
from diffserve.api.types import MAX_IMAGES, MAX_PROMPT_CHARS, Priority
from diffserve.models.controlnets import MAX_RESOLUTION, MAX_THRESHOLD
from diffserve.service.http.bodies import MAX_DEADLINE_S, Body
from diffserve.service.images.edit_schemas import MAX_PICTURES
from diffserve.service.images.schemas import MAX_NAME_CHARS, MAX_STEPS, Fraction, Guidance, Seed

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
    refiner_checkpoint: Label | None = None
    refiner_switch_at: Fraction | None = None

    priority: Priority | None = None
    deadline_s: Deadline | None = None

    enable_hr: bool | None = None
    hr_scale: Annotated[float, Field(gt=0.0, le=8.0)] | None = None
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
