"""Training of the embedded prompt rewriter on synthetic wishes, and its evaluation on held-out wishes.

The loss covers the caption only, not the wish before it. Some batches carry a system text, so that the model also
works behind one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from diffserve.training.rewriter_model import (
    MAX_NEW_TOKENS,
    answer,
    build_rewriter,
    build_tokenizer,
    prompt,
    system_prompt,
)
from diffserve.training.training_loop import Look, Run, TrainSettings, muon_and_adamw
from diffserve.training.wishes import LooseWish, held_out_wishes, in_groups, wishes
from diffserve.world.captions import held_out
from diffserve.world.prompt_reading import parse_sentence

SHIPPED = TrainSettings(iterations=4000, batch_size=64, learning_rate=3e-3, ema=0.998)
"""Training settings of the shipped weights."""

SYSTEM_SHARE = 0.1
"""Share of batches whose prompts begin with a system text; these batches are a quarter as large."""

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


def batches(tokenizer: PreTrainedTokenizerFast, settings: TrainSettings, seed: int) -> Iterator[Pairs]:
    """Yield endless batches of wishes of similar length, to limit padding, on the training device.

    Padding is on the right, where causal attention does not reach.
    """
    rng, source, size = random.Random(seed), wishes(seed, held_out=False), settings.batch_size
    with_system = round(POOL_BATCHES * SYSTEM_SHARE)
    while True:
        drawn = [([*islice(source, max(1, size // 4))], _system(rng)) for _ in range(with_system)]
        without_system = sorted(islice(source, (POOL_BATCHES - with_system) * size), key=lambda wish: len(wish.text))
        drawn += [(without_system[start : start + size], "") for start in range(0, len(without_system), size)]
        rng.shuffle(drawn)
        while drawn:
            yield _pairs(tokenizer, *drawn.pop(), settings.device)


def _system(rng: random.Random) -> str:
    style, text = rng.random(), system_prompt()
    if style < 0.5:
        return text
    if style < 0.75:
        shown = text.split("; ")
        return "; ".join(rng.sample(shown, rng.randint(1, len(shown))))
    return rng.choice(INSTRUCTIONS)


def _pairs(tokenizer: PreTrainedTokenizerFast, batch: Sequence[LooseWish], system: str, device: str) -> Pairs:
    prompts = tokenizer([prompt(wish.text, system) for wish in batch]).input_ids
    answers = tokenizer([answer(wish.caption) for wish in batch]).input_ids
    length = max(len(before) + len(after) for before, after in zip(prompts, answers, strict=True))
    token_ids = torch.full((len(batch), -(-length // 4) * 4), tokenizer.pad_token_id)
    labels = torch.full_like(token_ids, IGNORED)
    for row, (before, after) in enumerate(zip(prompts, answers, strict=True)):
        token_ids[row, : len(before) + len(after)] = torch.tensor(before + after)
        labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
    return Pairs(token_ids.to(device), labels.to(device))


def caption_loss(model: LlamaForCausalLM, pairs: Pairs) -> Tensor:
    """Compute the mean cross-entropy of the captions' tokens; logits are computed for these tokens only."""
    hidden = model.model(pairs.token_ids, use_cache=False).last_hidden_state[:, :-1]
    labels = pairs.labels[:, 1:]
    counted = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[counted]).float(), labels[counted])


def optimizers_for(model: LlamaForCausalLM, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embeddings (tied to the head) and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    return muon_and_adamw(model, matrices, settings)


def train_rewriter(
    settings: TrainSettings,
    work: Path,
    look: Look[LlamaForCausalLM] | None = None,
    look_every: int = 500,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train the rewriter, resuming from ``work/rewriter.pt``.

    The first call trains the tokenizer and saves it in ``work/rewriter-tokenizer``.
    """
    tokenizer = _tokenizer(work / "rewriter-tokenizer")
    torch.manual_seed(settings.seed)
    model = build_rewriter(tokenizer).to(settings.device).train()
    model.set_attn_implementation("eager")  # for so few tokens the fused kernel's backward pass on a CPU is slower
    run = Run("rewriter", model, settings, work, optimizers_for(model, settings))
    source = batches(tokenizer, settings, settings.seed + run.iteration)

    def losses() -> list[Tensor]:
        pairs = next(source)
        with run.autocast():
            return [caption_loss(model, pairs)]

    return run.train(losses, look, look_every), tokenizer


def _tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    if not (directory / "tokenizer.json").is_file():
        build_tokenizer().save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


@dataclass(frozen=True)
class TextScore:
    """Scores of ``count`` rewritten wishes.

    spoken   how many are in the canonical style
    granted  how many state everything that the wish settles
    """

    count: int
    spoken: int
    granted: int


@torch.inference_mode()
def rewrite(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, batch_size: int = 50
) -> list[str]:
    """Rewrite wishes greedily by transformers' own ``generate``, the reference for faster implementations."""
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


def score(wishes: Sequence[LooseWish], rewritten: Sequence[str]) -> TextScore:
    """Compare rewritten wishes with the originals by objects, counts, sizes, relation and background together."""
    spoken = sum(parse_sentence(caption) is not None for caption in rewritten)
    granted = sum(wish.is_granted_by(caption) for wish, caption in zip(wishes, rewritten, strict=True))
    return TextScore(len(rewritten), spoken, granted)


def score_rewriter(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 200
) -> dict[str, TextScore]:
    """Score ``count`` held-out wishes (all, complete, vague, by hand) and ``count`` held-out captions."""
    originals = held_out_wishes(count)
    captions = [LooseWish.complete(words, scene) for scene, words in held_out(count)]
    rewritten, recaptioned = (rewrite(model, tokenizer, [wish.text for wish in part]) for part in (originals, captions))
    scores = {
        name: score([originals[at] for at in rows], [rewritten[at] for at in rows])
        for name, rows in in_groups(originals).items()
    }
    return scores | {"captions": score(captions, recaptioned)}
