"""Experiments: what a picture is worth, measured without a download.

    prompt_match   share of pictures that show exactly what their prompts ask for, in the embedded model's picture world
    wish           from a prompt of that world to what it asks for
    intervals      bootstrap intervals

>>> from diffserve import Engine
>>> from diffserve.experiments import match_prompts
>>> prompts = ["a fox next to a cactus on the beach", "two apples on a blue background", "the moon above a castle"]
>>> results = Engine.from_pretrained("embedded").generate(prompts)
>>> match = match_prompts([result.image for result in results], prompts)
>>> print(match.exact)  # say, 67 % (2 of 3; 95 % interval 0..100 %)
>>> match.parts["relation"].share  # of the two pictures that were asked for a relation
>>> [found.name for found in match.verdicts[0].reading.objects]  # what the first picture shows

Nothing here loads torch, and the checker compares with drawn sprites, never with a trained network.
"""

from diffserve.embedded.checker import Found, Reading, Verdict, Wish, judge, read_picture
from diffserve.experiments.intervals import Share, bootstrap_interval, share_of
from diffserve.experiments.prompt_match import PromptMatch, match_prompts
from diffserve.experiments.wish import parse_prompt

__all__ = [
    "Found",
    "PromptMatch",
    "Reading",
    "Share",
    "Verdict",
    "Wish",
    "bootstrap_interval",
    "judge",
    "match_prompts",
    "parse_prompt",
    "read_picture",
    "share_of",
]
