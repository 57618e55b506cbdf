"""Experiments that compare samplers, step counts and guidance by image quality and time.

    prompts     held-out captions, and the share of images that show exactly what their prompts describe
    intervals   bootstrap intervals
    plan        samplers x steps x guidance on the same prompts and seeds, with costs; ``plan_reading`` reads it
    generation  core loop that generates, measures and records images, with an engine or a server
    run         runs a plan with an engine, resumably, and writes its report
    served      runs a plan with the engines of a server
    export      writes the images of a sweep in the folder layouts of benchmarks
    gate        runs a plan in several precisions, and compares them
    charts      measures over steps, network evaluations and time, rendered as PNG and SVG by ``plots``
    summary     result table, also as CSV

>>> from diffserve import Engine
>>> from diffserve.experiments import match_prompts
>>> prompts = ["a fox next to a cactus on the beach", "two apples on a blue background", "the moon above a castle"]
>>> results = Engine.from_pretrained("embedded").generate(prompts)
>>> match = match_prompts([result.image for result in results], prompts)
>>> print(match.exact)  # say, 67 % (2 of 3; 95 % interval 0..100 %)


>>> from diffserve.experiments import sweep
>>> report = sweep("embedded", folder="report", samplers=["ddim", "dpmpp_2m"], steps=[5, 10, 20], prompts=8, seeds=1)
>>> for finding in report.findings:
...     print(finding.claim, finding.verdict)

Torch is not imported before a sweep runs. The checker compares with rendered sprites and needs no trained network.
"""

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.export import Export
from diffserve.experiments.intervals import Share, bootstrap_interval, share_of
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.prompts import PromptMatch, held_out_prompts, match_prompts, read_benchmark_prompts
from diffserve.experiments.report import SweepReport
from diffserve.experiments.run import SweepProgress, run_plan, sweep
from diffserve.experiments.summary import CellSummary, write_csv
from diffserve.world.checker import Found, Reading, SceneSpec, Verdict, judge, read_picture
from diffserve.world.prompt_reading import parse_prompt

__all__ = [
    "Cell",
    "CellSummary",
    "Estimate",
    "Export",
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
    "read_benchmark_prompts",
    "read_picture",
    "run_plan",
    "share_of",
    "sweep",
    "write_csv",
]
