"""Preparation of new images: encode text, init image and mask, and draw the start latent in diffusers' order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.micro_conditioning import PLAIN
from diffserve.api.tensor_values import Encodings
from diffserve.api.types import FILTERS, LANCZOS, Picture
from diffserve.engine.image.batch import LatentPool
from diffserve.engine.image.caches import LatentCache, skip_of
from diffserve.engine.image.prompt_steps import TextPair
from diffserve.engine.image.state import (
    ActiveControl,
    ImageState,
    InpaintInputs,
    NoiseStream,
    RefinerInputs,
    Variation,
    close_all,
    draw_noise,
)
from diffserve.engine.image.task import PAINT_FROM, GroupKey, ImageTask, texts_of
from diffserve.media.images import stretch
from diffserve.media.upscaling import TargetSize, enlarge
from diffserve.runtime import DiffusionModel
from diffserve.runtime.controlnet_store import ControlNetStore
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.lora_store import LoRAStore
from diffserve.runtime.low_rank import LoRASet
from diffserve.runtime.memory import without_frames
from diffserve.runtime.reference_pages import PagedReference
from diffserve.runtime.reference_store import ReferenceStore
from diffserve.runtime.text.conditioning import AnyConditioning, Conditioner
from diffserve.runtime.text.encoding import Conditioning, TextReading
from diffserve.runtime.text.transferred_encodings import to_tensor
from diffserve.runtime.transfer import send
from diffserve.runtime.upscaling.store import Enlargement, UpscalerStore

logger = logging.getLogger(__name__)


class Preparer:
    """Encodes the inputs of a request and opens its slot.

    Draws from the image's generator in the order of diffusers' pipelines. Text-to-image: the start latent.
    Image-to-image: the encoder's posterior, then the noise. Inpainting: the posterior (4-channel UNets always,
    9-channel ones below full strength), the noise, then the posterior of the masked image. If ``noise_source`` is the
    device, noise is computed there by a counter, and only the posterior is drawn from the generator.

    ``encode_share`` is ``Room.encode_share``.
    """

    def __init__(
        self,
        model: DiffusionModel,
        conditioner: Conditioner,
        pool: LatentPool,
        latent_cache: LatentCache,
        loras: LoRAStore,
        controlnets: ControlNetStore,
        references: ReferenceStore,
        upscalers: UpscalerStore,
        refiner: Conditioner | None = None,
        encode_share: Callable[[int, int], float] = lambda *_: 1.0,
    ) -> None:
        self.model = model
        self.conditioner = conditioner
        self.refiner = refiner
        self.pool = pool
        self.latent_cache = latent_cache
        self.loras = loras
        self.controlnets = controlnets
        self.references = references
        self.upscalers = upscalers
        self._encode_share = encode_share

    @contextmanager
    def together(self, tasks: Iterable[ImageTask]) -> Iterator[None]:
        """Encode the texts of ``tasks`` in few calls for the duration of the context.

        Texts of images with adapters, which may change the encoders, or with ``clip_skip`` are encoded one by one, and
        so are all texts if the shared calls fail.
        """
        tasks = list(tasks)
        self._take_over([task.live.request.encodings for task in tasks])
        try:
            plain_tasks = [task for task in tasks if not task.settings.loras and task.settings.clip_skip == 1]
            self.conditioner.precompute(pair for task in plain_tasks for pair in self._texts(task))
        except Exception as error:
            raise_if_sticky(error)
            without_frames(error)
            logger.warning(
                "prompts are encoded one by one, because encoding them in one batch raised %s", type(error).__name__
            )
        try:
            yield
        finally:
            self.conditioner.release_precomputed()
            self._take_over([])

    def _take_over(self, encodings: Iterable[Encodings | None]) -> None:
        """Provide text encodings of other processes to text encoders that run elsewhere."""
        present = [encoding for encoding in encodings if encoding is not None]
        refiner = (
            [] if self.refiner is None else [(self.refiner.model.text, [encoding.refiner for encoding in present])]
        )
        for text, tables in [(self.model.text, [encoding.base for encoding in present]), *refiner]:
            if text.encodings is not None:
                values = {name: value for table in tables for name, value in table.items()}
                text.encodings = {name: to_tensor(value, text.device) for name, value in values.items()}

    def enlarge_tile(self, task: ImageTask) -> None:
        """Enlarge one tile of the first pass of ``task`` by the upscaler network of its request."""
        assert task.first_pass is not None
        if task.enlargement is None:
            upscaler = self.upscalers.load(task.live.settings.hires_upscaler)
            target = TargetSize(task.settings.width_px, task.settings.height_px)
            task.enlargement = Enlargement(upscaler, task.first_pass, target)
        task.enlarged = task.enlargement.run_next()
        if task.enlarged is not None:
            task.enlargement = None

    def prepare(self, task: ImageTask) -> GroupKey:
        """Encode, draw, open the slot; returns the group whose UNet calls the image can join first.

        Raises PoolBusy, before anything is drawn, when the image has to wait for pages.
        """
        settings = task.settings
        loras = self.loras.take(settings.loras, task.live.lora_loading) if settings.loras else None
        conditionings = self.conditioner.condition_all(
            self._texts(task),
            width_px=settings.width_px,
            height_px=settings.height_px,
            reading=TextReading(loras, settings.clip_skip),
        )
        refined, references = None, tuple[PagedReference, ...]()
        try:
            references = self._references(task, conditionings[0])
            controls = tuple(self._controls(task))
            texts = self._embeddings(task, conditionings, loras) if controls else ()
            refined = None if settings.switch_row is None else self._refined(task)
            task.state = self._start_state(task, conditionings)
            task.state.controls, task.state.texts = controls, texts
        except BaseException:
            close_all(conditionings)
            for reference in references:
                reference.close()
            if refined is not None:
                close_all(refined.conditionings)
            raise
        task.state.loras, task.state.refined, task.state.references = loras, refined, references
        task.state.time_ids = self._time_ids(task, self.model)
        group = self._group(task, self.conditioner, conditionings[0])
        switch_row = task.settings.switch_row
        if switch_row is not None and task.row_index >= switch_row:
            return task.switch()
        return group._replace(lora_rank=loras.rank if loras else 0)

    @staticmethod
    def _group(task: ImageTask, conditioner: Conditioner, conditioning: AnyConditioning) -> GroupKey:
        mixes, (width_px, height_px) = conditioner.mixes_lengths, task.settings.call_px
        num_tokens = conditioner.model.text.window_tokens if mixes else conditioning.num_tokens
        return GroupKey(height_px, width_px, num_tokens)

    def _refined(self, task: ImageTask) -> RefinerInputs:
        """Return the conditioning of the refiner. Raises PoolBusy."""
        assert self.refiner is not None
        settings, model = task.settings, self.refiner.model
        conditionings = self.refiner.condition_all(
            self._texts(task),
            width_px=settings.width_px,
            height_px=settings.height_px,
            reading=TextReading(clip_skip=settings.clip_skip),
        )
        task.refined_group = self._group(task, self.refiner, conditionings[0])._replace(is_refined=True)
        return RefinerInputs(conditionings, self._time_ids(task, model))

    @staticmethod
    def _time_ids(task: ImageTask, model: DiffusionModel) -> Tensor | None:
        """Return time ids (2, n) of both rows of ``task``, or ``None`` if both use the defaults of the text encoder.

        For a tiled image they are (tiles, 2, n). SDXL was trained on crops of larger images, and a tile is one: its
        ``original_size`` is that of the image, its crop the tile's upper left corner, and its target size the tile's.
        """
        micro, has_score, tiles = task.settings.micro_conditioning, model.text.has_score, task.settings.tiles
        is_tiled = tiles is not None and model.info.has_size_conditioning
        if micro is None and not has_score and not is_tiled:
            return None
        size, sizes = (task.settings.width_px, task.settings.height_px), micro or PLAIN
        views = [sizes]
        if tiles is not None and (is_tiled or has_score):
            views = [sizes.of_crop(size, tiles.corner_px(view), tiles.tile_px) for view in range(tiles.num_tiles)]
        rows = [
            [view.numbers(*size, is_uncond=uncond, has_score=has_score) for uncond in (False, True)] for view in views
        ]
        return send(torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float32), model.device)

    def _references(self, task: ImageTask, conditioning: AnyConditioning) -> tuple[PagedReference, ...]:
        """Return the references of ``task``. Raises PoolBusy."""
        references, settings = task.settings.references, task.settings
        if not references:
            return ()
        loading = task.live.reference_loading or self.references.begin(references, task.live.request.reference_images)
        scales = [reference.scale for reference in references]
        read = list(zip(loading.result(), scales, strict=True))
        return self.conditioner.open_references(read, conditioning, is_guided=bool(settings.guided.any()))

    def _controls(self, task: ImageTask) -> Iterator[ActiveControl]:
        """Yield the ControlNets of ``task``, each with its encoded control map."""
        controls = task.settings.controlnets
        if not controls:
            return
        loading = task.live.control_loading or self.controlnets.begin(controls, task.live.request.control_images)
        for control, (network, pixels) in zip(controls, loading.result(), strict=True):
            self.controlnets.keep(network)
            if task.is_second:
                settings = task.settings
                pixels = stretch(Picture.from_array(pixels), settings.width_px, settings.height_px).array
            hint = network.hint((torch.tensor(pixels).float() / 255.0).movedim(2, 0))  # of (3, H, W)
            yield ActiveControl(network, hint, control.scale)

    def _embeddings(
        self, task: ImageTask, conditionings: Sequence[AnyConditioning], loras: LoRASet | None
    ) -> tuple[Conditioning, ...]:
        """Return text embeddings for ControlNets, encoded again where the UNet reads pages."""
        plain = tuple(each for each in conditionings if isinstance(each, Conditioning))
        if plain:
            return plain
        settings = task.settings
        size = {"width_px": settings.width_px, "height_px": settings.height_px}
        return self.model.text.encode_all(self._texts(task), **size, reading=TextReading(loras, settings.clip_skip))

    @staticmethod
    def _texts(task: ImageTask) -> tuple[TextPair, ...]:
        """Return the texts of ``task``, pairs of prompt and negative prompt."""
        return texts_of(task.live.request, task.image_index, task.settings, is_second=task.is_second)

    def _start_state(self, task: ImageTask, conditionings: tuple[AnyConditioning, ...]) -> ImageState:
        """Create the image state and write its start latent to its slot."""
        settings = task.settings
        factor = self.model.info.vae_factor
        shape = (self.model.info.latent_channels, settings.height_px // factor, settings.width_px // factor)
        stream = NoiseStream.of(task.seed, settings.noise_source)
        variation = None
        if task.variation_seed is not None:
            other = NoiseStream.of(task.variation_seed, settings.noise_source)
            variation = Variation(other, settings.variation_strength)
        state = ImageState(conditionings, stream, shape, variation)
        if settings.kind == "inpaint":
            state, start = self._inpaint(task, state)
        elif settings.kind == "image":
            init = _init_image(task)
            assert init is not None
            latents = self._encode(pixels_of(init), state)
            start = latents + float(task.table.sigma[0]) * self._draw(state)
        else:
            similar = self._similar(task, state)
            noise = self._draw(state)
            if similar is None:
                start = task.table.init_scale * noise
            else:
                start = similar.to(self.model.device) + float(task.table.sigma[0]) * noise
        assert task.slot is not None
        self.pool.open(task.slot, start)
        return state

    def _similar(self, task: ImageTask, state: ImageState) -> Tensor | None:
        """Return latents (C, h, w) of a similar prompt to start from, and shorten the settings of ``task`` accordingly.

        Returns ``None`` if the image starts from noise; its own latents are then cached.
        """
        threshold = task.live.settings.similarity_threshold
        if threshold is None:
            return None
        embedding = self.model.text.embedding(task.prompt).cpu().numpy()
        if task.resume_from is not None:  # its settings are those that it began with
            state.embedding = embedding if task.similarity is None else None
            return None
        similar = self.latent_cache.nearest(latent_key_of(task), embedding, threshold)
        settings = task.live.settings
        if similar is not None:
            settings = settings.shorter[skip_of(similar.similarity, threshold)]
        if similar is None or settings.skipped_steps == 0:
            state.embedding = embedding
            return None
        task.settings, task.similarity = settings, similar.similarity
        return torch.from_numpy(similar.latents)

    def _inpaint(self, task: ImageTask, state: ImageState) -> tuple[ImageState, Tensor]:
        request, table = task.live.request, task.table
        size = (task.settings.height_px, task.settings.width_px)
        init = _init_image(task)
        pixels = torch.zeros((*size, 3)) if init is None else pixels_of(init)  # (H, W, 3)
        mask = torch.ones(size) if request.mask_image is None else cells_of(request.mask_image)  # (H, W)
        cells = send(F.interpolate(mask[None, None], size=state.shape[1:])[0], self.model.device)  # (1, h, w)
        is_full = task.settings.strength in (None, 1.0)
        has_mask_channels = self.model.unet.extra_channels > 0
        latents = None if has_mask_channels and is_full else self._encode(pixels, state)
        noise = self._draw(state)
        at_full = table.init_scale * noise
        start = at_full if is_full or latents is None else latents + float(table.sigma[0]) * noise
        if has_mask_channels:
            masked = self._encode(pixels * (1.0 - mask[..., None]), state)
            return replace(state, extra=torch.cat([cells, masked])), start
        assert latents is not None
        for stream in state.streams:  # diffusers encodes it unused
            self._draw_posterior(stream, state)
        return replace(state, repaint=InpaintInputs(cells, latents, noise)), start

    def _encode(self, pixels: Tensor, state: ImageState) -> Tensor:
        """(C, h, w) of ``pixels`` (H, W, 3), by a draw of the image's seed; that of its variation draws in step."""
        if state.variation is not None:
            self._draw_posterior(state.variation.stream, state)
        share = self._encode_share(pixels.shape[1], pixels.shape[0])
        return self.model.vae.encode(pixels[None], [state.stream.rng], share)[0].to(self.model.device)

    def _draw_posterior(self, stream: NoiseStream, state: ImageState) -> None:
        torch.randn((1, *state.shape), generator=stream.rng, dtype=self.model.vae.dtype)

    def _draw(self, state: ImageState) -> Tensor:
        return draw_noise([state], self.model.device)[0]


