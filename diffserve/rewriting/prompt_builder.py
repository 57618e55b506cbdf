"""Builds language model requests for a user's prompt with the model's chat template."""

from __future__ import annotations

import re
from typing import Any

from diffserve.api.errors import ConfigError
from diffserve.api.fields import MAX_SEED
from diffserve.api.rewrite_types import RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.rewriting.judging import TextWindow
from diffserve.rewriting.style import Style
from diffserve.runtime.language.model import fold_system

Turn = dict[str, str]


class PromptBuilder:
    """Builds chat prompts and requests for a language model.

    Special tokens are removed from user text, and thinking is disabled. If the chat template has no system role, the
    system text is put in front of the first user message.

    Args:
        tokenizer: Tokenizer of the language model.
        model_id: Name of the model in error messages.

    Raises:
        ConfigError: The tokenizer has no chat template, or the template fails.
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

    def text_requests(self, request: RewriteRequest, style: Style, window: TextWindow) -> list[TextRequest]:
        """Return a request for the first prompt and, if more are wanted, a request that samples the others.

        The first prompt uses ``style.first``; the others use ``style.further``, and prompt i has the seed ``seed + i``.
        """
        prompt = self.prompt(request, style, window)
        seed = request.options.seed or 0
        limit = style.answer.max_tokens
        requests = [_text_request(request, prompt, style.first.params(max_tokens=limit, seed=seed), 1)]
        if request.num_prompts > 1:
            params = style.further.params(max_tokens=limit, seed=(seed + 1) % MAX_SEED)
            requests.append(_text_request(request, prompt, params, request.num_prompts - 1))
        return requests

    def prompt(self, request: RewriteRequest, style: Style, window: TextWindow) -> str:
        """Render the chat prompt that the model continues."""
        custom_system = request.options.system
        system = (
            style.prompt.system_for(window.num_tokens)
            if custom_system is None
            else self._strip_special_tokens(custom_system).strip()
        )
        turns = [
            turn
            for example in style.prompt.examples
            for turn in (_turn("user", example.wish), _turn("assistant", example.prompt))
        ]
        turns.append(_turn("user", self._strip_special_tokens(request.wish)))
        if system:
            turns.insert(0, _turn("system", system))
        return self._render(turns if self._knows_system else fold_system(turns) or turns)

    def _strip_special_tokens(self, text: str) -> str:
        return self._marks.sub(" ", text)

    def _can_render(self, turns: list[Turn]) -> bool:
        try:
            return all(turn["content"] in self._render(turns) for turn in turns)
        except Exception:  # templates are programs and can raise any exception
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
