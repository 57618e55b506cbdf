"""Any transformers causal language model, over pages of the pool.

>>> model = load_language_model("directory")                                          # doctest: +SKIP
>>> pool = PagePool.for_specs(1 << 30, [model.spec("llm")], device=model.device)      # doctest: +SKIP
>>> runner = LanguageRunner(model, pool, tenant="llm")                                # doctest: +SKIP
>>> table, num_cached = pool.open("llm", token_ids, reserve=len(token_ids))           # doctest: +SKIP
>>> logits = runner.forward([TokenChunk(table, num_cached, token_ids[num_cached:])])       # doctest: +SKIP

row_groups      which rows attend together, and long contexts read in chunks that attend side by side
attention       the function that transformers calls in every layer
loading         a directory to a model, and what is refused
model           a loaded model, and one forward of a mixed batch
weight_only     int8 and int4
"""

from __future__ import annotations

from diffserve.runtime.language.loading import load_language_model
from diffserve.runtime.language.model import LanguageModel, LanguageRunner, LayerShape, TokenChunk

__all__ = ["LanguageModel", "LanguageRunner", "LayerShape", "TokenChunk", "load_language_model"]
