"""Evaluation of the rewriter: by images of held-out wishes, and by perplexity at lower precision.

Both images of a wish use one seed, so that only the prompt differs. An image is correct if it shows everything that the
wish settles, with any choice for what it leaves open (:func:`~diffserve.training.wishes.shows`). All answers are
recorded first; entropy thresholds are applied afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from diffserve.api.rewrite_types import Rewrite, RewriteRequest
from diffserve.api.types import DiffusionParams, RewriteOptions
from diffserve.engine import Engine
from diffserve.engine.rewriter import Rewriter
from diffserve.rewriting import find_rewriter
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.training.eval.captions import paint, painter
from diffserve.training.rewriter_model import answer, prompt
from diffserve.training.wishes import LooseWish, held_out_wishes, in_groups, shows
from diffserve.world.captions import held_out

SEED = 9_800
LEVEL = 0.95
NUM_RESAMPLES = 4000
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class PairedResult:
    """One wish, its rewrite regardless of entropy, and whether the plain and the rewritten image are correct."""

    wish: LooseWish
    rewrite: Rewrite
    plain: bool
    rewritten: bool

    def is_taken(self, max_entropy: float) -> bool:
        """Whether the rewrite is used at this threshold."""
        return self.rewrite.fallback is None and self.rewrite.mean_entropy <= max_entropy

    def is_exact(self, max_entropy: float) -> bool:
        """Whether the image for this threshold is correct."""
        return self.rewritten if self.is_taken(max_entropy) else self.plain

    def is_granted(self, max_entropy: float) -> bool:
        """Whether the prompt for this threshold states everything that the wish settles, in a canonical sentence."""
        return self.wish.is_granted_by(self.rewrite.prompt if self.is_taken(max_entropy) else self.wish.text)


@dataclass(frozen=True)
class Gain:
    """Exact matches of ``count`` wishes, ``plain`` and ``rewritten``, and the gain in points with its 95 % interval.

    taken    rewrites that were used; the others fell back to the wish
    granted  prompts that state everything that the wish settles, in the embedded model's language
    """

    count: int
    plain: int
    rewritten: int
    gain: float
    low: float
    high: float
    taken: int
    granted: int


def gain(results: Sequence[PairedResult], max_entropy: float) -> Gain:
    """Compute the gain of rewriting at a threshold; the interval resamples pairs."""
    plain = [result.plain for result in results]
    rewritten = [result.is_exact(max_entropy) for result in results]
    points = [100.0 * (after - before) for before, after in zip(plain, rewritten, strict=True)]
    low, high = mean_interval(points)
    return Gain(
        count=len(results),
        plain=sum(plain),
        rewritten=sum(rewritten),
        gain=round(float(np.mean(points)), 2) if points else 0.0,
        low=round(low, 2),
        high=round(high, 2),
        taken=sum(result.is_taken(max_entropy) for result in results),
        granted=sum(result.is_granted(max_entropy) for result in results),
    )


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Compute the 95 % interval of the mean by the percentile bootstrap (Efron 1979); zeros without values."""
    if not values:
        return 0.0, 0.0
    rng, numbers = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    times = rng.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), size=NUM_RESAMPLES)
    low, high = np.quantile(times @ numbers / len(numbers), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def held_out_captions(count: int) -> list[LooseWish]:
    """Return held-out captions in the image model's own words, as complete wishes."""
    return [LooseWish.complete(words, scene) for scene, words in held_out(count)]


def compare(
    engine: Engine, rewriter: Rewriter, wishes: Sequence[LooseWish], how: DiffusionParams
) -> list[PairedResult]:
    """Rewrite all ``wishes``, generate wish i and its rewrite with seed SEED + i, and check both images."""
    options = RewriteOptions(force=True)
    answers = rewriter.answer([RewriteRequest(wish=wish.text, options=options) for wish in wishes])
    rewrites = [answer.rewrites[0] for answer in answers]
    plain, rewritten = (
        [
            shows(picture, wish.requirements)
            for picture, wish in zip(paint(engine, prompts, how, first_seed=SEED), wishes, strict=True)
        ]
        for prompts in ([wish.text for wish in wishes], [rewrite.prompt for rewrite in rewrites])
    )
    return [PairedResult(*parts) for parts in zip(wishes, rewrites, plain, rewritten, strict=True)]


def summarise(
    wishes: Sequence[PairedResult], captions: Sequence[PairedResult], *, max_entropy: float, head: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything as one JSON document, with ``head``, the names of models and settings, first."""
    groups = in_groups([result.wish for result in wishes])
    return {
        **head,
        "max_entropy": max_entropy,
        "wishes": {name: asdict(gain([wishes[at] for at in rows], max_entropy)) for name, rows in groups.items()},
        "captions": asdict(gain(captions, max_entropy)),
        "fallbacks": dict(Counter(result.rewrite.fallback for result in wishes if result.rewrite.fallback)),
        "thresholds": [
            {
                "max_entropy": max_entropy,
                "wishes_taken": sum(result.is_taken(max_entropy) for result in wishes),
                "wishes_exact": sum(result.is_exact(max_entropy) for result in wishes),
                "captions_taken": sum(result.is_taken(max_entropy) for result in captions),
                "captions_exact": sum(result.is_exact(max_entropy) for result in captions),
            }
            for max_entropy in THRESHOLDS
        ],
        "trials": {"wishes": [_row(result) for result in wishes], "captions": [_row(result) for result in captions]},
    }


def _row(result: PairedResult) -> dict[str, Any]:
    return {
        "wish": result.wish.text,
        "answer": result.rewrite.answer,
        "fallback": result.rewrite.fallback,
        "mean_entropy": round(result.rewrite.mean_entropy, 3),
        "plain": result.plain,
        "rewritten": result.rewritten,
    }


def evaluate(
    engine: Engine, rewriter: Rewriter, how: DiffusionParams, *, num_wishes: int = 200, num_captions: int = 200
) -> dict[str, Any]:
    """Compare held-out wishes, and held-out captions, with and without rewriting."""
    info = rewriter.texts.info
    return summarise(
        compare(engine, rewriter, held_out_wishes(num_wishes), how),
        compare(engine, rewriter, held_out_captions(num_captions), how),
        max_entropy=rewriter.style.answer.max_entropy,
        head={
            **painter(engine),
            "dtype": engine.info.dtype,
            "rewriter_digest": info.digest,
            "rewriter_dtype": info.dtype,
            "num_steps": how.num_steps,
            "guidance_scale": how.guidance_scale,
        },
    )


MOST_RISE = 0.05
"""Largest relative rise of perplexity over the reference (see ``benchmarks/LOG.md``)."""


def evaluate_precisions(precisions: Sequence[str], count: int, model: str = "embedded") -> dict[str, Any]:
    """Measure the perplexity of the captions of ``count`` held-out wishes in each precision.

    The first precision is the reference; ``passes`` tells whether a precision stays within ``MOST_RISE``.

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
