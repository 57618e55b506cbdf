"""Evaluation of the rewriter at lower precision: perplexity of the reference captions of held-out wishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from diffserve.rewriting import find_rewriter
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.training.rewriter_model import answer, prompt
from diffserve.training.wishes import LooseWish, held_out_wishes

MOST_RISE = 0.05
"""Largest relative rise of perplexity over the reference (see ``benchmarks/LOG.md``)."""


def evaluate(precisions: Sequence[str], count: int, model: str = "embedded") -> dict[str, Any]:
    """Measure the perplexity on ``count`` held-out wishes in each precision; the first one is the reference.

    ``passes`` tells whether a precision stays within ``MOST_RISE``.

    Raises:
        ConfigError: a precision is not available on this machine.
    """
    wishes = held_out_wishes(count)
    results: dict[str, dict[str, Any]] = {}
    for precision in precisions:
        loaded = load_language_model(find_rewriter(model), dtype=precision)
        results[precision] = {
            "perplexity": round(math.exp(mean_nats(loaded, wishes)), 5),
            "weights_bytes": loaded.info.weights_bytes,
        }
    reference = results[precisions[0]]["perplexity"]
    for result in results.values():
        result["rise"] = round(result["perplexity"] / reference - 1, 5)
        result["passes"] = result["rise"] <= MOST_RISE
    return {"wishes": count, "most_rise": MOST_RISE, "precisions": results}


def mean_nats(model: LanguageModel, wishes: Sequence[LooseWish]) -> float:
    """Compute the mean cross-entropy in nats of the captions' tokens, each after its wish and the tokens before it."""
    nats, num_tokens = 0.0, 0
    for wish in wishes:
        before, after = (model.tokenizer(text).input_ids for text in (prompt(wish.text), answer(wish.caption)))
        with torch.inference_mode():
            logits = model.plain_logits([*before, *after])[len(before) - 1 : -1].float()
        nats += float(F.cross_entropy(logits, torch.tensor(after, device=logits.device), reduction="sum"))
        num_tokens += len(after)
    return nats / num_tokens
