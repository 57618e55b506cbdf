"""Experiments: what a picture is worth, measured without a download, and what a step buys.

    prompt_match   share of pictures that show exactly what their prompts ask for, in the embedded model's picture world
    intervals      bootstrap intervals
    plan           samplers x steps x guidance on the same prompts and seeds; also how long that takes
    painter        whoever paints such a plan: an engine for ``diffserve sweep``, a server for the page
    experiment     what both have in common: every picture is measured, and its record kept
    charts         measures over steps and over time, drawn as SVG (``svg``) and as PNG (``plots``)
    run            do a plan through the engine, resumably, and write its report
    summary        the table that comes out, as CSV

>>> from diffserve import Engine
>>> from diffserve.experiments import match_prompts
>>> prompts = ["a fox next to a cactus on the beach", "two apples on a blue background", "the moon above a castle"]
>>> results = Engine.from_pretrained("embedded").generate(prompts)
>>> match = match_prompts([result.image for result in results], prompts)
>>> print(match.exact)  # say, 67 % (2 of 3; 95 % interval 0..100 %)
>>> match.parts["relation"].share  # of the two pictures that were asked for a relation
>>> [found.name for found in match.verdicts[0].reading.objects]  # what the first picture shows

A whole comparison, into a folder with a page to read:

>>> from diffserve.experiments import sweep
>>> report = sweep("embedded", folder="report", samplers=["ddim", "dpmpp_2m"], steps=[5, 10, 20], prompts=8, seeds=1)
>>> for finding in report.findings:
...     print(finding.claim, finding.verdict)

Nothing here loads torch before a sweep runs, and the checker compares with drawn sprites, never with a trained network.
"""

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.intervals import Share, bootstrap_interval, share_of
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.prompt_match import PromptMatch, match_prompts
from diffserve.experiments.prompts import held_out_prompts
from diffserve.experiments.report import SweepReport
from diffserve.experiments.run import SweepProgress, run_plan, sweep
from diffserve.experiments.summary import CellSummary, write_csv
from diffserve.world.checker import Found, Reading, SceneSpec, Verdict, judge, read_picture
from diffserve.world.prompt_reading import parse_prompt

__all__ = [
    "Cell",
    "CellSummary",
    "Estimate",
    "Found",
    "Measure",
    "PromptMatch",
    "Reading",
    "SceneSpec",
    "Share",
    "SweepPlan",
    "SweepProgress",
    "SweepReport",
    "Verdict",
    "bootstrap_interval",
    "held_out_prompts",
    "judge",
    "match_prompts",
    "parse_prompt",
    "read_picture",
    "run_plan",
    "share_of",
    "sweep",
    "write_csv",
]
