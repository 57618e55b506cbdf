"""Measures by networks on disk agree with transformers, computed apart from them, and with torchmetrics' formula."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torchmetrics.functional.multimodal import clip_score

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.estimates import MODEL_MEASURES, Measure
from diffserve.experiments.measure import ModelMeasures
from diffserve.experiments.model_measures import digest_measures, load_measures, read_measures
from diffserve.runtime.image_reward import REWARD_MEAN, REWARD_STD
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.open_clip_scorer import letterbox
from tests.tiny_models import save_clip, write_tokenizer

PROMPT = "the red fox on the cat"
SHAPES = [(64, 64), (48, 80)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "red", "fox", "on", "cat"]
CLIP_MEAN, CLIP_STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])


def transformers(name: str) -> Any:
    return import_quietly("transformers", name)


def image_of(shape: tuple[int, int], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def widen(network: Any) -> Any:
    """Enlarge random weights, because transformers starts at 0.02, where all images look the same."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return network.eval()


def load(measure: Measure, folder: Path) -> ModelMeasures:
    return load_measures({measure: folder}, "cpu")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


class TensorClip:
    """A CLIP model whose features are tensors, as torchmetrics 1.9 expects and transformers before 5 returned."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def to(self, device: torch.device) -> TensorClip:
        return self

    def get_image_features(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model.get_image_features(*inputs).pooler_output)

    def get_text_features(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model.get_text_features(*inputs).pooler_output)


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_score_is_that_of_torchmetrics(clip: Path, shape: tuple[int, int]) -> None:
    with hushed("transformers"):
        model = transformers("CLIPModel").from_pretrained(clip).eval()
        images, words = (
            transformers(name).from_pretrained(str(clip)) for name in ("CLIPImageProcessorPil", "CLIPTokenizer")
        )

    def process(**inputs: Any) -> Any:
        if "text" in inputs:
            return words(inputs["text"], return_tensors="pt", padding=True)
        return images(inputs["images"], return_tensors="pt")

    score = load(Measure.CLIP_SCORE, clip).scores["clip_score"]
    values = []
    for prompt, seed in product((PROMPT, "cat", "an owl", "two apples", "a zebra"), range(2)):
        pixels = image_of(shape, seed)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        with torch.inference_mode():
            expected = clip_score(tensor, prompt, model_name_or_path=lambda: (TensorClip(model), process))
        values.append(score(prompt, pixels))
        assert values[-1] == pytest.approx(max(0.0, float(expected)), abs=1e-4)
    assert min(values) == 0 < max(values)


def test_pick_score_is_the_logit_of_the_model(clip: Path) -> None:
    with hushed("transformers"):
        model = transformers("CLIPModel").from_pretrained(clip).eval()
        images, words = (
            transformers(name).from_pretrained(str(clip)) for name in ("CLIPImageProcessorPil", "CLIPTokenizer")
        )
    pixels = image_of((48, 80))
    with torch.inference_mode():
        output = model(**words(PROMPT, return_tensors="pt"), **images(pixels, return_tensors="pt"))
    assert load(Measure.PICK_SCORE, clip).scores["pick_score"](PROMPT, pixels) == pytest.approx(
        float(output.logits_per_image), abs=1e-4
    )


def small_clip() -> Any:
    """Return a CLIP model with heads as wide as those of ViT-H-14."""
    shared = {"intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": "gelu"}
    size = 49408
    config = transformers("CLIPConfig")(
        text_config={
            **shared, "hidden_size": 128, "num_attention_heads": 2, "vocab_size": size,
            "bos_token_id": size - 2, "eos_token_id": size - 1,
        },
        vision_config={**shared, "hidden_size": 160, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )  # fmt: skip
    torch.manual_seed(0)
    return widen(transformers("CLIPModel")(config))


def name_as_open_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the tensors of a CLIP model as OpenCLIP names them, by a table of whole names."""
    renamed = {
        "logit_scale": state["logit_scale"],
        "text_projection": state["text_projection.weight"].T,
        "visual.proj": state["visual_projection.weight"].T,
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "visual.class_embedding": state["vision_model.embeddings.class_embedding"],
        "visual.conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "visual.positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
    }
    for kind in ("weight", "bias"):
        renamed[f"ln_final.{kind}"] = state[f"text_model.final_layer_norm.{kind}"]
        renamed[f"visual.ln_pre.{kind}"] = state[f"vision_model.pre_layrnorm.{kind}"]
        renamed[f"visual.ln_post.{kind}"] = state[f"vision_model.post_layernorm.{kind}"]
        for prefix, tower in (("", "text_model."), ("visual.", "vision_model.")):
            for index in range(2):
                mine, other = f"{prefix}transformer.resblocks.{index}.", f"{tower}encoder.layers.{index}."
                renamed[f"{mine}ln_1.{kind}"] = state[f"{other}layer_norm1.{kind}"]
                renamed[f"{mine}ln_2.{kind}"] = state[f"{other}layer_norm2.{kind}"]
                renamed[f"{mine}mlp.c_fc.{kind}"] = state[f"{other}mlp.fc1.{kind}"]
                renamed[f"{mine}mlp.c_proj.{kind}"] = state[f"{other}mlp.fc2.{kind}"]
                renamed[f"{mine}attn.out_proj.{kind}"] = state[f"{other}self_attn.out_proj.{kind}"]
                renamed[f"{mine}attn.in_proj_{kind}"] = torch.cat(
                    [state[f"{other}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                )
    return {name: tensor.contiguous().clone() for name, tensor in renamed.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_hps_reads_open_clip_and_pads_images(tmp_path: Path, shape: tuple[int, int]) -> None:
    model = small_clip()
    save_file(name_as_open_clip(model.state_dict()), tmp_path / "HPS_v2.safetensors")
    pixels = image_of(shape)
    height, width = (round(side * 32 / max(shape)) for side in shape)
    scaled = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    padded = np.zeros((32, 32, 3), dtype=np.uint8)
    top, left = (32 - height) // 2, (32 - width) // 2
    padded[top : top + height, left : left + width] = scaled
    assert np.array_equal(letterbox(pixels, 32), padded)
    inputs = torch.from_numpy((padded / 255 - CLIP_MEAN) / CLIP_STD).permute(2, 0, 1)[None].float()
    ids = torch.tensor([[49406, 518, 736, 3240, 525, 518, 2368, 256, 49407]])  # as OpenCLIP's tokenizer reads it
    with torch.inference_mode():
        output = model(input_ids=ids, pixel_values=inputs)
    expected = float((output.text_embeds * output.image_embeds).sum())
    assert load(Measure.HPS_V2, tmp_path).scores["hps_v2"](f"{PROMPT}!", pixels) == pytest.approx(expected, abs=1e-4)


def save_image_reward(folder: Path) -> tuple[Any, Any, list[torch.nn.Linear]]:
    """Save a small random ImageReward with the names of the original BLIP; return its parts in transformers."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 48}
    vision_config = transformers("BlipVisionConfig")(
        hidden_size=64, num_attention_heads=1, image_size=32, patch_size=8, layer_norm_eps=1e-6, **sizes
    )
    text_config = transformers("BlipTextConfig")(
        hidden_size=32, num_attention_heads=2, encoder_hidden_size=64, vocab_size=len(WORDS), **sizes
    )
    vision = widen(transformers("BlipVisionModel")(vision_config))
    text = widen(transformers("BlipTextModel")(text_config, add_pooling_layer=False))
    head = [torch.nn.Linear(*widths) for widths in ((32, 20), (20, 12), (12, 8), (8, 4), (4, 1))]
    state = {f"blip.text_encoder.{name}": tensor for name, tensor in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(512)[None]
    state["blip.vision_proj.weight"] = torch.zeros(4, 64)
    vision_state = vision.state_dict()
    state |= {
        "blip.visual_encoder.cls_token": vision_state["embeddings.class_embedding"],
        "blip.visual_encoder.pos_embed": vision_state["embeddings.position_embedding"],
    }
    for kind in ("weight", "bias"):
        state[f"blip.visual_encoder.patch_embed.proj.{kind}"] = vision_state[f"embeddings.patch_embedding.{kind}"]
        state[f"blip.visual_encoder.norm.{kind}"] = vision_state[f"post_layernorm.{kind}"]
        for index in range(2):
            for mine, other in (
                ("norm1", "layer_norm1"), ("norm2", "layer_norm2"), ("attn.qkv", "self_attn.qkv"),
                ("attn.proj", "self_attn.projection"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2"),
            ):  # fmt: skip
                state[f"blip.visual_encoder.blocks.{index}.{mine}.{kind}"] = vision_state[
                    f"encoder.layers.{index}.{other}.{kind}"
                ]
    for index, layer in zip((0, 2, 4, 6, 7), head, strict=True):
        state |= {f"mlp.layers.{index}.{name}": tensor.detach() for name, tensor in layer.named_parameters()}
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "ImageReward.safetensors")
    settings = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "hidden_act": "gelu"}
    (folder / "med_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    return vision, text, head


@pytest.mark.parametrize("shape", SHAPES)
def test_image_reward_is_that_of_the_published_code(tmp_path: Path, shape: tuple[int, int]) -> None:
    vision, text, head = save_image_reward(tmp_path)
    pixels = image_of(shape)
    with hushed("transformers"):
        processor = transformers("CLIPImageProcessorPil")(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    ids = [2, *(WORDS.index(word) for word in PROMPT.split()), 3]
    padding = 35 - len(ids)
    with torch.inference_mode():
        image = vision(processor(pixels, return_tensors="pt").pixel_values).last_hidden_state
        value = text(
            torch.tensor([ids + [0] * padding]),
            attention_mask=torch.tensor([[1] * len(ids) + [0] * padding]),
            encoder_hidden_states=image,
            encoder_attention_mask=torch.ones(image.shape[:2], dtype=torch.long),
        ).last_hidden_state[:, 0]
        for layer in head:
            value = layer(value)
    expected = (float(value) - REWARD_MEAN) / REWARD_STD
    score = load(Measure.IMAGE_REWARD, tmp_path).scores["image_reward"]
    assert score(PROMPT, pixels) == pytest.approx(expected, abs=1e-4)
    assert score("the cat", pixels) != pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random classifier, as ResNets are published."""
    folder = tmp_path_factory.mktemp("resnet")
    config = transformers("ResNetConfig")(
        embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 1, 1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(0)
    with hushed("transformers"):
        widen(transformers("ResNetForImageClassification")(config)).save_pretrained(folder)
    return folder


def features_of(folder: Path, pixels: NDArray[np.uint8]) -> list[NDArray[np.float64]]:
    """Return the hidden states (C, h, w) of the complete model in unit length."""
    with hushed("transformers"):
        network = transformers("ResNetModel").from_pretrained(folder).eval()
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    inputs = torch.from_numpy((pixels / 255 - mean) / std).permute(2, 0, 1)[None].float()
    with torch.inference_mode():
        states = network(inputs, output_hidden_states=True).hidden_states
    maps = [state[0].double().numpy() for state in states]
    return [values / np.sqrt(np.square(values).sum(axis=0, keepdims=True)) for values in maps]


@pytest.mark.parametrize("has_weights", [False, True])
def test_lpips_is_equation_1_of_zhang_and_others(resnet: Path, tmp_path: Path, has_weights: bool) -> None:
    for file in resnet.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pixels, other = image_of((64, 64)), image_of((64, 64), seed=1)
    pairs = list(zip(features_of(resnet, pixels), features_of(resnet, other), strict=True))
    weights = [np.full(len(first), 1 / len(pairs)) for first, _ in pairs]
    if has_weights:
        rng = np.random.default_rng(2)
        weights = [rng.random(len(first)) for first, _ in pairs]
        tensors = {
            f"lin{index}.model.1.weight": torch.from_numpy(weight.astype("f4")).reshape(1, -1, 1, 1)
            for index, weight in enumerate(weights)
        }
        save_file(tensors, tmp_path / "lpips.safetensors")
    expected = sum(
        (np.square(first - second) * weight[:, None, None]).sum(axis=0).mean()
        for (first, second), weight in zip(pairs, weights, strict=True)
    )
    lpips = load(Measure.LPIPS, tmp_path).lpips
    assert lpips is not None
    assert lpips(pixels, other) == pytest.approx(float(expected), abs=1e-4)
    assert lpips(pixels, pixels) == 0
    assert 0 < lpips(pixels, np.clip(pixels, 20, 235)) < lpips(pixels, other)


def test_folders_are_named_by_measure(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    folders = read_measures([f"clip_score={tmp_path / 'a,b'}, lpips={tmp_path}", f"hps_v2={tmp_path}"])
    assert folders == {Measure.CLIP_SCORE: tmp_path / "a,b", Measure.LPIPS: tmp_path, Measure.HPS_V2: tmp_path}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fid=x", "--measures has 'fid'; the measures are clip_score, pick_score, hps_v2, image_reward, lpips."),
        (
            "clip_score",
            "clip_score needs weights: pass --measures clip_score=FOLDER with a CLIP model in transformers'",
        ),
        (
            "lpips=missing",
            "lpips needs weights, and there is no folder 'missing': pass --measures lpips=FOLDER with a ",
        ),
        ("lpips=.,lpips=.", "--measures has lpips twice; give it one folder."),
    ],
)
def test_what_is_no_measure_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_measures([text])
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("measure", MODEL_MEASURES)
def test_a_wrong_folder_is_refused_in_a_sentence(measure: Measure, tmp_path: Path) -> None:
    for fill in (lambda: None, lambda: (tmp_path / "config.json").write_text('{"model_type": "bert"}')):
        fill()
        with pytest.raises(InvalidRequest) as caught:
            load(measure, tmp_path)
        assert caught.value.message.startswith(f"{measure.value} cannot use {str(tmp_path)!r}; it needs ")
        assert "\n" not in caught.value.message


def test_weights_that_do_not_fit_are_refused(clip: Path, resnet: Path, tmp_path: Path) -> None:
    for file in resnet.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(resnet / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "stages.1" not in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(InvalidRequest, match=r"lack 'encoder.stages.1.+ and \d+ more tensors"):
        load(Measure.LPIPS, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"lin0.model.1.weight": torch.ones(1, 5, 1, 1)}, tmp_path / "lpips.safetensors")
    with pytest.raises(InvalidRequest, match=r"for \[5\] channels; the stages of its backbone have \[8, 8, 16, 24\]"):
        load(Measure.LPIPS, tmp_path)
    with pytest.raises(InvalidRequest, match="model that is no backbone of transformers"):
        load(Measure.LPIPS, clip)


def test_pickles_are_refused_with_a_way_to_convert_them(tmp_path: Path) -> None:
    for measure, name in ((Measure.HPS_V2, "HPS_v2.1_compressed.pt"), (Measure.IMAGE_REWARD, "ImageReward.pt")):
        folder = tmp_path / measure.value
        folder.mkdir()
        (folder / name).write_bytes(b"pickle")
        with pytest.raises(InvalidRequest, match=f"{name} is a pickle file.+weights_only=True"):
            load(measure, folder)


def test_a_digest_changes_with_the_weights(clip: Path, tmp_path: Path) -> None:
    def digest() -> str:
        return digest_measures({Measure.CLIP_SCORE: tmp_path})["clip_score"]

    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    before = digest()
    (tmp_path / "README.md").write_text("text", encoding="utf-8")
    assert digest() == before
    (tmp_path / "config.json").write_text("{ }", encoding="utf-8")
    assert digest() != before


def test_values_are_written_with_their_digits() -> None:
    assert Measure.PICK_SCORE.write(21.638) == "21.64"
    assert Measure.HPS_V2.write(0.27345) == "0.2735"
    assert Measure.LPIPS.write(0.25431) == "0.254"
    assert [Measure.PSNR_DB.write(value) for value in (34.26, 0.26, 0.026, 0.0)] == [
        "34.3 dB",
        "0.3 dB",
        "0.03 dB",
        "0.0 dB",
    ]
    assert [measure.more_is_better for measure in MODEL_MEASURES] == [True, True, True, True, False]
