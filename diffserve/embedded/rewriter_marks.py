"""Mark the rewriter by pictures: held-out wishes painted as they are and rewritten, and what rewriting costs captions.

``python -m diffserve.embedded.rewriter_marks`` prints the marks as one JSON document. Both pictures of a wish have one
seed, so that they differ by the prompt alone. A picture is right when it shows all that the wish settles, with any
choice for what it leaves open (:func:`~diffserve.embedded.wishes.shows`). Every answer is taken at first; which of
them the style's entropy threshold, or another, would have turned down is reckoned afterwards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from diffserve.embedded.marks import BEST_GUIDANCE
from diffserve.embedded.samples import held_out
from diffserve.embedded.wishes import LooseWish, held_out_wishes, shows, wishes_by_hand
from diffserve.engine import Engine
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.rewrite_types import Rewrite, RewriteRequest
from diffserve.rewriting import TextWindow, find_rewriter
from diffserve.types import DiffusionParams, GenerationRequest, RewriteOptions
from diffserve.world.canonical import parse

SEED = 9_800
STYLE = "embedded"
LEVEL = 0.95
NUM_RESAMPLES = 4000
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class Trial:
    """One wish, what became of it whatever the entropy, and whether each of the two pictures is right."""

    wish: LooseWish
    rewrite: Rewrite
    plain: bool
    rewritten: bool

    def is_taken(self, max_entropy: float) -> bool:
        """Whether the rewrite is painted under this threshold."""
        return self.rewrite.fallback is None and self.rewrite.mean_entropy <= max_entropy

    def exact(self, max_entropy: float) -> bool:
        """Whether the picture that is painted under this threshold is right."""
        return self.rewritten if self.is_taken(max_entropy) else self.plain

    def is_granted(self, max_entropy: float) -> bool:
        """Whether the prompt that is painted says all that the wish settles, in a sentence of the language."""
        said = parse(self.rewrite.prompt if self.is_taken(max_entropy) else self.wish.text)
        return said is not None and self.wish.asked.allows(said)


@dataclass(frozen=True)
class Gain:
    """Exact matches of ``count`` wishes ``plain`` and ``rewritten``; the gain in points, and its 95 % interval.

    taken    rewrites that were painted; the others fell back to the wish
    granted  prompts that say all that was asked, in the embedded model's language
    """

    count: int
    plain: int
    rewritten: int
    gain: float
    low: float
    high: float
    taken: int
    granted: int


def gain(trials: Sequence[Trial], max_entropy: float) -> Gain:
    """What rewriting brings under this threshold; the interval by resampling pairs."""
    plain = [trial.plain for trial in trials]
    rewritten = [trial.exact(max_entropy) for trial in trials]
    points = [100.0 * (after - before) for before, after in zip(plain, rewritten, strict=True)]
    low, high = mean_interval(points)
    return Gain(
        count=len(trials),
        plain=sum(plain),
        rewritten=sum(rewritten),
        gain=round(float(np.mean(points)), 2) if points else 0.0,
        low=round(low, 2),
        high=round(high, 2),
        taken=sum(trial.is_taken(max_entropy) for trial in trials),
        granted=sum(trial.is_granted(max_entropy) for trial in trials),
    )


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean by the percentile bootstrap (Efron 1979); zeros without values."""
    if not values:
        return 0.0, 0.0
    rng, numbers = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    times = rng.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), size=NUM_RESAMPLES)
    low, high = np.quantile(times @ numbers / len(numbers), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def held_out_captions(count: int) -> list[LooseWish]:
    """Held-out captions in the image model's own words, as wishes that leave nothing open."""
    return [LooseWish.complete(words, scene) for scene, words in held_out(count)]


def run_trials(engine: Engine, rewriter: Rewriter, wishes: Sequence[LooseWish], how: DiffusionParams) -> list[Trial]:
    """Rewrite all ``wishes``, paint wish i and its rewrite with seed SEED + i, and look at both."""
    options = RewriteOptions(force=True)
    answers = rewriter.answer([RewriteRequest(wish=wish.text, options=options) for wish in wishes])
    rewrites = [answer.rewrites[0] for answer in answers]
    plain = _are_right(engine, wishes, [wish.text for wish in wishes], how)
    rewritten = _are_right(engine, wishes, [one.prompt for one in rewrites], how)
    return [Trial(*parts) for parts in zip(wishes, rewrites, plain, rewritten, strict=True)]


def _are_right(engine: Engine, wishes: Sequence[LooseWish], prompts: Sequence[str], how: DiffusionParams) -> list[bool]:
    requests = [
        GenerationRequest(prompt=prompt, seed=SEED + index, diffusion=how) for index, prompt in enumerate(prompts)
    ]
    results = engine.generate(requests)
    return [shows(result.pixels, wish.asked) for result, wish in zip(results, wishes, strict=True)]


def groups_of(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The trials of wishes: all, those that leave nothing open, the others, and those that no generator made."""
    by_hand = {wish.text for wish in wishes_by_hand()}
    belongs: Mapping[str, Callable[[LooseWish], bool]] = {
        "all": lambda wish: True,
        "complete": lambda wish: wish.asked.complete,
        "vague": lambda wish: not wish.asked.complete,
        "by hand": lambda wish: wish.text in by_hand,
    }
    return {name: [trial for trial in trials if test(trial.wish)] for name, test in belongs.items()}


def document(
    wishes: Sequence[Trial], captions: Sequence[Trial], *, max_entropy: float, names: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything as one JSON document, with ``names`` of models and settings at its head."""
    return {
        **names,
        "max_entropy": max_entropy,
        "wishes": {name: asdict(gain(part, max_entropy)) for name, part in groups_of(wishes).items()},
        "captions": asdict(gain(captions, max_entropy)),
        "fallbacks": dict(Counter(trial.rewrite.fallback for trial in wishes if trial.rewrite.fallback)),
        "thresholds": [
            {
                "max_entropy": most,
                "wishes_taken": sum(trial.is_taken(most) for trial in wishes),
                "wishes_exact": sum(trial.exact(most) for trial in wishes),
                "captions_taken": sum(trial.is_taken(most) for trial in captions),
                "captions_exact": sum(trial.exact(most) for trial in captions),
            }
            for most in THRESHOLDS
        ],
        "trials": {"wishes": [_row(trial) for trial in wishes], "captions": [_row(trial) for trial in captions]},
    }


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "wish": trial.wish.text,
        "answer": trial.rewrite.answer,
        "fallback": trial.rewrite.fallback,
        "mean_entropy": round(trial.rewrite.mean_entropy, 3),
        "plain": trial.plain,
        "rewritten": trial.rewritten,
    }


def main(
    model: Annotated[str, typer.Option(help="The image model: embedded, embedded-turbo, or a directory.")] = "embedded",
    rewriter: Annotated[str, typer.Option(help="The language model: embedded, or a directory.")] = "embedded",
    count: Annotated[int, typer.Option(help="Held-out wishes.")] = 200,
    captions: Annotated[int, typer.Option(help="Held-out captions.")] = 200,
    steps: int = 30,
    guidance: Annotated[float, typer.Option(help="Guidance scale; 1 is none.")] = BEST_GUIDANCE,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Paint held-out wishes and captions with and without rewriting, and print the marks."""
    engine = Engine.from_pretrained(model)
    texts = TextEngine.from_pretrained(find_rewriter(rewriter))
    writer = Rewriter(texts, style=STYLE, window=TextWindow.of(engine.model.text))
    how = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=guidance)
    names = {
        "model": engine.info.model_id,
        "digest": engine.info.digest,
        "dtype": engine.info.dtype,
        "rewriter_digest": texts.info.digest,
        "rewriter_dtype": texts.info.dtype,
        "num_steps": steps,
        "guidance_scale": guidance,
    }
    found = document(
        run_trials(engine, writer, held_out_wishes(count), how),
        run_trials(engine, writer, held_out_captions(captions), how),
        max_entropy=writer.style.answer.max_entropy,
        names=names,
    )
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
