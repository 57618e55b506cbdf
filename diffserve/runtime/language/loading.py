"""Loading of language models: what is supported, and the comparison with transformers' own attention."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from diffserve.api.errors import ModelLoadError, ModelNotFound
from diffserve.api.text_types import LanguageModelInfo
from diffserve.disk_cache import DiskCache
from diffserve.models.model_files import find_weights, read_json
from diffserve.runtime.decoding import JsonSpelling
from diffserve.runtime.kv import PagePlan, PagePool
from diffserve.runtime.language.attention import Scoring, register
from diffserve.runtime.language.model import LanguageModel, LanguageRunner, LayerShape, TokenChunk, run_network
from diffserve.runtime.language.weight_only import CpuInt4Linear, compute_choice, quantize_network
from diffserve.runtime.loading.checkpoint import check_manifest, digest_files
from diffserve.runtime.loading.components import OFFLINE, read_tokenizer
from diffserve.runtime.loading.library_imports import hushed_loading, import_quietly, without_compiler
from diffserve.runtime.loading.placement import from_pretrained_places, run_on
from diffserve.runtime.loading.weight_loading import WithoutInit
from diffserve.runtime.precision import DeviceChoice, tensor_bytes

LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
DYNAMIC: Final = "dynamic"
"""Positions that are scaled by the length of a text once it is longer than those of the training."""

LONGROPE: Final = "longrope"
"""Positions that are turned by other factors once a text is longer than ``original_max_position_embeddings``."""

PROBE_TOKENS: Final = 24
PROBE_CUTS: Final = ((0, 9), (9, 10), (10, PROBE_TOKENS))
TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of logits, as a share of their spread."""


def check_config(config: Any, where: str) -> None:
    """Raise ModelLoadError for a configuration with unsupported features."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{where}: {config.model_type} is an encoder-decoder; give a causal language model.")
    text = config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise ModelLoadError(
            f"{where}: layers of {unknown} are not supported; the supported ones are {sorted(LAYER_TYPES)}."
        )


def longest_text(config: Any) -> int | None:
    """Return how many tokens a text may have at most for its kept keys to be right; ``None``: any number.

    Dynamic positions turn keys by the length of the whole text once it exceeds ``max_position_embeddings``, and
    "longrope" (Ding et al., 2024, arXiv 2402.13753) once it exceeds ``original_max_position_embeddings``. Texts stay
    within that length, where the rotations do not depend on it.
    """
    parameters = getattr(config, "rope_parameters", None)
    types = _rope_types(parameters)
    if not types & {DYNAMIC, LONGROPE}:
        return None
    if LONGROPE not in types:
        return int(config.max_position_embeddings)
    name = "original_max_position_embeddings"
    limits = [rope[name] for rope in _rope_dicts(parameters) if rope.get(name)] or [getattr(config, name, None)]
    return min(int(limit or config.max_position_embeddings) for limit in limits)


def has_longrope(config: Any) -> bool:
    """Whether positions of the model are turned by other factors in long texts."""
    return LONGROPE in _rope_types(getattr(config.get_text_config(decoder=True), "rope_parameters", None))


def _rope_dicts(parameters: Any) -> list[dict[str, Any]]:
    """Return ``parameters`` and nested ones, as some models have separate rotations for each type of layer."""
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _rope_types(parameters: Any) -> set[str]:
    return {str(rope.get("rope_type", "default")) for rope in _rope_dicts(parameters)}


class ShapeProbe:
    """A ``LayerCall`` that attends to nothing, gives zeros, and writes down how each layer called."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.num_calls = 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Record the shape of ``layer`` and return zeros."""
        self.num_calls += 1
        if key.shape == value.shape and query.shape[-1] == key.shape[-1] and query.shape[1] % key.shape[1] == 0:
            self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], scoring.window, scoring.softcap)
        return torch.zeros_like(query)


