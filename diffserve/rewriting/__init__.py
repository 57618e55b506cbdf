"""Prompt rewriting: converts a user's loose prompt into one that suits the image model, with any instruct model.

    style, window, grammar  style files in configs/rewriter/, the image model's text window, constrained decoding
    asking                  builds language model requests with the model's chat template
    cleaning, judging       extract the prompt from an answer, or fall back to the user's prompt with a warning

``engine.rewriter`` runs the requests.
"""

from __future__ import annotations

from diffserve.rewriting.style import Style, find_rewriter, load_style, style_for_family, style_names
from diffserve.rewriting.window import TextWindow

__all__ = ["Style", "TextWindow", "find_rewriter", "load_style", "style_for_family", "style_names"]
