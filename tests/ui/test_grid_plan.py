"""Conversion of an experiment's form to its plan or to an error message."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.client import AsyncClient, ImageCapabilities, SamplerChoice
from diffserve.experiments.plan import Cell, PlannedImage, SweepPlan
from ui.experiment.handlers import MAX_PICTURES, ExperimentForm, read_form
from ui.experiment.run import ClientGenerator
from ui.experiment.speed import TIMED_PICTURES, TIMED_STEPS, ServerSpeed, Timing

MODEL = ImageCapabilities(
    family="embedded",
    digest="0",
    device="cpu",
    dtype="float32",
    samplers=(SamplerChoice(name="ddim", label="DDIM"),),
    sizes=((128, 128),),
    min_side_px=64,
    max_side_px=192,
    quality_steps={"standard": 25},
    default_sampler="ddim",
    default_num_steps=25,
    default_guidance_scale=3.0,
    default_spacing="trailing",
    train_timesteps=1000,
    max_images=10,
)


def plan_of(**fields: Any) -> SweepPlan:
    values: dict[str, Any] = {"samplers": ["DDIM", "dpmpp_2m"], "steps": "5, 2", "prompts": "a fox\n\n two apples \n"}
    return read_form(ExperimentForm(**values | fields), MODEL)


def test_every_image_is_requested_from_the_selected_model() -> None:
    image = PlannedImage(plan_of().cells[0], 0, 0)
    for choice, expected in (("photo", "photo"), ("", None)):
        generator = ClientGenerator(AsyncClient("http://127.0.0.1:9"), plan_of(), choice)
        assert generator._fields(image).get("model") == expected


def test_a_form_becomes_paired_cells() -> None:
    plan = plan_of(num_seeds=3.0, first_seed=7.0)
    names = ("ddim", "dpmpp_2m")
    assert [(cell.sampler, cell.num_steps) for cell in plan.cells] == [(name, n) for n in (2, 5) for name in names]
    assert plan.prompts == ("a fox", "two apples")
    assert [plan.seed_of(place) for place in plan.places] == [7, 8, 9, 10, 11, 12]
    assert {cell.guidance_scale for cell in plan.all_cells} == {3.0}, "the model's own where nothing is said"


def test_compared_images_are_generated_one_after_another() -> None:
    plan = plan_of()
    first = [image.cell for image in plan.images_by_place()][:5]
    assert first == [*plan.cells, *plan.references]
    assert len(list(plan.images_by_place())) == plan.num_images == 2 * 5


def test_without_a_converged_image_only_the_cells_are_generated() -> None:
    plan = plan_of(has_converged=False)
    assert plan.references == ()
    assert plan.all_cells == plan.cells
    assert not any(image.cell.is_reference for image in plan.images_by_place())


def test_the_converged_image_takes_no_more_steps_than_the_model_was_trained_with() -> None:
    short = MODEL.__class__(
        **{name: getattr(MODEL, name) for name in MODEL.__struct_fields__} | {"train_timesteps": 50}
    )
    plan = read_form(ExperimentForm(["ddim"], "5", "a fox"), short)
    assert plan.references == (Cell("ddim", 50, 3.0, is_reference=True),)


def test_the_estimate_includes_every_row_and_the_timed_images() -> None:
    plan = plan_of(guidance_scale="1", has_converged=False)
    assert (plan.num_painted_rows, plan.num_images) == (2 * (2 + 5) * 2, 8)
    speed = ServerSpeed(alone=Timing(row_s=1.0, rest_s=0.5), together=Timing(row_s=0.1, rest_s=0.01))
    timed = TIMED_PICTURES * (TIMED_STEPS * 1.0 + 0.5)
    assert speed.seconds(plan) == pytest.approx(28 * 0.1 + 8 * 0.01 + timed)
    guided = plan_of(guidance_scale=2, has_converged=False)
    assert guided.num_painted_rows == 2 * plan.num_painted_rows


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samplers": []}, "choose at least one"),
        ({"samplers": ["dimm"]}, "dimm"),
        ({"steps": ""}, "steps is empty"),
        ({"steps": "5,,10"}, "has an empty value"),
        ({"steps": "five"}, "'five'"),
        ({"steps": "0"}, "^steps is 0"),
        ({"steps": "5, 5000"}, "1000 steps is the maximum"),
        ({"prompts": " \n"}, "write at least one"),
        ({"num_seeds": 1.5}, "1.5"),
        ({"num_seeds": 0.0}, "seeds is 0"),
        ({"first_seed": -1.0}, "seed is -1"),
        ({"first_seed": float("nan")}, "nan"),
        ({"guidance_scale": "much"}, "'much'"),
        ({"guidance_scale": "1, 2"}, "one number"),
        ({"guidance_scale": "99"}, "^guidance is 99"),
        ({"num_seeds": float(MAX_PICTURES)}, f"at most {MAX_PICTURES}"),
        ({"steps": "9" * 5000}, "5000 digits"),
        ({"steps": "5," * 240_000 + "5"}, "steps has 480001 characters"),
        ({"prompts": "5," * 200_000}, "prompts have 400000 characters"),
        ({"prompts": "a fox\n" * (MAX_PICTURES + 1)}, f"{MAX_PICTURES + 1} prompts"),
        ({"samplers": ["x" * 5000]}, "at most 100 characters"),
        ({"samplers": [["ddim"]]}, "choose from the list"),
        ({"guidance_scale": "1" * 20_000}, "guidance has 20000 characters"),
    ],
)
def test_an_invalid_experiment_has_a_message(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        plan_of(**fields)