@torch.inference_mode()
def find_layers(network: Any, where: str, device: torch.device) -> tuple[LayerShape, ...]:
    """Return the shapes of the attention layers, found by running one token.

    Raises ModelLoadError for layers that cannot run over pages.
    """
    probe = ShapeProbe()
    name = type(network).__name__
    token = torch.zeros(1, dtype=torch.long, device=device)
    try:
        run_network(network, token, token, token, paged=probe)
    except Exception as error:  # a class that does not know the interface may fail in any way
        raise ModelLoadError(f"{where}: {name} does not run over pages ({error}).") from error
    text = network.config.get_text_config(decoder=True)
    expected = int(text.num_hidden_layers)
    if sorted(probe.shapes) != list(range(expected)) or probe.num_calls != expected:
        raise ModelLoadError(
            f"{where}: {expected} layers of {name} should attend once each, with keys and values of one shape; "
            f"{len(probe.shapes)} do, in {probe.num_calls} calls. This attention is not supported."
        )
    layers = tuple(probe.shapes[layer] for layer in range(expected))
    _check_windows(text, layers, where)
    return layers


def _check_windows(config: Any, layers: tuple[LayerShape, ...], where: str) -> None:
    """Raise ModelLoadError for a sliding layer without a window size, which transformers may pass in another way."""
    types = getattr(config, "layer_types", None)
    if types is None and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        types = ["sliding_attention"] * len(layers)
    for index, (kind, layer) in enumerate(zip(types or (), layers, strict=False)):
        if kind == "sliding_attention" and layer.window is None:
            raise ModelLoadError(
                f"{where}: layer {index} has sliding attention without a window size, which is not supported."
            )


