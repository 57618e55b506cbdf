"""Stable Diffusion 1.5 and XL in real size with random weights, for timing dense work only.

The configurations are written out here; the vocabulary is bytes only, because the images have no meaning.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import pre_tokenizers

from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime import DiffusionModel, choose_device
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.loading.weight_loading import build_on_meta
from diffserve.runtime.low_rank import adaptable, shape_of

START, END = "<|startoftext|>", "<|endoftext|>"
SD_BETAS: Final = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

TINY_UNET: Final[dict[str, Any]] = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
}
UNETS: Final[dict[str, dict[str, Any]]] = {
    "sd15-random": {
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl-random": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "tiny-random": TINY_UNET,
    "tiny-xl-random": {
        **TINY_UNET,
        "transformer_layers_per_block": (1, 2),
        "cross_attention_dim": 128,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    },
}
TINY_VAE: Final = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1, "sample_size": 128}
VAES: Final[dict[str, dict[str, Any]]] = {
    "sd15-random": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 512},
    "sdxl-random": {
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "sample_size": 1024,
        "scaling_factor": 0.13025,
    },
    "tiny-random": TINY_VAE,
    "tiny-xl-random": TINY_VAE,
}
CLIP_L: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
BIG_G: Final = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
TINY_TEXT: Final = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
NAMES: Final = tuple(UNETS)
NETWORKS: Final = ("text_encoder", "text_encoder_2", "unet", "vae")


def save_random_model(name: str, directory: Path, *, dtype: torch.dtype, seed: int = 0) -> Path:
    """Write the model ``name`` in ``dtype`` as a diffusers directory; the same seed gives the same weights."""
    torch.manual_seed(seed)
    with hushed("transformers", "diffusers"):
        parts = model_parts(name, directory)
        for key in NETWORKS:
            if key in parts:
                parts[key].to(dtype)
        make_pipeline(parts).save_pretrained(str(directory / "model"))
    return directory / "model"


@contextmanager
def directory_of(model: str, device: str, dtype: str) -> Iterator[Path]:
    """Yield the directory of "embedded", of a temporary model of ``NAMES``, or the given directory."""
    with tempfile.TemporaryDirectory() as scratch:
        if model in NAMES:
            yield save_random_model(model, Path(scratch), dtype=choose_device(device, dtype).compute_dtype)
        else:
            yield EMBEDDED_DIRECTORY if model == "embedded" else Path(model)


def save_hollow_model(name: str, directory: Path, *, dtype: torch.dtype) -> Path:
    """Write a model directory with sparse weight files: right names and lengths, content zeros.

    Sparse files take no space and no time; they are meant for the meta device.
    """
    target = directory / "model"
    with hushed("transformers", "diffusers"):
        parts = build_on_meta(lambda: model_parts(name, directory))
        make_pipeline(parts).save_config(str(target))
        for key, part in parts.items():
            if key not in NETWORKS:
                part.save_pretrained(str(target / key))
                continue
            is_text = key.startswith("text_encoder")
            (part.config.save_pretrained if is_text else part.save_config)(str(target / key))
            stem = "model" if is_text else "diffusion_pytorch_model"
            _save_hollow(part, target / key / f"{stem}.safetensors", dtype)
    return target


def lora_tensors(
    model: DiffusionModel, ends: Iterable[str], seed: int, rank: int, *, of_texts: bool = True
) -> dict[str, torch.Tensor]:
    """Return a random LoRA, in diffusers' names, for the layers of ``model`` whose names have the given endings.

    With ``of_texts`` it covers the text encoders too. It visibly changes images without amplifying rounding.
    """
    rng = torch.Generator().manual_seed(seed)
    encoders = (encoder.network for encoder in model.text.encoders if of_texts)
    networks = {"unet": model.unet.network} | dict(zip(("text_encoder", "text_encoder_2"), encoders, strict=False))
    tensors = {}
    for component, network in networks.items():
        for name, layer in adaptable(network).items():
            if name.endswith(tuple(ends)):
                out, *inside = shape_of(layer)
                tensors[f"{component}.{name}.lora_A.weight"] = torch.randn((rank, *inside), generator=rng) / 4
                up = torch.randn((out, rank, *(1 for _ in inside[1:])), generator=rng) / (2 * rank)
                tensors[f"{component}.{name}.lora_B.weight"] = up
    return tensors


IMAGE_ENCODER: Final[dict[str, int]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 24,
}
"""A small CLIP image encoder; the cost of a UNet call does not depend on it."""


def save_image_encoder(directory: Path, **changes: int) -> Path:
    """Save a random ``CLIPVisionModelWithProjection`` of ``IMAGE_ENCODER`` with ``changes``."""
    config, cls = (
        import_quietly("transformers", name) for name in ("CLIPVisionConfig", "CLIPVisionModelWithProjection")
    )
    rng = torch.Generator().manual_seed(5)
    with hushed("transformers"), torch.no_grad():
        encoder = cls(config(**IMAGE_ENCODER | changes))
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / max(1.0, parameter[0].numel() ** 0.5))
        encoder.save_pretrained(str(directory))
    return directory


def adapter_tensors(unet: Any, kind: str, seed: int, num_tokens: int) -> dict[str, torch.Tensor]:
    """Return a random IP-Adapter of ``kind`` ("base" or "plus") for ``unet`` and the encoder, by original names."""
    rng, width = torch.Generator().manual_seed(seed), int(unet.config.cross_attention_dim)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=rng)

    def linear(*shape: int) -> torch.Tensor:
        return numbers(*shape, scale=shape[-1] ** -0.5)

    def norm(name: str, size: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1.0 + numbers(size, scale=1 / 8), f"{name}.bias": numbers(size, scale=1 / 8)}

    if kind == "base":
        size = num_tokens * width
        projection = {"proj.weight": linear(size, IMAGE_ENCODER["projection_dim"]), "proj.bias": numbers(size)}
        projection |= norm("norm", width)
    else:
        inner, heads = 64, 128
        projection = {"latents": numbers(1, num_tokens, inner)} | norm("norm_out", width)
        for name, shape in {"proj_in": (inner, IMAGE_ENCODER["hidden_size"]), "proj_out": (width, inner)}.items():
            projection |= {f"{name}.weight": linear(*shape), f"{name}.bias": numbers(shape[0], scale=1 / 8)}
        for block in range(4):  # as diffusers expects
            first, second = f"layers.{block}.0", f"layers.{block}.1"
            projection |= norm(f"{first}.norm1", inner) | norm(f"{first}.norm2", inner) | norm(f"{second}.0", inner)
            projection |= {f"{first}.to_q.weight": linear(heads, inner), f"{first}.to_kv.weight": linear(256, inner)}
            projection |= {f"{first}.to_out.weight": linear(inner, heads), f"{second}.1.weight": linear(256, inner)}
            projection |= {f"{second}.3.weight": linear(inner, 256)}
    tensors = {f"image_proj.{name}": tensor for name, tensor in projection.items()}
    modules = [module for name, module in unet.named_modules() if name.endswith("attn2")]
    for place, module in enumerate(modules):
        for part in "kv":
            weight = 2.0 * linear(module.to_k.weight.shape[0], width)
            tensors[f"ip_adapter.{2 * place + 1}.to_{part}_ip.weight"] = weight
    return tensors


def _save_hollow(network: Any, file: Path, dtype: torch.dtype) -> None:
    """Write a safetensors file of ``network`` in ``dtype``: eight bytes of length, the header, and a hole."""
    header, end = {}, 0
    code = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    for key, tensor in network.state_dict().items():
        start, end = end, end + tensor.numel() * dtype.itemsize
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def model_parts(name: str, directory: Path) -> dict[str, Any]:
    """Build the networks, tokenizers and scheduler of the model ``name``; tokenizer files go below ``directory``."""
    parts = _text_parts(name, directory / "parts")
    parts["unet"] = import_quietly("diffusers", "UNet2DConditionModel")(**UNETS[name])
    parts["vae"] = _vae(name)
    parts["scheduler"] = import_quietly("diffusers", "DDIMScheduler")(
        **SD_BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )
    return parts


def make_pipeline(parts: dict[str, Any]) -> Any:
    """Build diffusers' own pipeline from ``parts``, without progress output."""
    if "text_encoder_2" in parts:
        pipeline = import_quietly("diffusers", "StableDiffusionXLPipeline")(**parts, add_watermarker=False)
    else:
        plain = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = import_quietly("diffusers", "StableDiffusionPipeline")(**parts, **plain)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _vae(name: str) -> Any:
    levels = len(VAES[name]["block_out_channels"])
    return import_quietly("diffusers", "AutoencoderKL")(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=4,
        **VAES[name],
    )


