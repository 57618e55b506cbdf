"""Capabilities of a small model, for tests without a server."""

from __future__ import annotations

from diffserve.client import ImageCapabilities, SamplerChoice

MODEL = ImageCapabilities(
    family="embedded",
    digest="0123456789ab",
    device="cpu",
    dtype="float32",
    samplers=(
        SamplerChoice(name="ddim", label="DDIM", takes_eta=True),
        SamplerChoice(name="dpmpp_2m", label="DPM++ 2M"),
    ),
    sizes=((128, 128), (128, 192), (192, 128)),
    min_side_px=64,
    max_side_px=2048,
    quality_steps={"draft": 10, "standard": 25, "fine": 50},
    default_sampler="dpmpp_2m",
    default_num_steps=25,
    default_guidance_scale=3.0,
    default_spacing="trailing",
    train_timesteps=1000,
    max_images=10,
)
