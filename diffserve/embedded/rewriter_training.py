"""Train the embedded prompt rewriter on synthetic wishes, and mark it on held-out ones.

The loss counts the caption alone, not the wish before it. A part of the batches carries a system text, so that one in
front of the wish changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from diffserve.embedded.muon import Muon
from diffserve.embedded.rewriter_model import (
    MAX_NEW_TOKENS,
    answer,
    build_rewriter,
    build_tokenizer,
    prompt,
    system_prompt,
)
from diffserve.embedded.samples import held_out
from diffserve.embedded.training import Run, TrainSettings, adamw
from diffserve.embedded.wishes import LooseWish, held_out_wishes, wishes, wishes_by_hand
from diffserve.world.canonical import parse

SHIPPED = TrainSettings(iterations=4000, batch_size=64, learning_rate=3e-3, ema=0.998)
"""The settings of the shipped weights."""

SYSTEM_SHARE = 0.1
"""Batches whose prompts begin with a system text; they hold a quarter of the wishes."""

POOL_BATCHES = 16
INSTRUCTIONS = (
    "you rewrite wishes",
    "you are a helpful assistant that turns a wish into a caption for an image model. keep what the user asked for.",
    "rewrite the prompt. answer with the caption only",
)

IGNORED = -100


@dataclass(frozen=True)
class Pairs:
    """Token ids (B, T), and labels (B, T) that are IGNORED outside the captions."""

    token_ids: Tensor
    labels: Tensor


class WishBatches:
    """Training batches of wishes of about the same length, so that little of a batch is padding."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: TrainSettings, seed: int) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._rng = random.Random(seed)
        self._wishes = wishes(seed, held_out=False)
        self._pool: list[Pairs] = []
        self._card = system_prompt()

    def next(self) -> Pairs:
        """The next batch, on the training device; it is padded on the right, where causal attention never looks."""
        if not self._pool:
            self._pool = [*self._draw()]
            self._rng.shuffle(self._pool)
        return self._pool.pop()

    def _draw(self) -> Iterator[Pairs]:
        size = self._settings.batch_size
        with_system = round(POOL_BATCHES * SYSTEM_SHARE)
        for _ in range(with_system):
            yield self._pairs([*islice(self._wishes, max(1, size // 4))], self._system())
        drawn = sorted(islice(self._wishes, (POOL_BATCHES - with_system) * size), key=lambda one: len(one.text))
        for start in range(0, len(drawn), size):
            yield self._pairs(drawn[start : start + size], "")

    def _system(self) -> str:
        style = self._rng.random()
        if style < 0.5:
            return self._card
        if style < 0.75:
            shown = self._card.split("; ")
            return "; ".join(self._rng.sample(shown, self._rng.randint(1, len(shown))))
        return self._rng.choice(INSTRUCTIONS)

    def _pairs(self, batch: Sequence[LooseWish], system: str) -> Pairs:
        prompts = self._tokenizer([prompt(one.text, system) for one in batch]).input_ids
        answers = self._tokenizer([answer(one.caption) for one in batch]).input_ids
        length = max(len(before) + len(after) for before, after in zip(prompts, answers, strict=True))
        token_ids = torch.full((len(batch), -(-length // 4) * 4), self._tokenizer.pad_token_id)
        labels = torch.full_like(token_ids, IGNORED)
        for row, (before, after) in enumerate(zip(prompts, answers, strict=True)):
            token_ids[row, : len(before) + len(after)] = torch.tensor(before + after)
            labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
        return Pairs(token_ids.to(self._settings.device), labels.to(self._settings.device))


def caption_loss(model: LlamaForCausalLM, pairs: Pairs) -> Tensor:
    """Mean cross-entropy of the caption's tokens; logits are computed for those alone."""
    hidden = model.model(pairs.token_ids, use_cache=False).last_hidden_state[:, :-1]
    labels = pairs.labels[:, 1:]
    counted = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[counted]).float(), labels[counted])


def optimizers_for(model: LlamaForCausalLM, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings (tied to the head) and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    return [Muon(matrices, lr=settings.learning_rate), adamw(rest, settings)]


def train_rewriter(
    settings: TrainSettings,
    work: Path,
    look: Callable[[LlamaForCausalLM, int], None] | None = None,
    look_every: int = 500,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train, resuming from ``work/rewriter.pt``; ``look`` is called now and then with the averaged weights.

    The tokenizer is made once, on the first call, and kept in ``work/rewriter-tokenizer``.
    """
    tokenizer = _tokenizer(work / "rewriter-tokenizer")
    torch.manual_seed(settings.seed)
    model = build_rewriter(tokenizer).to(settings.device).train()
    model.set_attn_implementation("eager")  # for so few tokens the fused kernel's backward pass on a CPU is slower
    run = Run("rewriter", model, settings, work, optimizers_for(model, settings))
    batches = WishBatches(tokenizer, settings, settings.seed + run.iteration)
    for iteration in run.iterations():
        pairs = batches.next()
        with run.autocast():
            loss = caption_loss(model, pairs)
        run.step(loss)
        if look is not None and (iteration + 1) % look_every == 0:
            look(run.averaged(), iteration + 1)
    return run.averaged(), tokenizer


def _tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    if not (directory / "tokenizer.json").is_file():
        build_tokenizer().save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


@dataclass(frozen=True)
class RewriterMark:
    """Of ``count`` rewritten wishes: how many came out in the canonical style, how many grant all that was asked."""

    count: int
    spoken: int
    granted: int

    @property
    def granted_share(self) -> float:
        """Wishes granted over wishes, 0..1."""
        return self.granted / self.count if self.count else 0.0


@torch.inference_mode()
def rewrite(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, batch_size: int = 50
) -> list[str]:
    """Rewrite wishes greedily by transformers' own ``generate``: the reference for any faster way."""
    rewritten: list[str] = []
    for start in range(0, len(texts), batch_size):
        prompts = [prompt(text) for text in texts[start : start + batch_size]]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
        tokens = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = tokens[:, inputs.input_ids.shape[1] :]
        rewritten += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return rewritten


def mark(asked: Sequence[LooseWish], rewritten: Sequence[str]) -> RewriterMark:
    """Compare rewritten wishes with what was asked: objects, counts, sizes, relation and background, all together."""
    said = [parse(caption) for caption in rewritten]
    granted = [one is not None and wish.asked.allows(one) for wish, one in zip(asked, said, strict=True)]
    return RewriterMark(len(said), sum(one is not None for one in said), sum(granted))


def mark_rewriter(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 200
) -> dict[str, RewriterMark]:
    """Marks on ``count`` held-out wishes (all, complete, vague, by hand) and on ``count`` held-out captions."""
    loose = held_out_wishes(count)
    captions = [LooseWish.complete(words, scene) for scene, words in held_out(count)]
    pairs = list(zip(loose, rewrite(model, tokenizer, [one.text for one in loose]), strict=True))
    by_hand = {one.text for one in wishes_by_hand()}
    groups: dict[str, Callable[[LooseWish], bool]] = {
        "all": lambda wish: True,
        "complete": lambda wish: wish.asked.complete,
        "vague": lambda wish: not wish.asked.complete,
        "by hand": lambda wish: wish.text in by_hand,
    }
    marks = {}
    for name, belongs in groups.items():
        chosen = [(wish, words) for wish, words in pairs if belongs(wish)]
        marks[name] = mark([wish for wish, _ in chosen], [words for _, words in chosen])
    words = rewrite(model, tokenizer, [one.text for one in captions])
    return marks | {"captions": mark(captions, words)}
