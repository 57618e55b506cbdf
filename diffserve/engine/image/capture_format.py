"""Format of captures: the state of a request's images between two steps, as bytes that any engine process can read.

A capture holds what the preparation of an image cannot compute again: latents, sampler history, positions of the noise
streams, DeepCache features, and how far the image is. Everything else (texts, masks, adapters) comes from the request.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from diffserve.api.tensor_values import TensorValue
from diffserve.api.types import ModelInfo, Picture
from diffserve.runtime.text.transferred_encodings import to_value
from diffserve.runtime.transfer import Fetched
from diffserve.version import __version__

FORMAT: Final = 1
VERSION: Final = f"diffserve {__version__}, torch {torch.__version__}, format {FORMAT}"
CHECKSUM_BYTES: Final = 4


class CaptureError(Exception):
    """Reason why images do not continue from a capture but start at their first step."""


class ImageCapture(msgspec.Struct, frozen=True, kw_only=True):
    """State of one image between two rows of its step table.

    Attributes:
        key: Digest of everything that the image depends on, except for the code.
        row_index: Next row of the step table; the number of rows for latents that are to be decoded.
        num_evaluations: UNet rows run so far.
        is_compiled: Whether compiled calls run its rows.
        similarity: Similarity of the prompt whose latents it started from; ``None``: it started from noise.
        skipped_steps: Steps that it skipped because of that.
        first_pass: Image of the first pass, for an image in the second pass of hires fix.
        streams: For each noise stream the state of its generator, empty for noise of the device, and its next draw.
        latents: (C, h, w) float32; ``None`` for a pass without a finished row, which starts as the request says.
        history: (HISTORY, C, h, w) float32.
        features: Features (F, h, w) by part and view of the row, where the next row is shallow.
    """

    key: bytes
    row_index: int
    num_evaluations: int
    is_compiled: bool
    similarity: float | None
    skipped_steps: int
    first_pass: Picture | None
    streams: tuple[tuple[bytes, int | None], ...] = ()
    latents: TensorValue | None = None
    history: TensorValue | None = None
    features: tuple[tuple[int, int, TensorValue], ...] = ()


class RequestCapture(msgspec.Struct, frozen=True, kw_only=True):
    """State of the images of a request, by image index; images that have not begun are missing.

    Attributes:
        version: Versions of the code that computes the images.
        model: Description of the model, its precision and its kind of device.
        seed: Seed of image 0, which the request may leave to the engine.
        variation_seed: Variation seed of image 0, likewise; ``None`` without variation.
    """

    version: str
    model: str
    seed: int
    variation_seed: int | None
    images: dict[int, ImageCapture]


_decoder = msgspec.msgpack.Decoder(RequestCapture)


def encode_capture(capture: RequestCapture) -> bytes:
    """Serialize ``capture`` as a CRC-32 and msgpack."""
    body = msgspec.msgpack.encode(capture)
    return zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big") + body


def decode_capture(data: bytes, info: ModelInfo) -> RequestCapture:
    """Deserialize a capture for the model ``info``.

    Raises:
        CaptureError: It is damaged, or of another version or model.
    """
    body = memoryview(data)[CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big") != data[:CHECKSUM_BYTES]:
        raise CaptureError(f"its {len(data)} bytes are damaged")
    try:
        capture = _decoder.decode(body)
    except msgspec.MsgspecError as error:  # written by another version
        raise CaptureError(f"it cannot be read: {error}") from None
    for name, value, expected in (
        ("version", capture.version, VERSION),
        ("model", capture.model, describe_model(info)),
    ):
        if value != expected:
            raise CaptureError(f"its {name} is {value!r}, and here {expected!r}")
    return capture


def describe_model(info: ModelInfo) -> str:
    """Return what must be equal of two models for images to continue: weights, precision and kind of device."""
    refiner = f" with {info.refiner}" if info.refiner else ""
    return f"{info.model_id} {info.digest} {info.dtype} on {kind_of_device(info)}{refiner}"


def kind_of_device(info: ModelInfo) -> str:
    """Return the kind of the model's device, such as "cuda" for "cuda:1"."""
    return info.device.partition(":")[0]


class PendingImage(NamedTuple):
    """A capture without tensors, and its tensors on their way to main memory."""

    capture: ImageCapture
    latents: Fetched | None = None
    history: Fetched | None = None
    features: tuple[tuple[int, int, Fetched], ...] = ()

    def read(self) -> ImageCapture | None:
        """Return the capture, waiting for its tensors; ``None`` if the latents are not finite."""
        if self.latents is None or self.history is None:
            return self.capture
        latents = self.latents.read()
        if not np.isfinite(latents.numpy()).all():
            return None
        features = tuple((part, view, to_value(fetched.read())) for part, view, fetched in self.features)
        return replace(
            self.capture, latents=to_value(latents), history=to_value(self.history.read()), features=features
        )
