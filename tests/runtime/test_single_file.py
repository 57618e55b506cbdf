"""Single-file checkpoints in the original layout: the same networks as the directory they were written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from diffserve.api.errors import ModelLoadError
from diffserve.runtime import load_model
from diffserve.runtime.loading import single_file_layout as layout
from diffserve.runtime.loading.checkpoint import Checkpoint, TensorEntry
from diffserve.runtime.loading.family import edm_normalization, edm_scheduler
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.loading.plausibility import predicts_velocity
from diffserve.runtime.loading.single_file_layout import VAE_PREFIX, original_name
from diffserve.runtime.text.clip_vocabulary import END, START, VOCABULARY_SIZE, clip_tokenizer, clip_vocabulary
from diffserve.runtime.unet.unet import UNetRunner
from schedulers import NoiseSchedule
from tests.device import DEVICE
from tests.runtime.conftest import LoadTiny, TinyPipeline
from tests.runtime.original_layout import save_single_file, unet_tensors, vae_tensors
from tests.tiny_models import KINDS, REFINER, build_pipeline, text_encoder, unet

Export = Callable[..., Path]


@pytest.fixture
def export(tmp_path: Path, tiny_pipeline: TinyPipeline, tiny_model: Callable[[str], Path]) -> Export:
    """Return ``export(kind, extra)``, which writes a single file with its configurations in a directory next to it."""

    def write(kind: str, extra: dict[str, torch.Tensor] | None = None) -> Path:
        (tmp_path / kind).symlink_to(tiny_model(kind), target_is_directory=True)
        return save_single_file(tiny_pipeline(kind), tmp_path / f"{kind}.safetensors", extra)

    return write


@pytest.mark.parametrize("kind", [*KINDS, REFINER])
def test_a_single_file_gives_the_networks_of_its_directory(export: Export, tiny: LoadTiny, kind: str) -> None:
    loaded_model = load_model(export(kind), dtype="float32", device=DEVICE)
    expected = tiny(kind)
    pairs = [(loaded_model.unet.network, expected.unet.network), (loaded_model.vae.network, expected.vae.network)]
    pairs += [(a.network, b.network) for a, b in zip(loaded_model.text.encoders, expected.text.encoders, strict=True)]
    for mine, other in pairs:
        reference = other.state_dict()
        assert mine.state_dict().keys() == reference.keys()
        assert all(torch.equal(tensor, reference[name]) for name, tensor in mine.state_dict().items())
    assert loaded_model.family == expected.family
    assert loaded_model.schedule.prediction_type == expected.schedule.prediction_type
    conditioning = [
        model.text.encode("a red fox", "dog", width_px=64, height_px=64) for model in (loaded_model, expected)
    ]
    assert torch.equal(conditioning[0].cond, conditioning[1].cond)


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_diffusers_own_converter_reads_the_same_layout(export: Export, tiny: LoadTiny, kind: str) -> None:
    convert_unet = import_quietly("diffusers.loaders.single_file_utils", "convert_ldm_unet_checkpoint")
    convert_vae = import_quietly("diffusers.loaders.single_file_utils", "convert_ldm_vae_checkpoint")
    tensors = load_file(export(kind))
    for network, convert in ((tiny(kind).unet.network, convert_unet), (tiny(kind).vae.network, convert_vae)):
        reference = convert(dict(tensors), dict(network.config))
        actual = network.state_dict()
        assert actual.keys() == reference.keys()
        assert all(torch.equal(tensor.cpu(), reference[name]) for name, tensor in actual.items())


PUBLISHED: dict[str, dict[str, Any]] = {
    "sd1": {"cross_attention_dim": 768, "attention_head_dim": 8},
    "sd2": {
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "sdxl": {
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "use_linear_projection": True,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
    "sdxl-refiner": {
        "cross_attention_dim": 1280,
        "attention_head_dim": [6, 12, 24, 24],
        "use_linear_projection": True,
        "block_out_channels": [384, 768, 1536, 1536],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 4, 4, 4],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2560,
        "sample_size": 128,
    },
}


def headers_only(pairs: Any) -> Checkpoint:
    """Return a checkpoint of shapes without data."""
    return Checkpoint(
        entries={key: TensorEntry(Path("model.safetensors"), tuple(tensor.shape)) for key, tensor in pairs}
    )


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_unets_are_read_off_their_shapes(family: str) -> None:
    network_class = import_quietly("diffusers", "UNet2DConditionModel")
    with torch.device("meta"):
        network = network_class(**PUBLISHED[family])
    inferred = layout.infer_unet(headers_only(unet_tensors(network)), family, pooled_width=1280)
    with torch.device("meta"):
        again = network_class(**inferred)
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in network.state_dict().items()
    }
    for name, value in PUBLISHED[family].items():
        assert inferred.get(name) == value, name


def test_the_published_vae_is_read_off_its_shapes() -> None:
    levels = {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "latent_channels": 4,
    }
    with torch.device("meta"):
        network = import_quietly("diffusers", "AutoencoderKL")(**levels)
    inferred = layout.infer_vae(headers_only(vae_tensors(network)), VAE_PREFIX, is_sdxl=True)
    assert levels.items() <= inferred.items()
    assert (inferred["scaling_factor"], inferred["force_upcast"], inferred["sample_size"]) == (0.13025, True, 1024)


def test_clips_vocabulary_has_the_published_ids() -> None:
    vocabulary, merges = clip_vocabulary()
    assert len(vocabulary) == VOCABULARY_SIZE
    assert len(merges) == 48_894
    assert [vocabulary[token] for token in ("!", "cat</w>", "dog</w>", ",</w>", START, END)] == [
        0, 2368, 1929, 267, 49406, 49407,
    ]  # fmt: skip
    tokens = clip_tokenizer(pad="!")("a photo of an astronaut riding a horse on mars")
    assert tokens.input_ids == [49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496, 49407]


def test_a_file_alone_is_read_by_its_shapes_with_clips_vocabulary(tmp_path: Path) -> None:
    pipeline = build_pipeline("sd15", tmp_path / "parts")
    pipeline.text_encoder = text_encoder(width=64, vocabulary_size=VOCABULARY_SIZE)
    model = load_model(save_single_file(pipeline, tmp_path / "dream.safetensors"), dtype="float32", device=DEVICE)
    assert (model.model_id, model.family, model.info.good_sizes) == ("dream", "sd1", ((512, 512),))
    assert model.schedule.prediction_type == "epsilon"
    assert model.text.encode("an astronaut", "", width_px=64, height_px=64).cond.shape == (77, 64)


def test_a_file_alone_with_another_vocabulary_says_where_to_put_its_own(
    tmp_path: Path, tiny_pipeline: TinyPipeline
) -> None:
    file = save_single_file(tiny_pipeline("sd15"), tmp_path / "dream.safetensors")
    with pytest.raises(ModelLoadError, match=f"put its tokenizer and configurations in {tmp_path / 'dream'}"):
        load_model(file)


@pytest.fixture
def sd2_file(tmp_path: Path) -> Callable[..., Path]:
    """``sd2_file(extra, metadata)``: an SD 2 file that stands alone."""
    pipeline = build_pipeline("sd2", tmp_path / "parts")
    pipeline.text_encoder = text_encoder(width=64, act="gelu", vocabulary_size=VOCABULARY_SIZE)

    def write(extra: dict[str, torch.Tensor] | None = None, metadata: dict[str, str] | None = None) -> Path:
        file = save_single_file(pipeline, tmp_path / "v2.safetensors", extra)
        if metadata:
            save_file(load_file(file), file, metadata)
        return file

    return write


def test_velocity_is_read_from_marker_tensors(sd2_file: Callable[..., Path]) -> None:
    model = load_model(sd2_file({"v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}), dtype="float32", device=DEVICE)
    assert model.schedule.prediction_type == "v_prediction"
    assert model.scheduler_config["rescale_betas_zero_snr"]
    assert model.info.default_spacing == "trailing"


def test_the_prediction_type_is_read_from_metadata(sd2_file: Callable[..., Path]) -> None:
    model = load_model(sd2_file(metadata={"modelspec.prediction_type": "epsilon"}), dtype="float32", device=DEVICE)
    assert model.schedule.prediction_type == "epsilon"


def test_the_prediction_type_is_read_from_the_original_yaml(sd2_file: Callable[..., Path]) -> None:
    file = sd2_file()
    file.with_suffix(".yaml").write_text('model:\n  params:\n    parameterization: "v"\n')
    assert load_model(file, dtype="float32", device=DEVICE).schedule.prediction_type == "v_prediction"


def test_an_undeclared_prediction_type_is_asked_of_the_unet(
    sd2_file: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(sd2_file(), dtype="float32", device=DEVICE)
    assert model.schedule.prediction_type == "v_prediction"  # a random UNet does not give the noise back
    assert "does not say what its UNet predicts" in caplog.text
    assert model.info.good_sizes == ((768, 768),)


def give_input_back(network: Any) -> None:
    """Change a tiny UNet so that what enters leaves, through nothing but the last norm and its SiLU."""
    last = network.up_blocks[-1].resnets[-1]
    with torch.no_grad():
        for layer in (network.conv_in, network.conv_out, last.conv_shortcut, last.conv2):
            layer.weight.zero_()
            layer.bias.zero_()
        network.up_blocks[-1].attentions[-1].proj_out.weight.zero_()
        for channel in range(4):
            network.conv_in.weight[channel, channel, 1, 1] = 1.0
            last.conv_shortcut.weight[channel, last.conv_shortcut.out_channels + channel] = 1.0
            network.conv_out.weight[channel, channel, 1, 1] = 1.0


def test_a_unet_that_gives_the_noise_back_predicts_noise() -> None:
    torch.manual_seed(0)
    network = unet("sd15", context=64)
    runner = UNetRunner(network, device=torch.device("cpu"), dtype=torch.float32)
    assert predicts_velocity(runner, 64)
    give_input_back(network)
    assert not predicts_velocity(runner, 64)


@pytest.mark.parametrize("key", ["model_ema.decay", "alphas_cumprod", "first_stage_model.loss.logvar", "v_pred"])
def test_tensors_of_training_are_left_alone(export: Export, key: str) -> None:
    model = load_model(export("sd15", {key: torch.zeros(3)}), dtype="float32", device=DEVICE)
    names = [name for part in (model.unet.network, model.vae.network) for name in part.state_dict()]
    assert not [name for name in names if name.startswith(key)]


def test_a_tensor_that_changes_the_unet_is_named_and_refused(export: Export) -> None:
    key = "model.diffusion_model.adapter.weight"
    with pytest.raises(ModelLoadError, match=f"not part of an sd1 model and change .*: '{key}'"):
        load_model(export("sd15", {key: torch.zeros(3)}), dtype="float32", device=DEVICE)


LUGGAGE = {
    "cond_stage_model.transformer.text_projection.weight": torch.zeros(64, 64),
    "embedding_manager.embedder.weight": torch.zeros(4),
    "first_stage_model.decoder.mid.attn_1.to_q.weight": torch.zeros(32, 32),
    "model_ema.decay": torch.zeros(1),
}
"""What ComfyUI, trainers and converters leave in a file in addition to the weights."""


def test_tensors_that_nothing_is_made_of_are_counted_and_named_once(
    export: Export, tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(export("sd15", LUGGAGE), dtype="float32", device=DEVICE)
    [message] = [record.getMessage() for record in caplog.records if "does not need" in record.getMessage()]
    assert message.endswith(
        f"3 tensors that generation does not need are ignored: {', '.join(map(repr, list(LUGGAGE)[:3]))}"
    )
    expected = tiny("sd15").vae.network.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.vae.network.state_dict().items())


def spoil(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_missing_tensor_of_a_single_file_is_named(export: Export) -> None:
    file = export("sd15")
    spoil(file, lambda tensors: tensors.pop("model.diffusion_model.out.2.bias"))
    with pytest.raises(ModelLoadError, match=r"'model.diffusion_model.out.2.bias' \(for conv_out.bias\) is missing"):
        load_model(file)


def test_a_tensor_of_the_wrong_shape_in_a_single_file_is_named(export: Export) -> None:
    file = export("sd2")
    key = "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight"
    spoil(file, lambda tensors: tensors.update({key: torch.zeros(192, 32)}))
    with pytest.raises(ModelLoadError, match=rf"'{key}' of .* has shape \[64, 32\]; .* expects \[64, 64\]"):
        load_model(file)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["lora_unet_down.weight"], "is not a Stable Diffusion checkpoint"),
        (["model.diffusion_model.input_blocks.0.0.weight"], "holds a UNet but no text encoder"),
    ],
)
def test_other_files_are_distinguished(tmp_path: Path, keys: list[str], problem: str) -> None:
    save_file({key: torch.zeros(1) for key in keys}, tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=problem):
        load_model(tmp_path / "other.safetensors")


VALUE = torch.tensor([120.0])
FOUR = torch.tensor([-1.6574, 1.886, -1.383, 2.5155])


def test_marks_of_edm_in_a_single_file_say_how_it_is_asked(tmp_path: Path) -> None:
    cosxl = save_file_and_open(tmp_path, {"edm_vpred.sigma_max": VALUE, "edm_vpred.sigma_min": VALUE / 60000})
    velocity = NoiseSchedule.from_config(edm_scheduler(cosxl) or {})
    assert (velocity.prediction_type, velocity.is_continuous, velocity.sigma_data) == ("v_prediction", True, 1.0)
    assert velocity.sigmas[-1] == pytest.approx(120.0)
    assert velocity.sigmas[0] == pytest.approx(0.002)
    playground = save_file_and_open(tmp_path, {"edm_mean": FOUR.view(1, 4, 1, 1), "edm_std": FOUR.abs()})
    edm = NoiseSchedule.from_config(edm_scheduler(playground) or {})
    assert (edm.prediction_type, edm.sigma_data, edm.ramp) == ("edm", 0.5, "karras")
    normalized = edm_normalization(playground)
    assert normalized["latents_mean"] == pytest.approx(FOUR.tolist())
    assert normalized["latents_std"] == pytest.approx(FOUR.abs().tolist())
    assert normalized["scaling_factor"] == 0.5
    assert edm_scheduler(save_file_and_open(tmp_path, {"v_pred": VALUE})) is None


def test_half_of_edm_s_marks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds edm_mean alone"):
        edm_scheduler(save_file_and_open(tmp_path, {"edm_mean": FOUR}))
    with pytest.raises(ModelLoadError, match=r"shape \(4,\)"):
        edm_scheduler(save_file_and_open(tmp_path, {"edm_vpred.sigma_max": FOUR}))


def test_edm_marks_with_a_conflicting_scheduler_config_are_an_error(export: Export) -> None:
    path = export("sdxl", {"edm_mean": FOUR, "edm_std": FOUR.abs()})
    with pytest.raises(ModelLoadError, match=r"a model of EDM's noise .* says DDIMScheduler"):
        load_model(path, dtype="float32", device=DEVICE)


def test_mark_of_edm_that_nobody_knows_is_named(export: Export) -> None:
    with pytest.raises(ModelLoadError, match="edm_shift"):
        load_model(export("sdxl", {"edm_shift": VALUE}), dtype="float32", device=DEVICE)


def save_file_and_open(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    file = folder / f"marks-{len(list(folder.iterdir()))}.safetensors"
    save_file(tensors, file)
    return Checkpoint.open([file])


@pytest.mark.parametrize("suffix", ["", "scale_weight", "weight_scale"])
def test_float8_files_give_the_weights_that_they_stand_for(export: Export, suffix: str) -> None:
    file = export("sdxl")
    narrow, meant = load_file(file), load_file(file)
    for key, tensor in list(narrow.items()):
        if not key.startswith("model.diffusion_model.") or tensor.ndim != 2:
            continue
        scale = tensor.abs().max() / 448.0 if suffix else torch.tensor(1.0)
        narrow[key] = (tensor / scale).to(torch.float8_e4m3fn)
        meant[key] = narrow[key].float() * scale
        if suffix:
            layer = key.removesuffix("weight")
            narrow |= {f"{layer}{suffix}": scale, f"{layer}scale_input": torch.tensor(1.0)}
    if suffix:
        narrow["model.diffusion_model.scaled_fp8"] = torch.empty(0).to(torch.float8_e4m3fn)
    networks = []
    for tensors in (narrow, meant):
        save_file(tensors, file)
        networks.append(load_model(file, dtype="float32", device=DEVICE).unet.network.state_dict())
    assert all(torch.equal(tensor, networks[1][name]) for name, tensor in networks[0].items())


def test_a_scale_of_another_shape_than_its_weight_is_refused(export: Export) -> None:
    file, layer = export("sd15"), "model.diffusion_model.time_embed.0"
    tensors = load_file(file)
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{layer}.scale_weight": torch.ones(3)}, file)
    with pytest.raises(ModelLoadError, match=r"scale_weight'.*has shape \[3\]; the scale of a weight"):
        load_model(file, dtype="float32", device=DEVICE)


def unet_alone(tiny_pipeline: TinyPipeline, kind: str, naming: str) -> dict[str, torch.Tensor]:
    network = tiny_pipeline(kind).unet
    if naming == "diffusers":
        return {key: tensor.clone() for key, tensor in network.state_dict().items()}
    tensors = {key: tensor.clone() for key, tensor in unet_tensors(network)}
    prefix = "model.diffusion_model."
    return {key.removeprefix(prefix if naming == "bare" else ""): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("naming", ["original", "bare", "diffusers"])
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_file_of_a_unet_alone_is_loaded_with_parts_of_another_model(
    tmp_path: Path,
    tiny_pipeline: TinyPipeline,
    tiny: LoadTiny,
    tiny_model: Callable[[str], Path],
    kind: str,
    naming: str,
) -> None:
    file = tmp_path / "unet.safetensors"
    save_file(unet_alone(tiny_pipeline, kind, naming), file)
    with pytest.raises(ModelLoadError, match="holds a UNet but no text encoder"):
        load_model(file, dtype="float32", device=DEVICE)
    (tmp_path / "unet").symlink_to(tiny_model(kind), target_is_directory=True)  # configurations next to the file
    profile = replace(tiny(kind).profile, vae=str(tiny_model(kind)), text_encoder=str(tiny_model(kind)))
    loaded_model = load_model(file, dtype="float32", device=DEVICE, profile=profile)
    expected = tiny(kind).unet.network.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded_model.unet.network.state_dict().items())


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_file_with_the_averages_of_the_weights_alone_is_loaded(export: Export, tiny: LoadTiny, kind: str) -> None:
    file, prefix = export(kind), "model.diffusion_model."
    tensors = load_file(file)
    averages = {
        f"model_ema.diffusion_model{key.removeprefix(prefix).replace('.', '')}"
        if key.startswith(prefix)
        else key: tensor
        for key, tensor in tensors.items()
    }
    assert averages.keys() != tensors.keys()
    save_file(averages | {"model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(5)}, file)
    actual = load_model(file, dtype="float32", device=DEVICE).unet.network.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in tiny(kind).unet.network.state_dict().items())


@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_every_name_of_published_unets_is_read_from_an_average(kind: str) -> None:
    with torch.device("meta"):
        network = import_quietly("diffusers", "UNet2DConditionModel")(**PUBLISHED[kind])
    names = [key.removeprefix("model.diffusion_model.") for key, _ in unet_tensors(network)]
    assert [original_name(name.replace(".", "")) for name in names] == names