def _text_parts(name: str, directory: Path) -> dict[str, Any]:
    parts = {"tokenizer": _tokenizer(directory / "tokenizer")}
    is_tiny = name.startswith("tiny-")
    parts["text_encoder"] = _text_encoder("CLIPTextModel", TINY_TEXT if is_tiny else CLIP_L)
    if "addition_embed_type" in UNETS[name]:
        parts["tokenizer_2"] = _tokenizer(directory / "tokenizer_2")
        second = {**TINY_TEXT, "projection_dim": 32, "hidden_act": "gelu"} if is_tiny else BIG_G
        parts["text_encoder_2"] = _text_encoder("CLIPTextModelWithProjection", second)
    return parts


def _vocabulary() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), START, END]
    return {token: index for index, token in enumerate(tokens)}


def _text_encoder(class_name: str, sizes: dict[str, Any]) -> Any:
    last = len(_vocabulary()) - 1
    config = import_quietly("transformers", "CLIPTextConfig")(
        vocab_size=49408, bos_token_id=last - 1, eos_token_id=last, pad_token_id=last, **sizes
    )
    return import_quietly("transformers", class_name)(config).eval()


def _tokenizer(directory: Path) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(_vocabulary(), ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    marks = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **marks}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return import_quietly("transformers", "CLIPTokenizer").from_pretrained(str(directory))
