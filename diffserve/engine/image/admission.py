"""Admission of image requests: check them against the model, fill in defaults, compile the sampler. No torch.

Invalid values are refused here, with the value and a fix; questionable ones produce a warning in the result.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import FULL_INTERVAL, HIRES, REQUEST_FIELDS, NoiseSource
from diffserve.api.prompt_schedule import is_composed, texts_read
from diffserve.api.prompt_syntax import unserved_constructs
from diffserve.api.sizes import enlarged_px, on_grid_px, row_cost
from diffserve.api.tiles import TileLayout, tiles_of
from diffserve.api.types import AUTO_SPACING, DenoisingRecipe, DiffusionParams, GenerationRequest, ModelInfo, Picture
from diffserve.engine.image.caches import SKIPS
from diffserve.engine.image.prompt_steps import schedule_prompts
from diffserve.engine.image.task import GenerationSettings, LiveRequest
from diffserve.models.controlnets import PARAM, Control
from diffserve.models.learned_samplers import LearnedSamplers, check_learned, num_steps_of
from diffserve.models.loras import NO_LORAS, CheckedLoras, Lora, read_tags
from diffserve.models.profiles import begin_with_loras
from diffserve.models.references import Reference
from diffserve.models.vocabulary import warn_of_unknown
from schedulers import (
    SAMPLERS,
    BadEta,
    BadNumSteps,
    BadSigmaRange,
    BadStrength,
    NoiseSchedule,
    ScheduleError,
    StepTable,
    TableOptions,
    UnknownSampler,
    UnknownSpacing,
)
from schedulers.learned import is_learned

DISTINCT_SEEDS = 2**32
"""Bits of a seed that torch's CPU generator uses; the CUDA generator gets the same bits."""

STABLE_DIFFUSION = ("sd1", "sd2")
"""Families of diffusers' StableDiffusionPipeline, which sets ``clip_sample`` to False and ``steps_offset`` to 1."""

BLAME: dict[type[ScheduleError], tuple[str, str]] = {
    UnknownSampler: ("sampler", "unknown_sampler"),
    UnknownSpacing: ("spacing", "invalid_value"),
    BadNumSteps: ("num_inference_steps", "invalid_value"),
    BadStrength: ("strength", "invalid_value"),
    BadEta: ("eta", "invalid_value"),
    BadSigmaRange: ("sigma_min", "invalid_value"),
}
"""The request field and the code for each way a table cannot be compiled."""

HIRES_FIELDS = tuple(name for name in REQUEST_FIELDS if name.startswith(HIRES))
HIRES_PARAMS = {
    "sampler": "hires_sampler",
    "sigma_schedule": "hires_schedule",
    "spacing": "hires_schedule",
    "num_inference_steps": "hires_steps",
    "strength": "hires_strength",
}
"""The fields of the second pass in place of those of the first."""

SECOND_PASS_ELSEWHERE = (
    "hires_scale and hires_size are not supported where another process decodes the images (engine.stage): leave them "
    "out."
)

MAX_TILED_SIDE_PX = 4096
"""Largest side of an image whose UNet rows are tiles."""

Tiles = TileLayout | None


