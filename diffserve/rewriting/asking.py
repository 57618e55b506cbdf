"""PromptBuilder: from a wish to what the language model is asked, in the words of its own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from diffserve.api.errors import ConfigError
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.api.types import MAX_SEED
from diffserve.rewriting.style import Style
from diffserve.rewriting.window import TextWindow
from diffserve.runtime.language.chat import fold_system

Turn = dict[str, str]


class Question(NamedTuple):
    """One request to the language model: its texts are the prompts of the wish from ``first_index`` on."""

    first_index: int
    request: TextRequest


class PromptBuilder:
    """Builds what the model is asked whose ``tokenizer`` it is; it is called ``model_id`` in errors.

    Nothing that a person writes becomes one of the model's own marks: those are taken out of wishes and system texts.
    Models that think aloud are asked not to. Where a template knows no system text, it stands before the first wish.

    Raises ConfigError when there is no chat template, or one that fails.
    """

    def __init__(self, tokenizer: Any, model_id: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the language model {model_id!r} has no chat template: give one that was trained on instructions.",
                param="model",
            )
        self._tokenizer = tokenizer
        marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        longest_first = sorted(filter(str.strip, marks), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._knows_system = self._can_render([_turn("system", "a system text"), _turn("user", "a wish")])
        if not self._knows_system and not self._can_render([_turn("user", "a wish")]):
            raise ConfigError(f"the chat template of {model_id!r} fails on a single message.", param="model")

    def questions(self, request: RewriteRequest, style: Style, window: TextWindow) -> Iterator[Question]:
        """The likeliest prompt is one request; those drawn at random are another, whose text i has seed + i."""
        prompt = self.prompt(request, style, window)
        seed = request.options.seed or 0
        limit = style.answer.max_tokens
        yield Question(0, _text_request(request, prompt, style.first.params(max_tokens=limit, seed=seed), 1))
        if request.num_prompts > 1:
            params = style.further.params(max_tokens=limit, seed=(seed + 1) % MAX_SEED)
            yield Question(1, _text_request(request, prompt, params, request.num_prompts - 1))

    def prompt(self, request: RewriteRequest, style: Style, window: TextWindow) -> str:
        """The text that the model continues."""
        own = request.options.system
        system = style.prompt.system_for(window.num_tokens) if own is None else self._unmarked(own).strip()
        turns = [
            turn
            for example in style.prompt.examples
            for turn in (_turn("user", example.wish), _turn("assistant", example.prompt))
        ]
        turns.append(_turn("user", self._unmarked(request.wish)))
        if system:
            turns.insert(0, _turn("system", system))
        return self._render(turns if self._knows_system else fold_system(turns) or turns)

    def _unmarked(self, text: str) -> str:
        return self._marks.sub(" ", text)

    def _can_render(self, turns: list[Turn]) -> bool:
        try:
            return all(turn["content"] in self._render(turns) for turn in turns)
        except Exception:  # templates are programs of their own, which raise what they like
            return False

    def _render(self, turns: list[Turn]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return text


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _text_request(request: RewriteRequest, prompt: str, params: SamplingParams, num_texts: int) -> TextRequest:
    return TextRequest(
        prompt=prompt,
        params=params,
        num_texts=num_texts,
        add_special_tokens=False,
        deltas=request.deltas,
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        priority=request.priority,
        client=request.client,
        share=request.share,
    )
