"""UNet and VAE runners against the networks inside diffusers' pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffserve.api.errors import NumericalError
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.vae import VAERunner
from tests import tiny_models
from tests.device import DEVICE, tolerance
from tests.runtime.conftest import LoadTiny, TinyPipeline


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def row_arguments(kind: str, num_rows: int, context: int) -> dict[str, Any]:
    """Random conditions for ``num_rows`` rows of a UNet of ``kind``."""
    arguments = {"contexts": randn(num_rows, 77, context, seed=1)}
    if kind == "sdxl":
        arguments["pooled"] = randn(num_rows, 32, seed=2)
        arguments["time_ids"] = torch.tensor([[64.0, 64, 0, 0, 64, 64]] * num_rows, device=DEVICE)
    if kind == "inpaint9":
        arguments["extra"] = randn(num_rows, 5, 8, 8, seed=3)
    return arguments


@pytest.mark.parametrize(
    ("kind", "context"), [("sd15", 64), ("sd2", 64), ("sdxl", 128), ("inpaint9", 64), ("embedded", 64)]
)
def test_unet_rows_equal_the_pipelines_unet(
    tiny: LoadTiny, tiny_pipeline: TinyPipeline, kind: str, context: int
) -> None:
    sample, timesteps = randn(2, tiny(kind).unet.latent_channels, 8, 8), torch.tensor([999, 1], device=DEVICE)
    rows = row_arguments(kind, 2, context)
    actual = tiny(kind).unet.predict(sample, timesteps, **rows)
    added = {"text_embeds": rows["pooled"], "time_ids": rows["time_ids"]} if kind == "sdxl" else None
    full_input = torch.cat([sample, rows["extra"]], dim=1) if kind == "inpaint9" else sample
    with torch.inference_mode():
        network = tiny_pipeline(kind).unet
        expected = network(
            full_input, timesteps, encoder_hidden_states=rows["contexts"], added_cond_kwargs=added
        ).sample
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance(5e-6))
    assert actual.dtype == torch.float32


def test_each_row_has_its_own_timestep_and_text(tiny: LoadTiny) -> None:
    unet = tiny("sd15").unet
    sample, timesteps, contexts = (
        randn(4, 4, 8, 8),
        torch.tensor([10, 250.5, 700, 999], device=DEVICE),
        randn(4, 77, 64, seed=1),
    )
    together = unet.predict(sample, timesteps, contexts)
    for row in range(4):
        row_slice = slice(row, row + 1)
        alone = unet.predict(sample[row_slice], timesteps[row_slice], contexts[row_slice])
        torch.testing.assert_close(together[row_slice], alone, rtol=0, atol=tolerance(1e-5))


def test_a_unet_says_which_condition_it_is_missing(tiny: LoadTiny) -> None:
    sample, timesteps = randn(1, 4, 8, 8), torch.tensor([5], device=DEVICE)
    with pytest.raises(ValueError, match="pooled text embeddings and time_ids"):
        tiny("sdxl").unet.predict(sample, timesteps, randn(1, 77, 128))
    with pytest.raises(ValueError, match="takes 5 extra channels"):
        tiny("inpaint9").unet.predict(sample, timesteps, randn(1, 77, 64))
    with pytest.raises(ValueError, match="takes 0 extra channels"):
        tiny("sd15").unet.predict(sample, timesteps, randn(1, 77, 64), extra=randn(1, 5, 8, 8))


@pytest.mark.parametrize("kind", ["sd15", "sdxl", "embedded"])
def test_decoded_pixels_equal_the_pipelines(tiny: LoadTiny, tiny_pipeline: TinyPipeline, kind: str) -> None:
    latents, pipeline = randn(2, tiny(kind).vae.latent_channels, 8, 8), tiny_pipeline(kind)
    with torch.inference_mode():
        decoded = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
        images = pipeline.image_processor.postprocess(decoded, output_type="pil")
    expected = np.stack([np.asarray(image) for image in images])
    actual = tiny(kind).vae.decode(latents)
    assert actual.shape == (2, 64, 64, 3)
    assert actual.dtype == np.uint8
    assert np.abs(actual.astype(int) - expected).max() <= 1


def test_encoding_draws_from_each_pictures_generator_as_diffusers_does(
    tiny: LoadTiny, tiny_pipeline: TinyPipeline
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    actual = tiny("sd15").vae.encode(pixels, [torch.Generator().manual_seed(seed) for seed in (3, 4)])
    vae = tiny_pipeline("sd15").vae
    for index, seed in enumerate((3, 4)):
        image = (
            tiny_pipeline("sd15")
            .image_processor.preprocess(pixels[index : index + 1].astype(np.float32) / 255)
            .to(DEVICE)
        )
        with torch.inference_mode():
            sampled = vae.encode(image).latent_dist.sample(torch.Generator().manual_seed(seed))
        torch.testing.assert_close(actual[index], sampled[0] * vae.config.scaling_factor, rtol=0, atol=tolerance(1e-6))


def test_without_a_generator_the_mode_is_taken(tiny: LoadTiny) -> None:
    pixels = np.full((1, 64, 64, 3), 200, dtype=np.uint8)
    vae = tiny("sd15").vae
    assert torch.equal(vae.encode(pixels), vae.encode(pixels))
    with pytest.raises(ValueError, match="1 images need as many generators, not 2"):
        vae.encode(pixels, [torch.Generator(), torch.Generator()])


@pytest.mark.parametrize(
    "config",
    [
        {"scaling_factor": 0.5},
        {"scaling_factor": 0.5, "shift_factor": 0.25},
        {"scaling_factor": 1.0, "latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 4.0]},
    ],
)
def test_the_configured_normalization_goes_both_ways(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = tiny_models.vae(**config).to(DEVICE)
    runner = VAERunner(network, device=torch.device(DEVICE), dtype=torch.float32)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    latents = runner.encode(pixels)
    with torch.inference_mode():
        raw = network.encode(
            (torch.from_numpy(pixels).to(DEVICE).float() / 127.5 - 1).permute(0, 3, 1, 2)
        ).latent_dist.mode()
        mean = torch.tensor(config.get("latents_mean", [config.get("shift_factor", 0.0)] * 4), device=DEVICE).view(
            1, 4, 1, 1
        )
        std = torch.tensor(config.get("latents_std", [1.0] * 4), device=DEVICE).view(1, 4, 1, 1)
        torch.testing.assert_close(latents, (raw - mean) / std * config["scaling_factor"])
        straight = (network.decode(raw).sample / 2 + 0.5).clamp(0, 1).mul(255).round()
    assert np.abs(runner.decode(latents) - straight.permute(0, 2, 3, 1).cpu().numpy()).max() <= 1


def test_latents_that_are_not_finite_are_refused(tiny: LoadTiny) -> None:
    latents = randn(1, 4, 8, 8)
    latents[0, 0, 0, 0] = float("nan")
    with pytest.raises(NumericalError, match="latents are not finite"):
        tiny("sd15").vae.decode(latents)


def overflowing_vae(scale: float) -> Any:
    """Return a VAE whose decoder's first convolution exceeds the range of float16."""
    torch.manual_seed(0)
    network = tiny_models.vae(force_upcast=False).to(DEVICE)
    with torch.no_grad():
        network.decoder.conv_in.weight.mul_(scale)
        network.decoder.conv_in.bias.mul_(scale)
    return network


