"""A real language model whose answers are written down: a Llama of one layer that looks at the last token alone.

Its chat template ends the prompt with a mark that depends on the wish, and its weights say which token follows which:
the embeddings are unit vectors, attention and feed-forward add nothing, and the head holds the logits of each pair.
Every piece of an answer is one token, so an answer can be any text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diffserve.runtime.loading.library_imports import hushed, import_quietly

END, PAD, OTHERWISE = "<end>", "<pad>", "<otherwise>"
CONTEXT_TOKENS: Final = 2048
SURE, UNSURE = 40.0, 0.0

Script = Mapping[str, Sequence[str] | str]
"""A word of the wish -> the answer in pieces, each unlike any other, or as one piece."""


def template(script: Script, *, knows_system: bool = True) -> str:
    """Every turn, then the mark of the first word of ``script`` that stands in the wish."""
    refusal = "{{ raise_exception('System role not supported') }}"
    system = "" if knows_system else f"{{%- if m['role'] == 'system' -%}}{refusal}{{%- endif -%}}"
    turns = f"{{%- for m in messages -%}}{system}{{{{ m['role'] + ': ' + m['content'] + '\\n' }}}}{{%- endfor -%}}"
    marks = "".join(
        f"{{%- {'elif' if at else 'if'} '{word}' in messages[-1]['content'] -%}}{{{{ '{_mark(at)}' }}}}"
        for at, word in enumerate(script)
    )
    return turns + marks + f"{{%- else -%}}{{{{ '{OTHERWISE}' }}}}{{%- endif -%}}"


def save(
    directory: Path, script: Script, *, forks: Mapping[str, float] | None = None, knows_system: bool = True
) -> Path:
    """Write the model. A wish without a word of ``script`` is answered with its end alone.

    forks: of these words the pieces are alternatives, each followed by the end; the first is likelier by so many nats,
        0 being the least sure answer that there is.
    """
    forks = forks or {}
    tokenizer = make_tokenizer(script, knows_system=knows_system)
    ids = tokenizer.get_vocab()
    size = len(tokenizer)
    logits = torch.zeros(size, size)  # (next, last)
    logits[ids[END], ids[OTHERWISE]] = SURE
    for at, (word, answer) in enumerate(script.items()):
        pieces = [ids[_spelled(piece)] for piece in _pieces(answer)]
        if word in forks:
            logits[pieces, ids[_mark(at)]] = SURE
            logits[pieces[0], ids[_mark(at)]] += forks[word]
            logits[ids[END], pieces] = SURE
        for last, following in () if word in forks else pairwise([ids[_mark(at)], *pieces, ids[END]]):
            logits[following, last] = SURE
    with hushed("transformers"):
        _network(logits, ids).save_pretrained(directory, safe_serialization=True)
        tokenizer.save_pretrained(directory)
    return directory


def _network(logits: torch.Tensor, ids: Mapping[str, int]) -> Any:
    size = len(logits)
    width = -(-size // 8) * 8
    config = import_quietly("transformers", "LlamaConfig")(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    network = import_quietly("transformers", "LlamaForCausalLM")(config)
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(torch.eye(size, width))
        network.model.layers[0].self_attn.o_proj.weight.zero_()
        network.model.layers[0].mlp.down_proj.weight.zero_()
        network.lm_head.weight.zero_()
        network.lm_head.weight[:, :size] = logits / width**0.5  # the last norm makes a unit vector so long
    return network.eval()


def make_tokenizer(script: Script, *, knows_system: bool = True) -> Any:
    """Single bytes, pieces of answers, and the marks."""
    pieces = [_spelled(piece) for answer in script.values() for piece in _pieces(answer)]
    assert len(set(pieces)) == len(pieces), "every piece of an answer must be unlike any other"
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces]
    bpe = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(dict.fromkeys(tokens))}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return import_quietly("transformers", "PreTrainedTokenizerFast")(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[OTHERWISE, *map(_mark, range(len(script)))],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
        chat_template=template(script, knows_system=knows_system),
    )


def _pieces(answer: Sequence[str] | str) -> Sequence[str]:
    return (answer,) if isinstance(answer, str) else answer


def _spelled(piece: str) -> str:
    """Return a text as a byte-level tokenizer writes it."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
    return str(spelled)


def _mark(at: int) -> str:
    return f"<say {at}>"
