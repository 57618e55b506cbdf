"""Text encoders and VAEs that several models have in common are one object in memory, and only those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffserve.runtime import load_model
from diffserve.runtime.text.conditioning import image_specs
from diffserve.runtime.weight_sharing import sharing, with_digests
from tests.device import DEVICE


def test_parts_that_are_the_same_to_the_last_bit_are_one_object(tiny_model: Callable[[str], Path]) -> None:
    first, twin, cousin, narrow = (
        with_digests(load_model(tiny_model(kind), dtype=dtype, device=DEVICE))
        for kind, dtype in (
            ("sd15", "float32"),
            ("sd15", "float32"),
            ("inpaint9", "float32"),  # made from the same seed: its text encoder is the same, what comes after is not
            ("sd15", "bfloat16"),
        )
    )
    for model, has_encoder, has_vae in ((twin, True, True), (cousin, True, False), (narrow, False, False)):
        shared = sharing(model, [first])
        assert (shared.text.encoders[0].network is first.text.encoders[0].network) is has_encoder
        assert (shared.vae is first.vae) is has_vae
        assert shared.text.encoders[0].tokenizer is model.text.encoders[0].tokenizer
        assert shared.unet is model.unet
        unet, encoder = image_specs(shared, is_exact=True)
        specs = image_specs(first, is_exact=True)
        assert (encoder == specs.encoders[0]) is has_encoder, "a tenant of the page pool"
        assert (unet == specs.unet) is (model is twin)
