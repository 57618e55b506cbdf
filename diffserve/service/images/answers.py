"""From the engine's results to the answer: each picture as a file, how it was delivered, and how it was painted."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from diffserve.api.types import ImageResult
from diffserve.media.infotext import write_infotext
from diffserve.service.images.kept_pictures import new_name
from diffserve.service.images.painting import CheckedImages


def image_entry(painting: CheckedImages, result: ImageResult) -> dict[str, Any]:
    """One element of ``data``: resized, marked, encoded, in base64, and with ``urls`` also at one. Takes a while: call
    it in a thread. Raises ModerationBlocked for what nobody shall see.

    ``revised_prompt`` is what the text encoder was given, null where that is what was sent. Beside a
    ``similarity_threshold``, ``similarity`` is of the prompt whose picture it began from, null where that was noise;
    beside ``best_of``, ``score`` is what it was chosen by. ``timings`` in seconds of the clock. ``history_id``: where
    it is in the history of who asked.
    """
    size = width_px, height_px = painting.plan.width_px, painting.plan.height_px
    file = painting.file(result, write_infotext(result, width_px=width_px, height_px=height_px))
    name = new_name(painting.image_format)
    url = {} if painting.urls is None else {"url": painting.urls.keep(file, name)}
    history = painting.history
    remembered = {} if history is None else {"history_id": history.add(painting.request, size, result, file, name)}
    begun = {"similarity": result.similarity, "skipped_steps": result.skipped_steps}
    return url | {
        "b64_json": base64.b64encode(file).decode("ascii"),
        "revised_prompt": None if result.original_prompt is None else result.prompt,
        "seed": result.seed,
        **({} if result.variation_seed is None else {"variation_seed": result.variation_seed}),
        "timings": timings(result),
        **({} if result.similarity_threshold is None else begun),
        **({} if result.score is None else {"score": result.score}),
        **remembered,
    }


def answer(
    painting: CheckedImages, results: list[ImageResult], entries: list[dict[str, Any]], warnings: list[str]
) -> bytes:
    """The whole body of a 200 answer. Takes a while with large pictures: call it in a thread."""
    return msgspec.json.encode(
        {
            "created": int(time.time()),
            "data": entries,
            **delivery(painting),
            "safety_identifier": painting.safety_identifier,
            "usage": usage(painting, results),
            "warnings": warnings,
            **recipe(painting, results[0]),
        }
    )


def delivery(painting: CheckedImages) -> dict[str, Any]:
    """How the pictures are delivered, in OpenAI's words."""
    return {
        "background": "opaque",
        "output_format": painting.image_format,
        "quality": painting.quality,
        "size": f"{painting.plan.width_px}x{painting.plan.height_px}",
    }


def recipe(painting: CheckedImages, result: ImageResult) -> dict[str, Any]:
    """How ``result``, and every other picture of the request, was painted."""
    told = {"num_inference_steps" if name == "num_steps" else name: value for name, value in result.recipe().items()}
    del told["variation_seed"]  # each has its own
    return {
        "id": painting.request.request_id,
        "model": result.model,
        "model_digest": result.model_digest,
        **told,
        "loras": msgspec.to_builtins(result.loras),
        "controlnets": msgspec.to_builtins(result.controlnets),
        "micro_conditioning": msgspec.to_builtins(result.micro_conditioning),
        "refiner": result.refiner or None,
    }


def usage(painting: CheckedImages, results: list[ImageResult]) -> dict[str, Any]:
    """Token counts as OpenAI's clients expect them: an image token is one cell of the painted latents' 8x8 grid. Those
    that were painted and not kept count as well. ``device_s``: seconds of the device, shared with whoever was there.
    """
    painted = ((result.picture, 1 + result.num_discarded) for result in results)
    image_tokens = sum(count * (picture.width_px * picture.height_px // 64) for picture, count in painted)
    text_tokens = len(results[0].prompt.split())
    init = painting.request.init_image
    init_tokens = 0 if init is None else init.width_px * init.height_px // 64
    return {
        "input_tokens": text_tokens + init_tokens,
        "output_tokens": image_tokens,
        "total_tokens": text_tokens + init_tokens + image_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": init_tokens},
        "num_evaluations": sum(result.num_evaluations + result.discarded_evaluations for result in results),
        "num_cached": sum(result.cached is not None for result in results),
        **painting.spent(sum(result.device_s + result.discarded_device_s for result in results)),
    }


def timings(result: ImageResult) -> dict[str, float]:
    """Where the time of a picture went, by the clock: while it waited, was encoded, denoised and decoded."""
    return {name: round(seconds, 6) for name, seconds in msgspec.structs.asdict(result.timings).items()}
