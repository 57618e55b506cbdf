"""Prompt rewriting: converts a user's loose prompt into one that suits the image model, with any instruct model.

    style, grammar          style files in configs/rewriter/, constrained decoding
    prompt_builder          builds language model requests with the model's chat template
    cleaning, judging       extract the prompt from an answer and fit it to the window, or fall back with a warning

``engine.rewriter`` runs the requests.
"""

from __future__ import annotations

from diffserve.rewriting.judging import TextWindow
from diffserve.rewriting.style import Style, find_rewriter, load_style, style_for_family, style_names

__all__ = ["Style", "TextWindow", "find_rewriter", "load_style", "style_for_family", "style_names"]
