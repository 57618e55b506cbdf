"""Text generation by continuous batching over pages. One tick = plan, run, apply (``core``).

>>> engine = TextEngine.from_pretrained("directory")                                       # doctest: +SKIP
>>> engine.generate("Once upon a time")[0].text                                            # doctest: +SKIP
>>> for event in engine.stream(TextRequest(prompt="...", params=SamplingParams(seed=1))):  # doctest: +SKIP
...     print(event)

task, plan, cost                                records, no torch
admission, waiting, crowd, drafting, pages, scheduler   policy
batch, runners, progress                        tensors in, tokens and events out
core, mailroom, engine                          the loop, its counter, its face
"""

from __future__ import annotations

from diffserve.engine.text.core import TextCore
from diffserve.engine.text.engine import TextEngine
from diffserve.engine.text.plan import TextTick, TickBudget

__all__ = ["TextCore", "TextEngine", "TextTick", "TickBudget"]