def test_one_extreme_latent_is_decoded_alone_in_float32_and_the_next_in_float16_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exact = VAERunner(overflowing_vae(50.0), device=torch.device(DEVICE), dtype=torch.float32)
    runner = VAERunner(
        torch.nn.Module.to(overflowing_vae(50.0), torch.float16), device=torch.device(DEVICE), dtype=torch.float16
    )
    before = {name: tensor.clone() for name, tensor in runner.network.state_dict().items()}
    calm = 0.1 * randn(1, 4, 8, 8)
    extreme = 20000.0 * calm
    first = runner.decode(calm)
    assert not caplog.records
    actual = runner.decode(torch.cat([calm, extreme, calm]))
    assert "overflowed in float16" in caplog.text
    assert np.abs(actual[1].astype(int) - exact.decode(extreme)[0]).max() <= 3
    assert runner.dtype == torch.float16
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.network.state_dict().items())
    caplog.clear()
    assert np.array_equal(runner.decode(calm), first)
    assert np.abs(actual[2].astype(int) - first[0]).max() <= 1
    assert not caplog.records


def test_picture_that_float32_cannot_hold_either_is_an_error_and_float16_stays() -> None:
    network = overflowing_vae(1.0)
    with torch.no_grad():
        network.decoder.conv_out.bias.fill_(float("inf"))
    runner = VAERunner(torch.nn.Module.to(network, torch.float16), device=torch.device(DEVICE), dtype=torch.float16)
    with pytest.raises(NumericalError, match=r"not finite in torch.float32"):
        runner.decode(randn(1, 4, 8, 8))
    assert runner.dtype == torch.float16
    assert next(runner.network.parameters()).dtype == torch.float16


def test_a_picture_that_is_not_finite_in_float32_is_an_error() -> None:
    network = overflowing_vae(1.0)
    with torch.no_grad():
        network.decoder.conv_out.bias.fill_(float("inf"))
    with pytest.raises(NumericalError, match=r"not finite in torch.float32"):
        VAERunner(network, device=torch.device(DEVICE), dtype=torch.float32).decode(randn(1, 4, 8, 8))


def test_a_preview_of_large_latents_is_a_smaller_picture(tiny: LoadTiny) -> None:
    vae = tiny("sd15").vae
    assert vae.preview_later(randn(1, 4, 8, 8)).pixels.read().shape == (1, 64, 64, 3)
    assert vae.preview_later(randn(1, 4, 16, 40)).pixels.read().shape == (1, 64, 160, 3)


def test_runners_read_their_shapes_off_the_configuration(tiny: LoadTiny) -> None:
    inpaint = tiny("inpaint9")
    assert (inpaint.unet.latent_channels, inpaint.unet.extra_channels) == (4, 5)
    assert (inpaint.vae.factor, inpaint.vae.latent_channels) == (8, 4)
    assert isinstance(inpaint.unet, UNetRunner)
    assert tiny("sdxl").unet.has_size_conditioning
