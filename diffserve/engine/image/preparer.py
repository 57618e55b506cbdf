"""From a newcomer to a state and a start latent: text, seed, init image and mask, in diffusers' order of draws."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from diffserve.engine.image.batch import LanePool
from diffserve.engine.image.latent_cache import LatentCache, skip_of
from diffserve.engine.image.state import ImageState, Repaint, draw_noise
from diffserve.engine.image.task import PAINT_FROM, GroupKey, ImageTask
from diffserve.runtime import DiffusionModel
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.memory import without_frames
from diffserve.runtime.text.conditioning import AnyConditioning, Conditioner
from diffserve.runtime.transfer import send
from diffserve.types import Picture

logger = logging.getLogger(__name__)


class Preparer:
    """Encodes what a request brings and opens its lane.

    Draws from the image's own generator, as the pipelines of diffusers make them. Text-to-image: the start latent.
    Image-to-image: the encoder's posterior, then the noise. Inpainting: the posterior (4-channel UNets always,
    9-channel ones below full strength), the noise, then the posterior of the masked image. Where the ``noise_source``
    is the device, noise is counted off there, and the posterior alone is drawn from the generator.
    """

    def __init__(self, model: DiffusionModel, conditioner: Conditioner, pool: LanePool, kept: LatentCache) -> None:
        self.model = model
        self.conditioner = conditioner
        self.pool = pool
        self.kept = kept

    @contextmanager
    def together(self, tasks: Iterable[ImageTask]) -> Iterator[None]:
        """While it lasts, what ``tasks`` are told is at hand, encoded in few calls for all; where those fail, not."""
        try:
            self.conditioner.make_ready(map(self._texts, tasks))
        except Exception as error:
            raise_if_sticky(error)
            without_frames(error)
            logger.warning("texts are encoded one by one: together they raised %s", type(error).__name__)
        try:
            yield
        finally:
            self.conditioner.let_go()

    def prepare(self, task: ImageTask) -> GroupKey:
        """Encode, draw, open the lane; returns the group whose UNet calls the image can join.

        Raises PoolBusy, before anything is drawn, when the image has to wait for pages.
        """
        settings = task.settings
        conditioning = self.conditioner.condition(
            *self._texts(task), width_px=settings.width_px, height_px=settings.height_px
        )
        try:
            task.state = self._paint_ground(task, conditioning)
        except BaseException:
            conditioning.close()
            raise
        mixes = self.conditioner.mixes_lengths
        num_tokens = self.model.text.window_tokens if mixes else conditioning.num_tokens
        return GroupKey(settings.height_px, settings.width_px, num_tokens, merged_share=settings.token_merging)

    @staticmethod
    def _texts(task: ImageTask) -> tuple[str, str | None]:
        """Prompt and negative prompt, ``None`` for images without guidance."""
        request = task.live.request
        return request.prompt, request.negative_prompt if task.settings.guided.any() else None

    def _paint_ground(self, task: ImageTask, conditioning: AnyConditioning) -> ImageState:
        """The state, its start latent drawn and in its lane."""
        request, settings = task.live.request, task.settings
        factor = self.model.info.vae_factor
        shape = (self.model.info.latent_channels, settings.height_px // factor, settings.width_px // factor)
        rng = torch.Generator("cpu").manual_seed(task.seed)
        state = ImageState(conditioning, rng, shape, 0 if settings.noise_source == "device" else None)
        if settings.kind == "inpaint":
            state, start = self._inpaint(task, state)
        elif settings.kind == "image":
            assert request.init_image is not None
            latents = self._encode(pixels_of(request.init_image), state)
            start = latents + float(task.table.sigma[0]) * self._draw(state)
        else:
            similar = self._similar(task, state)
            noise = self._draw(state)
            if similar is None:
                start = task.table.init_scale * noise
            else:
                start = similar.to(self.model.device) + float(task.table.sigma[0]) * noise
        assert task.lane is not None
        self.pool.open(task.lane, start)
        return state

    def _similar(self, task: ImageTask, state: ImageState) -> Tensor | None:
        """(C, h, w) latents of a similar prompt that ``task`` begins from, its settings the shorter ones for it;
        ``None`` where it begins from noise, and then its own latents will be kept."""
        threshold = task.live.settings.similarity_threshold
        if threshold is None:
            return None
        embedding = self.model.text.embedding(task.live.request.prompt).cpu().numpy()
        similar = self.kept.nearest(kin_of(task), embedding, threshold)
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
        pixels = torch.zeros((*size, 3)) if request.init_image is None else pixels_of(request.init_image)  # (H, W, 3)
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
        torch.randn((1, *state.shape), generator=state.rng, dtype=self.model.vae.dtype)  # diffusers encodes it unused
        return replace(state, repaint=Repaint(cells, latents, noise)), start

    def _encode(self, pixels: Tensor, state: ImageState) -> Tensor:
        return self.model.vae.encode(pixels[None], [state.rng])[0].to(self.model.device)

    def _draw(self, state: ImageState) -> Tensor:
        return draw_noise([state], self.model.device)[0]


def kin_of(task: ImageTask) -> Hashable:
    """What pictures have in common of which one may begin from another's latents: their size, what they avoid, and all
    that a picture may turn out badly by, its steps, guidance and savings. Not sampler, seed and noise."""
    settings, negative = task.live.settings, task.live.request.negative_prompt
    avoided = negative.strip() if settings.guided.any() else ""
    savings = settings.guidance_interval, settings.cache_interval, settings.token_merging
    return settings.width_px, settings.height_px, avoided, settings.num_steps, settings.guidance_scale, savings


def cells_of(mask: Picture) -> Tensor:
    """(height, width) float32, 1 where to repaint, else 0."""
    return torch.tensor(mask.array >= PAINT_FROM, dtype=torch.float32)


def pixels_of(picture: Picture) -> Tensor:
    """(height, width, 3) float32 in [-1, 1]."""
    return 2.0 * (torch.tensor(picture.array).float() / 255.0) - 1.0
