"""A directory to a LanguageModel: safetensors only, nothing from the network, no code that came with the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from diffserve.api.errors import ModelLoadError, ModelNotFound
from diffserve.api.text_types import LanguageModelInfo
from diffserve.disk_cache import DiskCache
from diffserve.models.model_files import find_weights, read_json
from diffserve.runtime.decoding import JsonSpelling
from diffserve.runtime.language.attention import register
from diffserve.runtime.language.compatibility import (
    check_config,
    check_parity,
    find_layers,
    has_longrope,
    longest_text,
)
from diffserve.runtime.language.model import LanguageModel
from diffserve.runtime.language.weight_only import CpuInt4Linear, compute_choice, quantise
from diffserve.runtime.loading.checkpoint import check_manifest, digest_files
from diffserve.runtime.loading.components import OFFLINE, read_tokenizer
from diffserve.runtime.loading.library_imports import hushed, import_quietly, without_compiler
from diffserve.runtime.loading.placement import from_pretrained_places, run_on
from diffserve.runtime.loading.weight_loading import WithoutInit
from diffserve.runtime.precision import DeviceChoice, tensor_bytes

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
    with _quietly():
        config = _load_config(directory, settings)
        check_config(config, str(directory))
        network = _load_network(directory, config, choice)
        tokenizer = read_tokenizer("AutoTokenizer", directory)
    quantise(network, choice)
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
        logger.warning("%s names code of its own, which is never run: %s", directory, settings["auto_map"])
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
        raise ModelLoadError(f"{directory}/config.json has no max_position_embeddings: say how long texts may be.")
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


@contextmanager
def _quietly() -> Iterator[None]:
    """Without progress bars and remarks on initialisation; errors are heard."""
    control = import_quietly("transformers.utils", "logging")
    was_shown = control.is_progress_bar_enabled()
    control.disable_progress_bar()
    try:
        with hushed("transformers", "accelerate.big_modeling"):
            yield
    finally:
        if was_shown:
            control.enable_progress_bar()
