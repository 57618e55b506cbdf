"""The embedded rewriter as a plain transformers directory: a small Llama, its byte-level tokenizer, a chat template.

A prompt is ``<wish> the wish in lower case<caption>`` and the answer ``a caption<end>``, optionally after
``<system> text``. Wishes are lowercased and stripped of "<" in Python and in the chat template, so that capitals need
no tokens and a wish cannot contain a special token. The tokenizer itself keeps every byte of any text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffserve.training.wishes import wishes
from diffserve.world.captions import Content, sentence
from diffserve.world.scenes import BACKGROUNDS, OBJECTS

SYSTEM, WISH, CAPTION, END, PAD = SPECIAL_TOKENS = ("<system>", "<wish>", "<caption>", "<end>", "<pad>")
VOCABULARY_SIZE = 2560
CONTEXT_TOKENS = 1024  # limit of the positions; training uses about 300
MAX_NEW_TOKENS = 32
MIN_FREQUENCY = 8

CHAT_TEMPLATE = """\
{%- set turn = namespace(system='', wish='') -%}
{%- for message in messages -%}
{%- set text = message['content'].lower().replace('<', ' ').split() | join(' ') -%}
{%- if message['role'] == 'user' -%}{%- set turn.wish = text -%}
{%- elif message['role'] in ('system', 'developer') -%}{%- set turn.system = text -%}
{%- endif -%}
{%- endfor -%}
{%- if turn.system -%}{{ '<system> ' + turn.system }}{%- endif -%}
{{ '<wish> ' + turn.wish }}
{%- if add_generation_prompt -%}{{ '<caption>' }}{%- endif -%}
"""
"""Renders the last system text and the last wish; earlier turns are ignored."""


def _plain(text: str) -> str:
    return " ".join(text.lower().replace("<", " ").split())


def prompt(wish: str, system: str = "") -> str:
    """Format a wish as the model's prompt, equal to the output of the chat template."""
    before = f"{SYSTEM} {_plain(system)}" if _plain(system) else ""
    return f"{before}{WISH} {_plain(wish)}{CAPTION}"


def answer(caption: str) -> str:
    """Format a caption as the text that the model is trained to generate after a prompt."""
    return f"{caption}{END}"


def system_prompt() -> str:
    """Build an optional system text with one caption for every background and every relation among them.

    It adds no information; shared by many requests, it is a prefix to cache and a source to look up from.
    """
    relations = cycle(("left of", "right of", "above", "below", "next to", "between", None))
    names = iter(OBJECTS)
    shown = []
    for background in BACKGROUNDS:
        relation = next(relations)
        count = {None: 1, "between": 3}.get(relation, 2)
        shown.append(sentence(Content(tuple(islice(names, count)), relation, "plain", background)))
    return f"say what to paint as one caption, such as {'; '.join(shown)}"


def build_tokenizer(*, seed: int = 0, num_wishes: int = 30_000) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer on wishes and captions."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=MIN_FREQUENCY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(seed, num_wishes), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, WISH, CAPTION],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def _corpus(seed: int, num_wishes: int) -> Iterable[str]:
    for wish in islice(wishes(seed, held_out=False), num_wishes):
        yield f" {_plain(wish.text)}"
        yield wish.caption


def build_rewriter(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama of 3.5 M parameters: five layers of width 256, eight heads on two KV heads, tied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def export_rewriter(directory: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write model (fp16 safetensors), tokenizer, chat template and generation settings for transformers to load."""
    half: Any = copy.deepcopy(model).cpu().half().eval()
    half.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)
    _use_old_names(directory / "tokenizer_config.json")
    return directory


def _use_old_names(path: Path) -> None:
    """Rewrite the tokenizer's config with the keys that versions 4 and 5 of transformers both accept."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [SYSTEM, WISH, CAPTION])
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
