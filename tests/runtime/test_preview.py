"""Preview decoders: the trained one and diffusers' tiny autoencoder in ``preview/``, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from diffserve.api.errors import ModelLoadError
from diffserve.runtime import DiffusionModel, choose_device, load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.vae.preview import PreviewConfig, PreviewDecoder, PreviewRunner, load_preview
from diffserve.training.preview_training import save_preview
from tests.device import DEVICE
from tests.runtime.conftest import LoadTiny, TinyPipeline
from tests.runtime.original_layout import save_single_file

CPU = choose_device("cpu", "float32")
STEM = "diffusion_pytorch_model"
SHAPE = {"latent_channels": 8, "widths": [8, 4], "num_blocks": [1, 2], "factor": 8}
CopyTiny = Callable[[str], Path]


@pytest.fixture
def copy_tiny(tiny_model: Callable[[str], Path], tmp_path: Path) -> CopyTiny:
    """Return ``copy_tiny(kind)``, which copies the tiny model so that a test can add a preview decoder."""
    return lambda kind: Path(shutil.copytree(tiny_model(kind), tmp_path / kind))


def preview_of(runner: PreviewRunner, latents: torch.Tensor) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = runner.preview_later(latents).pixels.read().numpy()
    return pixels


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def own_decoder(**shape: Any) -> PreviewDecoder:
    """Return a decoder with random weights that 16 bits represent exactly."""
    torch.manual_seed(0)
    return PreviewDecoder(msgspec.convert(SHAPE | shape, PreviewConfig)).half().float().eval()


def tiny_autoencoder(**config: Any) -> Any:
    torch.manual_seed(0)
    widths = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    return import_quietly("diffusers", "AutoencoderTiny")(**widths, **config).eval()


def pixels_of(images: torch.Tensor) -> NDArray[np.float32]:
    """(B, 3, H, W) in -1..1 to unrounded (B, H, W, 3) in 0..255."""
    pixels: NDArray[np.float32] = images.clamp(-1, 1).add(1).mul(127.5).permute(0, 2, 3, 1).detach().numpy()
    return pixels


def load(path: Path) -> DiffusionModel:
    return load_model(path, dtype="float32", device=DEVICE)


def loaded(directory: Path) -> PreviewRunner:
    runner = load_preview(directory, CPU)
    assert runner is not None
    return runner


def test_the_preview_decoder_is_next_to_the_unet_and_changes_nothing_else(copy_tiny: CopyTiny, tiny: LoadTiny) -> None:
    path, decoder, latents = copy_tiny("embedded"), own_decoder(), randn(3, 8, 8, 12)
    save_preview(decoder, path / "preview")
    model, without = load(path), tiny("embedded")
    actual = model.preview(latents)
    assert actual.shape == (3, 64, 96, 3)
    assert actual.dtype == np.uint8
    assert np.abs(actual - pixels_of(decoder(latents))).max() <= 0.51
    assert model.digest == without.digest
    extra = {entry.component: entry.num_parameters for entry in model.memory_report()}.pop("preview")
    assert extra == sum(parameter.numel() for parameter in decoder.parameters())
    assert model.info.num_parameters == without.info.num_parameters + extra


def test_without_a_decoder_the_vae_shows_what_it_would_decode(tiny: LoadTiny) -> None:
    latents = randn(2, 8, 8, 8)
    assert tiny("embedded").previewer is None
    assert np.array_equal(tiny("embedded").preview(latents), tiny("embedded").vae.decode(latents))


@pytest.mark.parametrize("config", [{}, {"scaling_factor": 0.5, "shift_factor": 0.25}])
def test_a_tiny_autoencoder_shows_what_diffusers_decodes(
    copy_tiny: CopyTiny, caplog: pytest.LogCaptureFixture, config: dict[str, float]
) -> None:
    path, network, latents = copy_tiny("sd15"), tiny_autoencoder(**config), randn(2, 4, 8, 8)
    network.save_pretrained(path / "preview")
    model = load(path)
    with torch.inference_mode():
        scaled = latents / config.get("scaling_factor", 1.0) + config.get("shift_factor", 0.0)
        expected = pixels_of(network.decode(scaled).sample)
    assert np.abs(model.preview(latents) - expected).max() <= 0.51
    assert model.previewer is not None
    assert model.previewer.factor == 8
    assert {record.name for record in caplog.records} <= {"diffserve.runtime.loading.plausibility"}  # of random weights


def test_only_the_decoder_of_a_tiny_autoencoder_is_held(tmp_path: Path) -> None:
    network = tiny_autoencoder()
    network.save_pretrained(tmp_path / "preview")
    num_parameters = sum(parameter.numel() for parameter in loaded(tmp_path / "preview").network.parameters())
    assert num_parameters == sum(parameter.numel() for parameter in network.decoder.parameters())


def test_a_preview_in_company_is_the_preview_alone(tmp_path: Path) -> None:
    runner, latents = loaded(save_preview(own_decoder(), tmp_path / "preview")), randn(5, 8, 8, 8)
    together = preview_of(runner, latents)
    alone = np.concatenate([preview_of(runner, row) for row in latents.split(1)])
    assert np.abs(together.astype(int) - alone).max() <= 1
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.parametrize(("cells", "shown"), [((32, 16), (256, 128)), ((64, 48), (256, 192)), ((33, 1), (136, 8))])
def test_a_preview_of_large_latents_is_at_most_256_pixels(
    tmp_path: Path, cells: tuple[int, int], shown: tuple[int, int]
) -> None:
    runner = loaded(save_preview(own_decoder(), tmp_path / "preview"))
    assert preview_of(runner, randn(1, 8, *cells)).shape == (1, *shown, 3)


def test_latents_that_are_no_numbers_are_shown_gray(tmp_path: Path) -> None:
    runner = loaded(save_preview(own_decoder(), tmp_path / "preview"))
    assert np.all(preview_of(runner, torch.full((1, 8, 4, 4), torch.nan)) == 128)


def test_one_width_alone_is_a_flat_decoder(tmp_path: Path) -> None:
    decoder, latents = own_decoder(widths=[8], num_blocks=[1], factor=3), randn(1, 8, 4, 4)
    actual = preview_of(loaded(save_preview(decoder, tmp_path / "preview")), latents)
    assert actual.shape == (1, 12, 12, 3)
    assert np.abs(actual - pixels_of(decoder(latents))).max() <= 0.51


def test_a_single_file_finds_it_in_the_directory_of_its_name(tiny_pipeline: TinyPipeline, copy_tiny: CopyTiny) -> None:
    path = copy_tiny("sd15")
    tiny_autoencoder().save_pretrained(path / "preview")
    file = save_single_file(tiny_pipeline("sd15"), path.with_suffix(".safetensors"))
    assert load(file).previewer is not None


def test_a_decoder_for_other_latents_is_refused(copy_tiny: CopyTiny) -> None:
    path = copy_tiny("embedded")
    tiny_autoencoder().save_pretrained(path / "preview")
    with pytest.raises(ModelLoadError, match="preview decoder reads 4 latent channels, the VAE has 8"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "Evil"}, "_class_name is 'Evil'; diffserve builds PreviewDecoder or AutoencoderTiny there"),
        ({"_class_name": None}, "_class_name is None"),
        ({"_class_name": ["PreviewDecoder"]}, "_class_name is"),
        ({"depth": 3}, "Object contains unknown field `depth`"),
        ({"factor": 6.5}, r"Expected `int`, got `float` - at `\$\.factor`"),
        ({"factor": 7}, "factor is 7; with 2 widths, give a multiple of 2"),
        ({"widths": []}, "Expected `array` of length >= 1"),
        ({"widths": [8, True]}, "Expected `int`, got `bool`"),
        ({"num_blocks": [1]}, "num_blocks has 1 entries; give one for each of 2 widths"),
        ({"widths": [8, 8]}, r"has shape \[4, 4, 3, 3\]; the configured network expects \[8, 8, 3, 3\]"),
    ],
)
def test_a_configuration_that_does_not_fit_says_how(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    directory = save_preview(own_decoder(), tmp_path / "preview")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelLoadError, match=message):
        load_preview(directory, CPU)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = save_preview(own_decoder(), tmp_path / "preview")
    (directory / "config.json").write_text('{"_class_name": "PreviewDecoder", "factor": 8}')
    with pytest.raises(ModelLoadError, match="Object missing required field `latent_channels`"):
        load_preview(directory, CPU)


def test_a_folder_of_that_name_without_a_configuration_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "preview").mkdir()
    (tmp_path / "preview" / "cat.png").write_bytes(b"")
    assert load_preview(tmp_path / "preview", CPU) is None
    assert load_preview(tmp_path / "nowhere", CPU) is None


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = save_preview(own_decoder(), tmp_path / "preview")
    file = directory / f"{STEM}.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != "conv_out.bias"}, file)
    with pytest.raises(ModelLoadError, match=r"PreviewDecoder: tensor 'conv_out.bias' is missing"):
        load_preview(directory, CPU)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = save_preview(own_decoder(), tmp_path / "preview")
    (directory / f"{STEM}.safetensors").rename(directory / f"{STEM}.bin")
    with pytest.raises(ModelLoadError, match="pickle file"):
        load_preview(directory, CPU)


def test_nothing_is_computed_at_the_pictures_own_resolution() -> None:
    decoder, widest = own_decoder(widths=[8, 4, 4], num_blocks=[1, 1, 1]), []
    for part in decoder.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(lambda _part, _inputs, output: widest.append(output.shape[-1]))
    decoder(randn(1, 8, 4, 4))
    assert (min(widest), max(widest)) == (4, 16)
