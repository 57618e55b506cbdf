"""Checks that a language model can run over pages, made when it is loaded.

Three checks: the configuration has no unsupported features; every layer calls ``paged_attention``, with which shapes;
and a short text gives the same logits over pages, in chunks, as with transformers' own attention. The last check
catches all other differences of a model class.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from diffserve.api.errors import ModelLoadError
from diffserve.runtime.kv import PagePlan, PagePool
from diffserve.runtime.language.attention import Scoring
from diffserve.runtime.language.model import LanguageModel, LanguageRunner, LayerShape, TokenChunk, run_network

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
        raise ModelLoadError(f"{where}: layers of {unknown} are not served; known are {sorted(LAYER_TYPES)}.")


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
            f"{len(probe.shapes)} do, in {probe.num_calls} calls. Such attention is not served."
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
            raise ModelLoadError(f"{where}: layer {index} slides, and does not say how far; it cannot be served.")


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
            f"(off by {difference:.3g}, spread {spread:.3g}); its attention is not of a kind that is served."
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
