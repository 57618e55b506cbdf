"""Text generation by continuous batching over pages. One tick = plan, run, apply (``engine``).

>>> engine = TextEngine.from_pretrained("directory")                                       # doctest: +SKIP
>>> engine.generate("Once upon a time")[0].text                                            # doctest: +SKIP
>>> for event in engine.stream(TextRequest(prompt="...", params=SamplingParams(seed=1))):  # doctest: +SKIP
...     print(event)

task                                  records, no torch
admission, pages, scheduler           policy
runner, outputs                       tensors in, tokens and events out
engine                                public interface
"""

from __future__ import annotations

from diffserve.engine.records import TickBudget
from diffserve.engine.text.engine import TextEngine
from diffserve.engine.text.task import TextTick

__all__ = ["TextEngine", "TextTick", "TickBudget"]
