"""Prompt rewriting: from a loose wish to a prompt that the image model understands, by any instruct model.

>>> rewriter = Rewriter(texts, style="prose", window=TextWindow.of(model.text))               # doctest: +SKIP
>>> rewriter.rewrite("something cosy with a fox")[0].prompt                                   # doctest: +SKIP

style, window, language    what is asked for: a file of configs/rewriter/, the image model's text window, its words
asking                     a wish in the words of the language model's chat template
cleaning, keeping, fitting, judging   from an answer to a prompt, or back to the wish with a warning
job, rewriter              wishes on their way, and the face
shipped                    where the language model lies
"""

from __future__ import annotations

from diffserve.engine.rewriting.rewriter import Rewriter
from diffserve.engine.rewriting.shipped import find_rewriter
from diffserve.engine.rewriting.style import Style, load_style, style_for_family, style_names
from diffserve.engine.rewriting.window import TextWindow

__all__ = ["Rewriter", "Style", "TextWindow", "find_rewriter", "load_style", "style_for_family", "style_names"]
