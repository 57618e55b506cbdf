"""Plans: paired cells in a good order, an honest bill, and one sentence for every mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import plan
from diffserve.experiments.axes import numbers, read_axis, read_values, split_axis, whole_numbers
from diffserve.experiments.engine_generator import request_for
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, SweepPlan
from diffserve.experiments.plan_reading import read_plan
from diffserve.experiments.verdicts import is_comparable
from diffserve.models.templates import Wildcards
from tests.engine.simulated_scheduler import INFO

PROMPTS = ("a fox", "two apples", "a cat above a dog")


def plan_of(**changes: Any) -> SweepPlan:
    values: dict[str, Any] = {
        "samplers": ("ddpm", "ddim"),
        "steps": (20, 5),
        "guidance": (3.0,),
        "prompts": PROMPTS,
        "num_seeds": 2,
    }
    return SweepPlan(**(values | changes))


def test_cells_are_every_combination_once_with_canonical_names_and_few_steps_first() -> None:
    plan = plan_of(samplers=("DDIM", "ddim", "DPM++ 2M Karras"), steps=(20, 5, 20), guidance=(3, 1))
    assert plan.cells == (
        Cell("ddim", 5, 3.0),
        Cell("dpmpp_2m karras", 5, 3.0),
        Cell("ddim", 5, 1.0),
        Cell("dpmpp_2m karras", 5, 1.0),
        Cell("ddim", 20, 3.0),
        Cell("dpmpp_2m karras", 20, 3.0),
        Cell("ddim", 20, 1.0),
        Cell("dpmpp_2m karras", 20, 1.0),
    )
    assert [cell.guidance_scale for cell in plan.references] == [3.0, 1.0]


def test_every_cell_paints_the_same_prompts_and_seeds_and_no_two_prompts_share_a_seed() -> None:
    plan = plan_of(first_seed=100)
    images = list(plan.images())
    places = {cell: [image.place for image in images if image.cell == cell] for cell in plan.all_cells}
    assert set(map(tuple, places.values())) == {plan.places}
    assert [plan.seed_of(place) for place in plan.places] == [100, 101, 102, 103, 104, 105]


def test_references_come_first_and_cells_of_one_step_count_take_turns() -> None:
    plan = plan_of()
    cells = [image.cell for image in plan.images()]
    assert all(cell.is_reference for cell in cells[:6])
    assert cells[6:10] == [Cell("ddpm", 5, 3.0), Cell("ddim", 5, 3.0)] * 2
    assert {cell.num_steps for cell in cells[6:18]} == {5}
    assert {cell.num_steps for cell in cells[18:]} == {20}


def test_a_cell_that_paints_like_the_reference_is_not_the_reference() -> None:
    plan = plan_of(samplers=("ddim",), steps=(200,))
    assert plan.cells[0] != plan.references[0]
    assert plan.cells[0].slug != plan.references[0].slug
    assert plan.reference_of(plan.cells[0]) == plan.references[0]


def test_the_bill_counts_rows_of_pictures_references_and_timed_images() -> None:
    plan = plan_of(samplers=("ddim", "heun"), steps=(10,), guidance=(3.0, 1.0), reference_steps=50)
    assert [cell.rows for cell in plan.cells] == [20, 40, 10, 20]
    once = 20 + 40 + 10 + 20 + 100 + 50
    assert plan.num_images == 6 * 6
    assert plan.num_rows == (6 + TIMED_ROUNDS) * once


def test_the_sweep_of_the_documentation_costs_what_it_says() -> None:
    plan = plan_of(
        samplers=("ddpm", "ddim", "dpmpp_2m"),
        steps=(5, 10, 20, 50, 100),
        prompts=tuple(f"prompt {index}" for index in range(64)),
        num_seeds=4,
    )
    assert plan.num_images == 16 * 256
    assert plan.num_rows == 259 * 2 * (3 * 185 + 200)


def test_a_plan_travels_as_json() -> None:
    plan = plan_of()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=SweepPlan) == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplers": ()}, "samplers is empty"),
        ({"steps": ()}, "steps is empty"),
        ({"guidance": ()}, "guidance is empty"),
        ({"prompts": ()}, "prompts is empty"),
        ({"samplers": ("ddim", "eular")}, "'eular', which is unknown. Did you mean 'euler'"),
        ({"steps": (5, 0)}, "num_steps is 0"),
        ({"guidance": (99.0,)}, "guidance_scale is 99"),
        ({"num_seeds": 0}, "seeds is 0"),
        ({"num_seeds": 4000}, "seeds is 4000; it must be between 1 and 3333"),
        ({"first_seed": -1}, "seed is -1"),
        ({"reference_steps": 0}, "reference_steps is 0; it must be 1 or more"),
        ({"prompts": ("a fox", " ")}, "prompt is empty"),
        ({"steps": tuple(range(1, 102))}, "steps has 101 values; at most 100"),
        ({"samplers": ("x" * 5000,)}, "at most 100 characters"),
    ],
)
def test_a_plan_that_cannot_be_painted_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": (5, 2000)}, "steps has 2000"), ({"reference_steps": 1001}, "reference_steps has 1001")],
)
def test_more_steps_than_the_training_has_timesteps_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{message}; sim was trained with 1000 timesteps"):
        plan_of(**changes).check(INFO)
    plan_of(steps=(1000,)).check(INFO)


def test_axes_are_written_with_commas() -> None:
    assert split_axis("ddim, DPM++ 2M ,ddpm", "--samplers") == ("ddim", "DPM++ 2M", "ddpm")
    assert whole_numbers("5, 10,20", "--steps") == (5, 10, 20)
    assert numbers("1,7.5", "--guidance") == (1.0, 7.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--steps is empty"),
        (" , ", "--steps is empty"),
        ("5,,10", "has an empty value"),
        ("5,ten", "'ten', which is not a whole number"),
        ("5.5", "'5.5', which is not a whole number"),
        ("9" * 5000, "of 5000 digits; at most 18 are allowed"),
        ("-" + "9" * 19, "of 19 digits; at most 18 are allowed"),
        ("5," * 5000 + "5", "--steps has 10001 characters; at most 10000"),
        ("x" * 5000, "x…', which is not a whole number"),
    ],
)
def test_an_axis_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        whole_numbers(text, "--steps")
    with pytest.raises(InvalidRequest, match="'many', which is not a number"):
        numbers("1,many", "--guidance")


def test_what_a_page_needs_of_a_sweep_loads_neither_torch_nor_the_engine() -> None:
    modules = ("generation", "analysis", "charts")
    heavy = ("torch", "diffusers", "matplotlib", "diffserve.engine", "diffserve.runtime")
    imports = "; ".join(f"import diffserve.experiments.{module}" for module in modules)
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_given_many_times_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    look = plan.canonical_sampler

    def watched(text: str) -> str:
        looked_at.append(text)
        return look(text)

    monkeypatch.setattr(plan, "canonical_sampler", watched)
    large_plan = plan_of(samplers=("ddim",) * 100_000, steps=(5,) * 100_000, guidance=(3.0,) * 100_000)
    assert large_plan.cells == (Cell("ddim", 5, 3.0),)
    assert len(looked_at) == 2


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4,8,10-50 (+10)", (4, 8, 10, 20, 30, 40, 50)),
        ("1-3 [5]", (1, 1, 2, 2, 3)),
        ("3-6", (3, 4, 5, 6)),
        ("10-2 (-4)", (10, 6, 2)),
        ("-2-1", (-2, -1, 0, 1)),
    ],
)
def test_ranges_of_whole_numbers_are_those_of_a1111(text: str, values: tuple[int, ...]) -> None:
    assert whole_numbers(text, "--steps") == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0-1 [5]", (0, 0.25, 0.5, 0.75, 1)),
        ("0.1-0.4 (+0.1), 7", (0.1, 0.2, 0.3, 0.4, 7)),
        ("1-3", (1, 2, 3)),
        ("1e-3", (0.001,)),
    ],
)
def test_ranges_of_numbers_are_those_of_a1111(text: str, values: tuple[float, ...]) -> None:
    assert numbers(text, "--guidance") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("50-10", "'50-10', which is an empty range; write FROM-TO"),
        ("1-3 [0]", "empty range"),
        ("1-3 (+0)", "empty range"),
        ("1-1000", "a range of 1000 values; at most 100"),
        ("1-" + "9" * 18, "at most 100"),
        ("1.5-3", "'1.5', which is not a whole number"),
    ],
)
def test_a_range_without_values_or_with_too_many_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        whole_numbers(text, "--steps")


def test_fields_of_requests_are_axes() -> None:
    texts = ("eta=0,0.5", "--guidance-interval=0-1,0.2-0.8", "cache_interval=1-3", "lora:style/ink=0-1 [3]")
    axes = {name: read_values(name, values) for name, values in map(read_axis, texts)}
    assert axes == {
        "eta": (0.0, 0.5),
        "guidance_interval": ("0-1", "0.2-0.8"),
        "cache_interval": (1, 2, 3),
        "lora:style/ink": (0.0, 0.5, 1.0),
    }
    plan = plan_of(samplers=("ddim",), steps=(5, 20), axes=axes)
    assert len(plan.cells) == 2 * 2 * 2 * 3 * 3
    assert len({cell.slug for cell in plan.all_cells}) == len(plan.all_cells)
    assert len(plan.references) == 3, "only the LoRA changes the image that more steps converge to"
    last = plan.cells[-1]
    assert last.label == "ddim 20, eta 0.5, guidance_interval 0.2-0.8, cache_interval 3, lora:style/ink 1"
    request = request_for(plan, last, (0, 0)).diffusion
    assert (request.eta, request.guidance_interval, request.cache_interval) == (0.5, (0.2, 0.8), 3)
    assert [(lora.name, lora.scale) for lora in request.loras] == [("style/ink", 1.0)]
    assert len([pair for pair in plan.comparisons if pair[0] == last]) == 4
    assert msgspec.json.decode(msgspec.json.encode(plan), type=SweepPlan) == plan


def test_a_prompt_matrix_has_a_cell_for_each_prompt_with_the_same_seeds(tmp_path: Path) -> None:
    (tmp_path / "sky.txt").write_text("day\nnight\n")
    plan = read_plan(
        [("prompt", "a {red|blue} fox, __sky__"), ("steps", "5"), ("samplers", "ddim")],
        prompts=8,
        guidance=3.0,
        num_seeds=2,
        wildcards=Wildcards(str(tmp_path)),
    )
    prompts = ("a red fox, day", "a blue fox, day", "a red fox, night", "a blue fox, night")
    assert sorted(plan.all_prompts) == sorted(prompts)
    assert plan.places == ((0, 0), (0, 1))
    requests = [request_for(plan, cell, (0, 1)) for cell in plan.cells]
    assert sorted(request.prompt for request in requests) == sorted(prompts)
    assert {request.seed for request in requests} == {1}
    converged = [request_for(plan, cell, (0, 0)).prompt for cell in plan.references]
    assert sorted(converged) == sorted(prompts), "each prompt has converged images of its own"
    assert msgspec.json.decode(msgspec.json.encode(plan), type=SweepPlan) == plan
    several = read_plan([("prompt", ["a fox", "a cat, asleep"])], prompts=8, guidance=3.0)
    assert several.all_prompts == ("a fox", "a cat, asleep")
    with pytest.raises(InvalidRequest, match="prompts and the axis prompt both have prompts; leave prompts out"):
        read_plan([("prompt", "a fox")], prompts=["a cat"], guidance=3.0)


def test_long_prompts_of_an_axis_have_short_and_distinct_file_names() -> None:
    plan = read_plan([("prompt", [f"{'a' * 300} {end}" for end in "xy"])], prompts=8, guidance=3.0)
    names = [cell.slug for cell in plan.all_cells]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 180


def test_sizes_and_other_fields_of_the_table_reach_the_request() -> None:
    plan = plan_of(samplers=("ddim",), steps=(5,), axes={"size": ("128x64", "auto"), "spacing": ("leading",)})
    small, native = (request_for(plan, cell, (0, 0)) for cell in plan.cells)
    assert (small.width_px, small.height_px, native.width_px) == (128, 64, None)
    assert small.diffusion.spacing == "leading"
    assert [dict(cell.settings) for cell in plan.references] == [{"size": "128x64"}, {"size": "auto"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eta", "--axis is 'eta'; write it as NAME=VALUES"),
        ("beauty=1", "'beauty' is not an axis; the axes are prompt, num_inference_steps, sampler"),
        ("prompt=", "prompt has 0 combinations; between 1 and 100 are allowed"),
        ("prompt=a {red|blue", "the template"),
        ("prompt=a {1|2|3|4|5} {1|2|3|4|5} {1|2|3|4|5}", "prompt has 125 combinations"),
        ("prompt=a __color__ fox", "no folder of wildcards is configured"),
        ("seed=1,2", "seed cannot be an axis: all cells share their seeds"),
        ("hires_scale=2", "hires_scale cannot be an axis: a sweep compares images of one size in one pass"),
        ("hires_upscaler=embedded-4x", "hires_upscaler cannot be an axis: a sweep compares images of one size"),
        ("eta=", "eta is empty"),
        ("eta=much", "eta has 'much', which is not a number"),
        ("eta=0-3", "eta is 2"),
        ("cache_interval=0", "cache_interval is 0"),
        ("guidance_interval=0.5", "guidance_interval has '0.5'; write FROM-TO"),
        ("guidance_interval=0.8-0.2", "give two fractions with 0 <= from <= to <= 1"),
        ("size=big", "size is 'big'"),
        ("noise_source=moon", "noise_source is 'moon'"),
        ("lora:/etc/x=1", "a LoRA's name is '/etc/x'"),
        ("micro_conditioning=large", "micro_conditioning"),
        ("precision=fp33", "precision has 'fp33'; choose from float32, bfloat16, float16, int8"),
        ("precision=auto", "precision has 'auto'; choose from"),
        ("model=", "model is empty"),
        ("model=a/one,b/one", "two models of the axis are called 'one'; give one another name: NAME=PATH."),
    ],
)
def test_an_axis_that_requests_do_not_allow_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        plan_of(axes={name: read_values(name, values) for name, values in [read_axis(text)]})


def test_precisions_share_the_converged_images_of_the_first_and_models_have_their_own() -> None:
    axes = {
        name: read_values(name, values)
        for name, values in map(read_axis, ("model=a,/x/b.safetensors", "precision=fp32,int8"))
    }
    assert axes == {"model": ("a", "b"), "precision": ("float32", "int8")}
    plan = plan_of(samplers=("ddim",), steps=(5,), axes=axes)
    assert [dict(cell.settings) for cell in plan.references] == [{"model": "a"}, {"model": "b"}]
    assert plan.engines == tuple(
        (("model", model), ("precision", name)) for model in "ab" for name in ("float32", "int8")
    )
    counts = [
        (len(plan.cells_of(engine)), sum(cell.is_reference for cell in plan.cells_of(engine)))
        for engine in plan.engines
    ]
    assert counts == [(2, 1), (1, 0)] * 2
    assert all(plan.engine_of(cell) == engine for engine in plan.engines for cell in plan.cells_of(engine))
    last = plan.cells[-1]
    baselines = [dict(baseline.settings) for cell, baseline in plan.comparisons if cell == last]
    assert baselines == [{"model": "a", "precision": "int8"}, {"model": "b", "precision": "float32"}]
    first_request, request = (request_for(plan, cell, (0, 0)) for cell in (plan.cells[0], last))
    assert request.diffusion == first_request.diffusion, "model and precision are no fields of a request"


def test_a_plan_without_converged_images_compares_with_the_first_engine() -> None:
    plan = plan_of(
        samplers=("ddim",), steps=(5,), axes={"eta": (0.0, 1.0), "precision": ("float32", "int8")}, reference_steps=None
    )
    assert [plan.reference_of(cell) for cell in plan.cells] == [None, plan.cells[0], None, plan.cells[2]]
    assert plan.references == ()
    assert plan_of(reference_steps=None).references == ()


def test_models_are_compared_at_the_guidance_scale_of_each() -> None:
    plan = plan_of(
        steps=(5,), samplers=("ddim",), axes={"model": ("base", "turbo")}, model_guidance={"base": 3.0, "turbo": 1.0}
    )
    base, turbo = plan.cells
    assert (base.guidance_scale, turbo.guidance_scale) == (3.0, 1.0)
    assert plan.comparisons == ((turbo, base),)
    assert [cell.guidance_scale for cell in plan.references] == [3.0, 1.0]
    assert not is_comparable(turbo, base, Measure.PSNR_DB)
    assert is_comparable(turbo, base, Measure.EXACT)


def test_a_plan_of_one_engine_has_no_engine_axis() -> None:
    plan = plan_of(axes={"eta": (0.0, 0.5)})
    assert plan.engines == ((),)
    assert plan.cells_of(()) == plan.all_cells


def test_too_many_combinations_are_refused_before_they_are_enumerated() -> None:
    values = tuple(value / 100 for value in range(1, 101))
    with pytest.raises(InvalidRequest, match=r"the axes have 200,000,000 combinations; at most 1,000") as error:
        plan_of(steps=tuple(range(1, 101)), axes={"eta": values, "sigma_min": values, "sigma_max": values})
    assert error.value.code == "too_many_cells"