def _init_image(task: ImageTask) -> Picture | None:
    """Return the image that this pass of ``task`` starts from: of a second pass the enlarged image of the first.

    An interrupted image does not wait for its upscaler network and is enlarged by Lanczos.
    """
    if task.first_pass is None:
        return task.live.request.init_image
    settings, upscaler = task.settings, task.live.settings.hires_upscaler
    filter_name = upscaler if upscaler in FILTERS else LANCZOS
    return task.enlarged or enlarge(task.first_pass, settings.width_px, settings.height_px, filter_name)


def latent_key_of(task: ImageTask) -> Hashable:
    """Return the key of images that may start from each other's latents.

    It holds size, negative prompt, and everything that affects image quality: steps, guidance, step savings and
    adapters. Sampler, seed and noise are left out.
    """
    settings, negative = task.live.settings, task.live.request.negative_prompt
    avoided = negative.strip() if settings.guided.any() else ""
    savings = settings.guidance_interval, settings.guidance_rescale, settings.cache_interval
    size = settings.width_px, settings.height_px, settings.micro_conditioning, settings.switch_at
    digest = settings.lora_digest + settings.control_digest + settings.reference_digest + bytes([settings.clip_skip])
    adapters = settings.controlnets, settings.references
    return size, avoided, settings.num_steps, settings.guidance_scale, savings, digest, adapters


def cells_of(mask: Picture) -> Tensor:
    """Return a mask (height, width) float32, 1 where to repaint, else 0."""
    return torch.tensor(mask.array >= PAINT_FROM, dtype=torch.float32)


def pixels_of(picture: Picture) -> Tensor:
    """(height, width, 3) float32 in [-1, 1]."""
    return 2.0 * (torch.tensor(picture.array).float() / 255.0) - 1.0