class ImageAdmission:
    """Turns a :class:`GenerationRequest` into a :class:`LiveRequest`, or raises :class:`InvalidRequest`.

    Args:
        defaults: The profile's sigma schedule and eta, which belong to its sampler; another sampler does not use them.
        keeps_latents: Whether images may start from those of similar prompts.
        may_decode: Whether this process decodes images, which the second pass of hires fix needs.
        noise_source: Noise source of requests without one.
        check_room: Raises InvalidRequest for a width and a height that can never fit into memory. Further arguments are
            whether an init image is encoded, whether ControlNets are active, whether the refiner is, and the width and
            height of the tiles, if there are any.
        check_loras: Returns the facts of adapters, or raises InvalidRequest for those that do not fit the model.
        check_controlnets: Returns a digest of ControlNets.
        check_references: Returns references with the full names of their adapters, and a digest.
        check_upscaler: See ``UpscalerStore.check_between_passes``; without it, only filters are possible.
        check_scores: See ``ImageScores.check``.
    """

    def __init__(
        self,
        info: ModelInfo,
        schedule: NoiseSchedule,
        scheduler_config: Mapping[str, Any],
        defaults: DiffusionParams | None = None,
        *,
        keeps_latents: bool = False,
        may_decode: bool = True,
        noise_source: NoiseSource = "cpu",
        check_room: Callable[[int, int, bool, bool, bool, tuple[int, int] | None], None] = lambda *_: None,
        check_loras: Callable[[tuple[Lora, ...]], CheckedLoras] = lambda _: NO_LORAS,
        check_controlnets: Callable[[tuple[Control, ...]], bytes] = lambda _: b"",
        check_references: Callable[[tuple[Reference, ...]], tuple[tuple[Reference, ...], bytes]] = lambda refs: (
            refs,
            b"",
        ),
        check_upscaler: Callable[[str, int, int], tuple[str, bytes]] = lambda name, *_: (name, b""),
        check_scores: Callable[[GenerationRequest, int, int], tuple[str, ...]] = lambda *_: (),
    ) -> None:
        self.info = info
        self.schedule = schedule
        self.defaults = defaults or DiffusionParams(sampler=info.default_sampler)
        self._keeps_latents = keeps_latents
        self._may_decode = may_decode
        self._noise_source = noise_source
        self._scheduler_config = dict(scheduler_config)
        self._check_room = check_room
        self._check_loras = check_loras
        self._check_controlnets = check_controlnets
        self._check_references = check_references
        self._check_upscaler = check_upscaler
        self._check_scores = check_scores
        self._learned = LearnedSamplers.of(info)
        self._options = lru_cache(maxsize=256)(self._read_options)
        self._compile = lru_cache(maxsize=256)(self._compile_table)

    def admit(self, request: GenerationRequest, now_s: float) -> LiveRequest:
        """Check ``request``, resolve it, and give it a seed. ``now_s`` starts its clock."""
        is_ours = request.model in ("", self.info.model_id)
        check(is_ours, f"the model is {request.model[:80]!r}; this one is {self.info.model_id!r}.", "model")
        width_px, height_px = self._size(request)
        kind = self._kind(request, width_px, height_px)
        loras = self._check_loras(request.diffusion.loras) if request.diffusion.loras else NO_LORAS
        settings, warnings = self._settings(request, width_px, height_px, kind, loras)
        alone = [msgspec.structs.replace(request, prompt=text, image_prompts=()) for text in request.image_prompts]
        image_settings = tuple(self._settings(each, width_px, height_px, kind, loras)[0] for each in alone)
        warnings += loras.warnings + _unserved(request) + self._unknown_words(request, loras.words)
        warnings += self._check_scores(request, width_px, height_px)
        num_further = request.num_painted - 1
        seed = secrets.randbelow(DISTINCT_SEEDS - num_further) if request.seed is None else request.seed
        varied = settings.variation_seed
        last = seed + num_further if varied is None else max(seed, varied + num_further)
        if last >= DISTINCT_SEEDS:
            warnings += (
                f"seeds of {DISTINCT_SEEDS} or more repeat smaller ones: {last} gives the same image as "
                f"{last % DISTINCT_SEEDS}.",
            )
        return LiveRequest(
            request=request,
            settings=settings,
            seed=seed,
            warnings=warnings,
            submitted_s=now_s,
            image_settings=image_settings,
        )

    def _settings(
        self, request: GenerationRequest, width_px: int, height_px: int, kind: str, loras: CheckedLoras
    ) -> tuple[GenerationSettings, tuple[str, ...]]:
        info = self.info
        params, warnings = begin_with_loras(request.diffusion)
        strength = 1.0 if request.init_image is None else params.strength
        num_steps = num_steps_of(params, info)
        scale = info.default_guidance_scale if params.guidance_scale is None else params.guidance_scale
        too_many_steps = f"num_steps is {num_steps}; this model allows at most {info.train_timesteps}."
        check(num_steps <= info.train_timesteps, too_many_steps, "num_inference_steps")
        if scale < 1.0:
            warnings += (f"guidance_scale {scale:g} was replaced by 1, which means no guidance.",)
            scale = 1.0
        sampler_digest = ""
        if is_learned(params.sampler):
            learned = self._learned.find(params.sampler)
            sampler_digest = learned.digest
            warnings += check_learned(params, learned.sampler, strength, scale)
        rows = self._row_settings(params, num_steps, strength, scale)
        table, switch = rows["table"], rows["switch_row"]
        rows |= self._composed(request.prompt, request.negative_prompt, params, rows, scale)
        guided = rows["guided"]
        if info.embeds_guidance and params.guidance_interval != FULL_INTERVAL:
            warnings += (
                f"guidance_interval has no effect on {info.model_id}, which takes the guidance scale as an input.",
            )
        cannot = (
            f"cache_interval is {params.cache_interval}; the UNet of {info.model_id} cannot be split into a deep and a "
            "shallow part: leave it out, or give 1."
        )
        check(params.cache_interval == 1 or info.shallow_share is not None, cannot, "cache_interval")
        alone = (
            f"cache_interval is {params.cache_interval}; it cannot be combined with ControlNets: give 1, which is off."
        )
        check(params.cache_interval == 1 or not params.controlnets, alone, "cache_interval")
        no_refiner = (
            f"switch_at is {params.switch_at}; {info.model_id} has no refiner to switch to: leave it out, or name one "
            "([model] refiner, --refiner)."
        )
        check(params.switch_at is None or bool(info.refiner), no_refiner, "switch_at")
        if params.switch_at is not None and switch is None:
            warnings += (f"switch_at {params.switch_at:g} leaves no steps of {num_steps} to the refiner.",)
        most_skip = f"{info.model_id} allows 1 to {info.most_clip_skip}."
        too_far = f"clip_skip is {params.clip_skip}; {most_skip}"
        check(params.clip_skip <= info.most_clip_skip, too_far, "clip_skip")
        no_sizes = f"{info.model_id} has no size conditioning; micro_conditioning is only for SDXL: leave it out."
        check(params.micro_conditioning is None or info.has_size_conditioning, no_sizes, "micro_conditioning")
        if params.similarity_threshold is not None:
            self._check_may_begin_from_similar(params.similarity_threshold, kind)
        if params.variation_seed is not None and not params.variation_strength:
            warnings += ("variation_seed has no effect without variation_strength.",)
        if params.token_merging:
            warnings += ("token_merging has no effect: it was removed in 0.2.",)
        if params.guidance_rescale and not guided.any():
            warnings += ("guidance_rescale has no effect without guidance.",)
        if request.negative_prompt.strip() and not guided.any():
            warnings += ("the negative prompt has no effect without guidance and was not used.",)
        recipe = {name: getattr(params, name) for name in DenoisingRecipe.__struct_fields__}
        recipe |= {name: getattr(table, name) for name in ("sampler", "spacing", "sigma_schedule", "eta")}
        recipe |= {"num_steps": num_steps, "guidance_scale": scale, "variation_seed": _variation_seed(request)}
        recipe["noise_source"] = params.noise_source or self._noise_source
        reference_digest = b""
        if params.references:
            recipe["references"], reference_digest = self._check_references(params.references)
        recipe["strength"] = None if request.init_image is None else strength
        no_image = f"outpaint is {params.outpaint!r} without a start image to extend; give one, or leave it out."
        check(params.outpaint is None or request.mask_image is not None, no_image, "outpaint")
        tiles = tiles_of(params, info, width_px, height_px)
        if tiles is None and params.tile_overlap is not None and not params.tile_size and not params.has_hires:
            warnings += ("tile_overlap has no effect without tile_size.",)
        settings = GenerationSettings(
            width_px=width_px,
            height_px=height_px,
            kind=kind,
            control_digest=self._check_controlnets(params.controlnets) if params.controlnets else b"",
            lora_digest=loras.digest,
            reference_digest=reference_digest,
            sampler_digest=sampler_digest,
            shallow_share=info.shallow_share or 1.0,
            tiles=tiles,
            row_cost=row_cost(info, *(_call_px(tiles) or (width_px, height_px))),
            **recipe,
            **rows,
        )
        if params.similarity_threshold is not None:
            shorter = tuple(self._without_first(settings, params, int(skip * num_steps)) for skip in SKIPS)
            settings = msgspec.structs.replace(settings, shorter=shorter)
        warnings += table.warnings + self._few_steps(table, strength)
        if params.has_hires:
            return self._with_second(request, params, settings, warnings)
        idle_fields = [name for name in HIRES_FIELDS if getattr(params, name) != REQUEST_FIELDS[name].default]
        if idle_fields:
            warnings += (f"{', '.join(idle_fields)} has no effect without hires_scale or hires_size.",)
        return settings, warnings

    def _with_second(
        self, request: GenerationRequest, params: DiffusionParams, first: GenerationSettings, warnings: tuple[str, ...]
    ) -> tuple[GenerationSettings, tuple[str, ...]]:
        """Return ``first`` with the settings of the second pass of hires fix, and the warnings of both."""
        info = self.info
        message = "hires_scale and hires_size are for images from text: leave them out, or leave out the start image."
        check(request.init_image is None, message, "hires_scale")
        check(self._may_decode, SECOND_PASS_ELSEWHERE, "hires_scale")
        upscaler, upscaler_digest = self._check_upscaler(params.hires_upscaler, first.width_px, first.height_px)
        for name in ("hires_prompt", "hires_negative_prompt"):
            tags = "{} has a LoRA tag; put it into the prompt: both passes use the adapters of the request."
            check(not read_tags(getattr(params, name) or "")[1], tags.format(name), name)
        size = request.hires_px or on_grid_px(info, enlarged_px(params, first.width_px, first.height_px) or (0, 0))
        for name, side_px in zip(("width", "height"), size, strict=True):
            is_tiled = params.tile_size != 0
            self._check_side(f"the {name} of the enlarged image", side_px, "hires_scale", is_tiled=is_tiled)
        tiles = tiles_of(params, info, *size, is_second=True)
        inputs = True, bool(request.control_images), params.switch_at is not None
        self._check_room(*size, *inputs, _call_px(tiles))
        sampler = params.hires_sampler or params.sampler
        changes: dict[str, Any] = {"sampler": sampler, "num_steps": params.hires_steps or params.num_steps}
        if params.hires_sampler is not None or params.hires_schedule is not None:
            changes["sigma_schedule"] = params.hires_schedule
        num_steps = num_steps_of(msgspec.structs.replace(params, **changes), info)
        strength = params.second_strength(num_steps, is_tiled=tiles is not None)
        pass_params = msgspec.structs.replace(params, strength=strength, **changes)
        too_many_steps = f"hires_steps is {num_steps}; this model allows at most {info.train_timesteps}."
        check(num_steps <= info.train_timesteps, too_many_steps, "hires_steps")
        if is_learned(sampler):
            learned_only = (
                f"the second pass runs sampler {sampler!r} at hires_strength {strength:g}; a learned "
                "sampler only runs all its steps: give hires_sampler, such as ddim."
            )
            check(strength == 1.0, learned_only, "hires_sampler")
        try:
            rows = self._row_settings(pass_params, num_steps, strength, first.guidance_scale)
            prompt, negative = request.prompt_of(0, is_second=True), request.negative_of(is_second=True)
            rows |= self._composed(prompt, negative, pass_params, rows, first.guidance_scale)
        except InvalidRequest as error:
            param = HIRES_PARAMS.get(error.param or "", error.param)
            text = f"in the second pass (hires fix), {error.message}"
            raise InvalidRequest(text, param=param, code=error.code) from None
        width_px, height_px = size
        second = msgspec.structs.replace(
            first,
            width_px=width_px,
            height_px=height_px,
            kind="inpaint" if info.is_inpainting else "image",
            tiles=tiles,
            row_cost=row_cost(info, *(_call_px(tiles) or size)),
            strength=strength,
            num_steps=num_steps,
            skipped_steps=0,
            shorter=(),
            **rows,
        )
        shorter = tuple(msgspec.structs.replace(each, second=second) for each in first.shorter)
        settings = msgspec.structs.replace(
            first,
            hires_upscaler=upscaler,
            upscaler_digest=upscaler_digest,
            hires_strength=strength,
            second=second,
            shorter=shorter,
        )
        return settings, warnings + tuple(text for text in rows["table"].warnings if text not in warnings)

    def _composed(
        self, prompt: str, negative_prompt: str, params: DiffusionParams, rows: Mapping[str, Any], scale: float
    ) -> dict[str, Any]:
        """Return the row settings that the prompts change: composed ones guide all rows, by 1 where guidance is off.

        Raises:
            InvalidRequest: The model or another field does not allow such a prompt.
        """
        is_guided = rows["guided"].any() or is_composed(prompt)
        prompts = schedule_prompts(prompt, negative_prompt, rows["table"], is_guided=is_guided)
        if prompts is None:
            return {"prompts": None, "guidance_at": ()}
        threshold = params.similarity_threshold
        alone = (
            f"similarity_threshold is {threshold}; it cannot be combined with prompt editing, alternation, AND or "
            "MASK: leave it out, or give the prompt without them."
        )
        check(threshold is None, alone, "similarity_threshold")
        if not prompts.is_composed:
            return {"prompts": prompts, "guidance_at": ()}
        no_rows = (
            f"the prompt has parts joined by AND or with a MASK; {self.info.model_id} has no unconditional row, which "
            r"they are combined with: give one part without a MASK, or write \AND for the word."
        )
        check(not self.info.embeds_guidance, no_rows, "prompt")
        guided = np.ones_like(rows["guided"])
        full = full_rows(guided, params.cache_interval, rows["switch_row"])
        guidance_at = tuple(scale if is_guided else 1.0 for is_guided in rows["guided"].tolist())
        return {"prompts": prompts, "guided": guided, "full": full, "guidance_at": guidance_at}

    def _check_may_begin_from_similar(self, threshold: float, kind: str) -> None:
        prefix = f"similarity_threshold is {threshold:g}; "
        none_kept = "this server has no latent cache: leave it out, or set engine.latent_cache_bytes."
        check(self._keeps_latents, prefix + none_kept, "similarity_threshold")
        from_text = (
            "it is only for text-to-image: leave it out, or leave out the init image and do not use an inpainting "
            "model."
        )
        check(kind == "text", prefix + from_text, "similarity_threshold")

    def _without_first(
        self, settings: GenerationSettings, params: DiffusionParams, num_skipped: int
    ) -> GenerationSettings:
        """Return ``settings`` without the first ``num_skipped`` steps."""
        if num_skipped == 0:
            return settings
        num_steps = settings.num_steps
        strength = (num_steps - num_skipped + 0.5) / num_steps
        rows = self._row_settings(params, num_steps, strength, settings.guidance_scale, num_skipped)
        return msgspec.structs.replace(settings, skipped_steps=num_skipped, **rows)

    def _row_settings(
        self, params: DiffusionParams, num_steps: int, strength: float, scale: float, num_skipped: int = 0
    ) -> dict[str, Any]:
        """Return the table and the other settings of its rows, by their names in ``GenerationSettings``."""
        table, switch = self._switched_table(params, num_steps, strength)
        row_scale = 1.0 if self.info.embeds_guidance else scale  # then no row is unconditional
        guided = guided_rows(table, row_scale, params.guidance_interval, num_skipped)
        return {
            "table": table,
            "guided": guided,
            "full": full_rows(guided, params.cache_interval, switch),
            "controlled": active_rows(table, params.controlnets, num_skipped, switch),
            "referenced": active_rows(table, params.references, num_skipped, switch),
            "switch_row": switch,
        }

    def _switched_table(self, params: DiffusionParams, num_steps: int, strength: float) -> tuple[StepTable, int | None]:
        """Compile the table, and return it with the first row of the refiner in it, or ``None``.

        The refiner begins with the first step below the noise level of ``switch_at``, as in diffusers'
        ``denoising_start``. The multistep history is empty there, because diffusers runs base and refiner by two
        schedulers.
        """
        table = self._table(params, num_steps, strength)
        if params.switch_at is None:
            return table, None
        num_timesteps = self.info.train_timesteps
        begins_step = np.diff(table.step_of_row, prepend=-1) != 0
        is_below = table.timestep < round(num_timesteps - params.switch_at * num_timesteps)
        rows = np.flatnonzero(begins_step & is_below)
        if not len(rows) or rows[0] == 0:
            return table, 0 if len(rows) else None
        step = int(table.step_of_row[rows[0]])
        restart = table.requested_steps - table.num_steps + step
        table = self._table(params, num_steps, strength, restart=restart)
        return table, int(np.flatnonzero(table.step_of_row == step)[0])

    def _unknown_words(self, request: GenerationRequest, learned_words: Iterable[str]) -> tuple[str, ...]:
        """Warn of words in each of the two prompts that a model of a closed vocabulary was not trained on.

        ``learned_words`` are words that the request's adapters add.
        """
        world, model_id = self.info.world, self.info.model_id
        if world is None:
            return ()
        world = world.learning(learned_words)
        prompts = {False: (request.prompt, *request.image_prompts), True: (request.negative_prompt,)}
        unknown = {
            negative: tuple(
                dict.fromkeys(
                    word for text in _texts_of(texts, negative=negative) for word in world.unknown_words(text)
                )
            )
            for negative, texts in prompts.items()
        }
        return tuple(
            warn_of_unknown(model_id, words, negative=negative) for negative, words in unknown.items() if words
        )

    def _few_steps(self, table: StepTable, strength: float) -> tuple[str, ...]:
        """Warn if the model's own measurements say that these steps are too few to start from noise."""
        measured = self.info.fewest_steps if strength == 1.0 else None
        warning = measured and measured.warning(table.sampler, table.sigma_schedule, table.requested_steps)
        return (warning,) if warning else ()

    def _table(
        self, params: DiffusionParams, num_steps: int, strength: float, *, restart: int | None = None
    ) -> StepTable:
        defaults, info = self.defaults if params.sampler is None else DiffusionParams(), self.info
        default_spacing = None if info.default_spacing == AUTO_SPACING else info.default_spacing
        if is_learned(params.sampler):
            return self._learned.find(params.sampler).sampler.table()
        try:
            options = self._options(params.sampler or info.default_sampler)
            options = replace(
                options,
                spacing=params.spacing or default_spacing or options.spacing,
                sigma_schedule=params.sigma_schedule or defaults.sigma_schedule or options.sigma_schedule,
            )
            eta = defaults.eta if params.eta is None else params.eta
            return self._compile(options, num_steps, eta, strength, restart, (params.sigma_min, params.sigma_max))
        except ScheduleError as error:
            param, code = BLAME.get(type(error), (None, "invalid_value"))
            raise InvalidRequest(str(error), param=param, code=code) from None

    def _compile_table(
        self,
        options: TableOptions,
        num_steps: int,
        eta: float | None,
        strength: float,
        restart: int | None,
        sigma_range: tuple[float | None, float | None],
    ) -> StepTable:
        return options.compile(
            self.schedule, num_steps, eta=eta, strength=strength, restart=restart, sigma_range=sigma_range
        )

    def _read_options(self, sampler: str) -> TableOptions:
        """Options of ``sampler`` as diffusers' pipeline of the model's family reads the scheduler's configuration."""
        config = self._scheduler_config
        if self.info.family not in STABLE_DIFFUSION:
            return TableOptions.from_config(config, sampler, not_applied=("clip_sample",))
        options = TableOptions.from_config(config, sampler, ignore=("clip_sample",))
        is_own_class = config.get("_class_name") == SAMPLERS[options.sampler].diffusers_class
        return replace(options, steps_offset=1) if is_own_class or "steps_offset" in config else options

    def _size(self, request: GenerationRequest) -> tuple[int, int]:
        native = self.info.good_sizes[0]
        if request.init_image is not None:
            native = (request.init_image.width_px, request.init_image.height_px)
        width_px = native[0] if request.width_px is None else request.width_px
        height_px = native[1] if request.height_px is None else request.height_px
        params = request.diffusion
        for name, side_px in (("width", width_px), ("height", height_px)):
            self._check_side(name, side_px, is_tiled=bool(params.tile_size))
        inputs = request.init_image is not None, bool(request.control_images), params.switch_at is not None
        self._check_room(width_px, height_px, *inputs, _call_px(tiles_of(params, self.info, width_px, height_px)))
        return width_px, height_px

    def _check_side(self, name: str, side_px: int, param: str = "size", *, is_tiled: bool = False) -> None:
        multiple, max_side = self.info.size_multiple_px, self.info.max_side_px
        too_long = f"{name} is {side_px} px; this model allows at most {max_side} px per side."
        if is_tiled:
            max_side = max(max_side, MAX_TILED_SIDE_PX)
            too_long = f"{name} is {side_px} px; tiled images have at most {max_side} px per side."
        check(side_px <= max_side, too_long, param, "invalid_size")
        below = side_px // multiple * multiple
        tries = " or ".join(str(side) for side in (below, below + multiple) if 0 < side <= max_side)
        off_grid = f"{name} is {side_px} px; it must be a multiple of {multiple}: try {tries}."
        check(side_px == below, off_grid, param, "invalid_size")

    def _kind(self, request: GenerationRequest, width_px: int, height_px: int) -> str:
        init, mask = request.init_image, request.mask_image
        if init is not None:
            _check_picture("image", init, 3, width_px, height_px)
        if mask is not None:
            _check_picture("mask", mask, 1, width_px, height_px)
        for control, image in zip(request.diffusion.controlnets, request.control_images, strict=True):
            _check_picture(f"image of ControlNet {control.name!r}", image, 3, width_px, height_px, PARAM)
        for image in request.reference_images:
            wrong = f"a reference image has {image.channels} channel(s); it must have 3."
            check(image.channels == 3, wrong, "references", "invalid_image")
        if mask is not None or self.info.is_inpainting:
            return "inpaint"
        return "text" if init is None else "image"


