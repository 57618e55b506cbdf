"""Token choice from logits and text from tokens, for a batch in which every row has its own parameters."""

from __future__ import annotations

from diffserve.runtime.decoding.beam_search import BeamSearch, Fork, Hypothesis
from diffserve.runtime.decoding.constraint import AnyConstraint, Phrase, TokenConstraint, allowed_sentences
from diffserve.runtime.decoding.json_constraint import JsonConstraints, JsonSpelling
from diffserve.runtime.decoding.prompt_lookup import PromptLookup
from diffserve.runtime.decoding.sampling import Choice, Chosen, accept, choose, choose_soon, draft_next
from diffserve.runtime.decoding.sampling_state import FinishReason, SamplingState
from diffserve.runtime.decoding.text_stream import TextStream

__all__ = [
    "AnyConstraint",
    "BeamSearch",
    "Choice",
    "Chosen",
    "FinishReason",
    "Fork",
    "Hypothesis",
    "JsonConstraints",
    "JsonSpelling",
    "Phrase",
    "PromptLookup",
    "SamplingState",
    "TextStream",
    "TokenConstraint",
    "accept",
    "allowed_sentences",
    "choose",
    "choose_soon",
    "draft_next",
]