@torch.inference_mode()
def check_parity(model: LanguageModel) -> None:
    """Compare the logits of ``PROBE_TOKENS`` tokens, in chunks over pages and at once by transformers.

    Raises ModelLoadError when they differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(PROBE_TOKENS, model.info.context_tokens)
    token_ids = torch.randint(model.info.vocab_size, (count,), generator=generator).tolist()
    plain = model.plain_logits(token_ids).float()
    paged = _paged_logits(model, token_ids).float()
    spread = float((plain - plain.mean(-1, keepdim=True)).abs().max())
    difference = float((plain - paged).abs().max())
    if not difference <= TOLERANCE[model.dtype] * max(spread, 1e-6):
        raise ModelLoadError(
            f"{model.info.model_id}: {model.info.architecture} gives other logits over pages than by itself "
            f"(off by {difference:.3g}, spread {spread:.3g}); its attention is not supported."
        )


def _paged_logits(model: LanguageModel, token_ids: list[int]) -> Tensor:
    spec = model.spec("probe")
    page_bytes = PagePlan.smallest_page_bytes([spec])
    num_pages = PagePlan(spec, page_bytes).num_pages(len(token_ids))
    pool = PagePool(num_pages, page_bytes, device=model.device)
    runner = LanguageRunner(model, pool, tenant="probe")
    table, _ = pool.open("probe", (), reserve=len(token_ids))
    pieces = [
        runner.forward([TokenChunk(table, start, token_ids[start:end], num_logits=len(token_ids[start:end]))])
        for start, end in PROBE_CUTS
        if start < len(token_ids)
    ]
    return torch.cat(pieces)


logger = logging.getLogger(__name__)


def load_language_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offload: str = "none",
    model_id: str | None = None,
    cache: DiskCache | None = None,
) -> LanguageModel:
    """Load the causal language model in the directory ``path``, as transformers writes it.

    dtype     auto, float32, bfloat16, float16, int8 or int4 (weights only; arithmetic in the device's best dtype)
    offload   where weights rest while their layer does not run: none (on the device), auto, cpu or disk
    model_id  what it is called; by default the directory's name
    cache     keeps digests of large files for the next start

    Its attention over pages is compared with transformers' own on a short text before it is given out. Raises
    ModelNotFound, ConfigError (device or dtype), ModelLoadError for weights, classes or settings that cannot be served.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelNotFound(f"no model directory at {directory}.")
    choice = compute_choice(device, dtype, offload)
    check_manifest(directory)
    settings = read_json(directory / "config.json")
    files = find_weights(directory, "model", dtype=str(choice.compute_dtype).removeprefix("torch."))
    with hushed_loading():
        config = _load_config(directory, settings)
        check_config(config, str(directory))
        network = _load_network(directory, config, choice)
        tokenizer = read_tokenizer("AutoTokenizer", directory)
    quantize_network(network, choice)
    if choice.offload == "none":
        network.to(choice.device)
    layers = find_layers(network, str(directory), choice.device)
    digest = digest_files(files, cache)
    info = _describe(directory, model_id or directory.name, network, tokenizer, choice, digest)
    spelling = JsonSpelling.of(tokenizer, info.vocab_size, info.end_ids)
    info = msgspec.structs.replace(info, speaks_json=spelling is not None)
    model = LanguageModel(network, tokenizer, info, layers, choice.device, choice.compute_dtype, spelling)
    if choice.device.type != "meta":  # where there are no numbers to compare
        check_parity(model)
    logger.info("language model %s: %s", info.model_id, choice.reason)
    return model


def _load_config(directory: Path, settings: dict[str, Any]) -> Any:
    if "auto_map" in settings:
        logger.warning("%s refers to custom code, which is never run: %s", directory, settings["auto_map"])
    try:
        return import_quietly("transformers", "AutoConfig").from_pretrained(str(directory), **OFFLINE)
    except Exception as error:  # the library raises many errors for unusual configurations
        raise ModelLoadError(f"{directory}/config.json cannot be read ({error}).") from error


def _load_network(directory: Path, config: Any, choice: DeviceChoice) -> Any:
    cls = import_quietly("transformers", "AutoModelForCausalLM")
    try:
        # the factors of "longrope" are listed and counted in one product, which must be on one device
        with nullcontext() if has_longrope(config) else WithoutInit(), without_compiler():
            network, report = cls.from_pretrained(
                str(directory),
                config=config,
                dtype=choice.compute_dtype,
                attn_implementation=register(),
                use_safetensors=True,
                output_loading_info=True,
                **from_pretrained_places(choice),
                **OFFLINE,
            )
            run_on(network, choice)
    except Exception as error:  # the same
        raise ModelLoadError(f"{directory} cannot be loaded as a causal language model ({error}).") from error
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        problems = sorted(str(key) for key in report.get(what) or ())
        if problems:
            raise ModelLoadError(f"{directory}: {what.replace('_', ' ')} of {type(network).__name__}: {problems[:5]}.")
    network.eval().requires_grad_(False)
    return network


def _describe(
    directory: Path, model_id: str, network: Any, tokenizer: Any, choice: DeviceChoice, digest: str
) -> LanguageModelInfo:
    tied = getattr(
        network, "all_tied_weights_keys", {}
    )  # shared ones count once, even if accelerate's hooks separated them
    parameters = [parameter for name, parameter in network.named_parameters() if name not in tied]
    scales = [buffer for name, buffer in network.named_buffers() if name.endswith("weight_scales")]
    packed = [part for part in network.modules() if isinstance(part, CpuInt4Linear)]
    text_config = network.config.get_text_config(decoder=True)
    vocab_size = int(network.get_output_embeddings().weight.shape[0])
    return LanguageModelInfo(
        model_id=model_id,
        architecture=type(network).__name__,
        digest=digest,
        vocab_size=vocab_size,
        context_tokens=_context_tokens(directory, text_config, tokenizer),
        end_ids=_end_ids(network, tokenizer),
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        device=str(choice.device),
        dtype=choice.dtype,
        choice_reason=choice.reason,
        num_parameters=sum(parameter.numel() for parameter in parameters)
        + sum(part.in_features * part.out_features for part in packed),
        weights_bytes=sum(map(tensor_bytes, (*parameters, *scales)))
        + sum(part.packed.nbytes + part.scales.nbytes for part in packed),
    )


def _context_tokens(directory: Path, config: Any, tokenizer: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    if not 0 < int(limit) < 10**9:
        raise ModelLoadError(
            f"{directory}/config.json has no max_position_embeddings: set the maximum length of texts there."
        )
    longest = longest_text(config)
    if longest is not None:
        logger.warning(
            "%s: its positions are scaled beyond %d tokens, so texts have at most as many", directory, longest
        )
    return min(int(limit), longest or int(limit))


def _end_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    for source in (getattr(network, "generation_config", None), network.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(int(token_id) for token_id in (ids if isinstance(ids, list | tuple) else [ids]))
    return ()