def _call_px(tiles: Tiles) -> tuple[int, int] | None:
    """Return width and height of ``tiles`` in pixels, ``None`` without tiles."""
    return None if tiles is None else tiles.tile_px


def guided_rows(
    table: StepTable, scale: float, interval: tuple[float, float], num_skipped: int = 0
) -> NDArray[np.bool_]:
    """Bool (num_rows,): rows that need the unconditional row.

    None at a ``scale`` of 1 or below. Step k of n is inside the interval (from, to) when from <= k / n < to, so (0, 1)
    is every step and (f, f) none. ``num_skipped`` steps before those of the table count as well.
    """
    if scale <= 1.0:
        return np.zeros(table.num_rows, dtype=np.bool_)
    first, last = (math.ceil(round(edge * (table.num_steps + num_skipped), 6)) - num_skipped for edge in interval)
    return np.asarray((table.step_of_row >= first) & (table.step_of_row < last), dtype=np.bool_)


def active_rows(
    table: StepTable, adapters: Sequence[Control | Reference], num_skipped: int = 0, switch: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of ``adapters`` that are active in each row of the base model; empty without any.

    ``num_skipped`` steps before those of the table count as well; from row ``switch`` on the refiner runs.
    """
    if not adapters:
        return ()
    num_steps = table.num_steps + num_skipped
    active = [
        tuple(place for place, adapter in enumerate(adapters) if adapter.active(step + num_skipped, num_steps))
        for step in table.step_of_row.tolist()
    ]
    return tuple(places if switch is None or row < switch else () for row, places in enumerate(active))


def full_rows(guided: NDArray[np.bool_], interval: int, switch: int | None = None) -> NDArray[np.bool_]:
    """Return which rows run the whole UNet, bool (num_rows,).

    These are every ``interval``-th row of the table from the first on, and the first guided row after an unguided full
    row, as its unconditional row has no features yet. From row ``switch`` on another UNet runs and counting restarts.
    """
    if switch:
        parts = (full_rows(part, interval) for part in (guided[:switch], guided[switch:]))
        return np.concatenate([*parts])
    full: NDArray[np.bool_] = np.arange(len(guided)) % interval == 0
    has_uncond = False
    for row, is_guided in enumerate(guided):
        full[row] |= is_guided and not has_uncond
        has_uncond = is_guided if full[row] else has_uncond
    return full


def _check_picture(
    name: str, picture: Picture, channels: int, width_px: int, height_px: int, param: str | None = None
) -> None:
    check(
        (picture.width_px, picture.height_px) == (width_px, height_px),
        f"the {name} is {picture.width_px}x{picture.height_px} px, the generated image {width_px}x{height_px}; "
        f"resize the {name} first.",
        param or name,
        "invalid_image",
    )
    wrong = f"the {name} has {picture.channels} channel(s); it must have {channels}."
    check(picture.channels == channels, wrong, param or name, "invalid_image")


def _texts_of(prompts: Iterable[str], *, negative: bool) -> tuple[str, ...]:
    """Return the texts of prompts without the times and weights of editing and AND; prompts of too many unchanged."""
    name = "negative_prompt" if negative else "prompt"
    texts: list[str] = []
    for prompt in prompts:
        try:
            texts += texts_read(prompt, name, [2]) or (prompt,)
        except InvalidRequest:
            texts.append(prompt)
    return tuple(dict.fromkeys(texts))


def _unserved(request: GenerationRequest) -> tuple[str, ...]:
    """Return a warning for each kind of construct in the prompts that A1111 applies and this engine does not."""
    prompts, negatives = [request.prompt, *request.image_prompts], [request.negative_prompt]
    if request.diffusion.has_hires:
        prompts.append(request.prompt_of(0, is_second=True))
        negatives.append(request.negative_of(is_second=True))
    positive = (sentence for prompt in dict.fromkeys(prompts) for sentence in unserved_constructs(prompt))
    negative = (
        sentence for prompt in dict.fromkeys(negatives) for sentence in unserved_constructs(prompt, is_negative=True)
    )
    return tuple(dict.fromkeys((*positive, *negative)))


def _variation_seed(request: GenerationRequest) -> int | None:
    """Return the variation seed of the request's first image, or ``None`` without a variation.

    A seed that is not given is derived from the request's id, so that a retry on another replica gives the same images.
    """
    params = request.diffusion
    if not params.variation_strength or params.variation_seed is not None:
        return params.variation_seed if params.variation_strength else None
    drawn = int.from_bytes(hashlib.sha256(request.request_id.encode()).digest()[:8])
    return drawn % (DISTINCT_SEEDS - request.num_painted)
