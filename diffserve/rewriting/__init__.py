"""What a good rewrite is: from a loose wish to a prompt that the image model understands, by any instruct model.

style, window, grammar  what is asked for: a file of configs/rewriter/, the image model's text window, its words
asking                  a wish in the words of the language model's chat template
cleaning, judging       from an answer to a prompt, or back to the wish with a warning

``engine.rewriter`` has the wishes on their way.
"""

from __future__ import annotations

from diffserve.rewriting.style import Style, find_rewriter, load_style, style_for_family, style_names
from diffserve.rewriting.window import TextWindow

__all__ = ["Style", "TextWindow", "find_rewriter", "load_style", "style_for_family", "style_names"]
