"""Arms of the rewriter benchmark, measured in turns on new wishes, with transformers' own batching as the peer."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.text_types import Speculation, TextDelta, TextFinished, TextRequest
from diffserve.api.types import RewriteOptions
from diffserve.engine.text import TextEngine
from diffserve.rewriting import Style, TextWindow
from diffserve.rewriting.asking import PromptBuilder
from diffserve.rewriting.grammar import caption_constraint
from diffserve.runtime.decoding import TokenConstraint
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.training.wishes import wishes

PEER_PAGE_TOKENS: Final = 32
"""Of 16, 32, 64 and 256 the best for ``generate_batch`` on the embedded rewriter; with 256 it shares no prefix."""

PEER_TOKENS: Final = 16_384
WISHES_SEED: Final = 777_001
"""Wishes like those of the training, which had other seeds; of held-out ones there are too few."""

WARM_UPS: Final = 2
CLIP_TOKENS: Final = 75


@dataclass(frozen=True)
class Measure:
    """Timing of one call: wall seconds, CPU seconds, and the generated tokens."""

    wall_s: float
    cpu_s: float
    tokens: int

    @classmethod
    def since(cls, wall_s: float, cpu_s: float, tokens: int) -> Measure:
        """Create a measure from two earlier clock readings until now."""
        return cls(time.perf_counter() - wall_s, time.process_time() - cpu_s, tokens)


def measured(call: Callable[[], int]) -> Measure:
    """Measure ``call``, which returns its number of tokens."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = call()
    return Measure.since(wall_s, cpu_s, tokens)


def in_turns(arms: Mapping[str, Callable[[], Measure]], rounds: int) -> dict[str, list[Measure]]:
    """Run every arm once in each round in alternating order, after ``WARM_UPS`` uncounted rounds."""
    measures: dict[str, list[Measure]] = {name: [] for name in arms}
    for index in range(-WARM_UPS, rounds):
        for name in list(arms)[:: 1 if index % 2 else -1]:
            measure = arms[name]()
            if index >= 0:
                measures[name].append(measure)
    return measures


def compared(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Compute the ratio of two lists of values: of the medians, and the median over pairs."""
    return {
        "of_medians": round(statistics.median(numerators) / statistics.median(denominators), 3),
        "median_of_pairs": round(statistics.median(a / b for a, b in zip(numerators, denominators, strict=True)), 3),
    }


def figures(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(scale * statistics.median(values), 3),
        "min": round(scale * min(values), 3),
        "max": round(scale * max(values), 3),
    }


class Desk:
    """Text engine that is sent new wishes in the rewriter's format.

    system  the shared system text
    """

    def __init__(self, texts: TextEngine, style: Style, system: str) -> None:
        self.texts = texts
        self.style = style
        self.system = system
        model = texts.model
        self._prompt_builder = PromptBuilder(model.tokenizer, texts.info.model_id)
        self._wishes = (wish.text for wish in wishes(WISHES_SEED, held_out=False))
        is_embedded = style.answer.language == "captions"
        self.constraint = caption_constraint(model.tokenizer, model.end_ids) if is_embedded else None

    def prompts(self, count: int, *, with_system: bool) -> list[str]:
        """Return the prompts of ``count`` new wishes."""
        options = RewriteOptions(system=self.system if with_system else None)
        requests = [RewriteRequest(wish=wish, options=options) for wish in islice(self._wishes, count)]
        window = TextWindow(CLIP_TOKENS, len)
        return [self._prompt_builder.prompt(request, self.style, window) for request in requests]

    def request(
        self, prompt: str, speculation: Speculation, *, max_tokens: int | None = None, deltas: bool = False
    ) -> TextRequest:
        """Create a greedy request as the rewriter does."""
        limit = max_tokens or self.style.answer.max_tokens
        return TextRequest(
            prompt=prompt,
            params=self.style.first.params(max_tokens=limit, seed=0),
            add_special_tokens=False,
            speculation=speculation,
            deltas=deltas,
        )

    def together(self, requests: Sequence[TextRequest], constraint: TokenConstraint | None) -> Measure:
        """Run all ``requests`` at once."""
        return measured(lambda: num_tokens(self.texts.generate(requests, constraint=constraint)))

    def first_tokens(self, users: int, *, is_warm: bool) -> Measure:
        """Run concurrent wishes behind the shared system text: the median time to the first token, and all work for it.

        Cold: each has a unique salt, so it finds no cached prefix and shares none.
        """
        requests = [self.request(prompt, "off", max_tokens=1) for prompt in self.prompts(users, with_system=True)]
        if not is_warm:
            requests = [msgspec.structs.replace(request, cache_salt=os.urandom(8)) for request in requests]
        cpu_s = time.process_time()
        answers = self.texts.generate(requests, constraint=self.constraint)
        cpu_s = time.process_time() - cpu_s
        return Measure(statistics.median(answer.timings.ttft_s for answer in answers), cpu_s, num_tokens(answers))

    def decoding(self, prompt: str, speculation: Speculation) -> Measure:
        """Measure one wish alone from its first token to its last."""
        events = self.texts.stream(self.request(prompt, speculation, deltas=True), constraint=self.constraint)
        wall_s = cpu_s = 0.0
        num_tokens_out = -1
        for event in events:
            if isinstance(event, TextDelta):
                if num_tokens_out < 0:
                    wall_s, cpu_s, num_tokens_out = time.perf_counter(), time.process_time(), 0
                else:
                    num_tokens_out += len(event.token_ids)
        return Measure.since(wall_s, cpu_s, num_tokens_out)


class Peer:
    """transformers' ``generate_batch`` on the same weights, kept alive between calls."""

    def __init__(self, directory: Path, texts: TextEngine, max_tokens: int) -> None:
        model = texts.model
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        with hushed("transformers"):
            self._network = import_quietly("transformers", "AutoModelForCausalLM").from_pretrained(
                str(directory), dtype=model.dtype, attn_implementation="sdpa", local_files_only=True
            )
        self._network.eval().to(model.device)
        self._tokenizer = model.tokenizer
        self._generation = import_quietly("transformers", "GenerationConfig")(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(model.end_ids),
            pad_token_id=self._tokenizer.pad_token_id or model.end_ids[0],
        )
        cls = import_quietly("transformers.generation.configuration_utils", "ContinuousBatchingConfig")
        self._batching = cls(
            page_size=PEER_PAGE_TOKENS,
            num_blocks=PEER_TOKENS // PEER_PAGE_TOKENS,
            max_batch_tokens=texts.config.max_batch_tokens,
        )

    def generate(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the generated tokens for each prompt, in order."""
        ids = [self._tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        answers = self._network.generate_batch(
            ids,
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            progress_bar=False,
            persistent_manager=True,
        )
        return [[int(token) for token in answer.generated_tokens] for answer in answers.values()]

    def together(self, prompts: Sequence[str]) -> Measure:
        """Run all ``prompts`` at once."""
        return measured(lambda: sum(map(len, self.generate(prompts))))


def num_tokens(answers: Sequence[TextFinished]) -> int:
    """Count the generated tokens."""
    return sum(answer.usage.output_tokens for answer in answers)
