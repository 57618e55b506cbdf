"""Learned samplers in requests, lists and the page's form, without an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from diffserve.service.a1111.conversion import convert_body
from diffserve.service.a1111.routes import SAMPLER_LIST, sampler_list
from diffserve.service.a1111.schemas import Txt2ImgBody
from diffserve.service.images.inputs import diffusion_of
from diffserve.service.images.schemas import GenerateBody
from tests.schedulers.test_learned import learned
from tests.service.test_capabilities import INFO, image_of
from ui.create.parameters import Form, order_of, sampler_labels

NAME = "learned:fast"


@pytest.fixture
def info(tmp_path: Path) -> object:
    sampler = learned(model_digest=INFO.digest + "0" * 52)
    (tmp_path / "fast.json").write_text(sampler.to_json())
    (tmp_path / "other.json").write_text(learned(model_digest="f" * 64).to_json())
    return msgspec.structs.replace(INFO, sampler_dirs=(str(tmp_path),))


def test_a_quality_preset_does_not_set_the_steps_of_a_learned_sampler() -> None:
    body = GenerateBody(prompt="a fox", sampler=NAME)
    assert diffusion_of(body, ()).num_steps is None
    assert diffusion_of(body.model_copy(update={"steps": 4}), ()).num_steps == 4


def test_lists_name_samplers_of_the_model_only(info: object) -> None:
    assert [entry["name"] for entry in sampler_list(info)[len(SAMPLER_LIST) :]] == [NAME]  # type: ignore[arg-type]
    image = image_of(info)  # type: ignore[arg-type]
    assert image.samplers[-1].name == NAME
    assert (NAME, NAME) in sampler_labels(image)


def test_the_form_sends_the_steps_of_the_table(info: object) -> None:
    image = image_of(info)  # type: ignore[arg-type]
    assert order_of(Form(prompt="a fox", sampler=NAME), image).fields["num_inference_steps"] == 4
    assert order_of(Form(prompt="a fox", sampler="ddim"), image).fields["num_inference_steps"] != 4


def test_a_second_pass_may_have_another_sampler_than_the_first() -> None:
    fields = {"prompt": "a fox", "sampler_name": NAME, "enable_hr": True, "width": 64, "height": 64}
    _, body = convert_body(Txt2ImgBody.model_validate(fields | {"hr_sampler_name": "DDIM"}), {}, [])
    assert (body.sampler, body.model_dump()["hires_sampler"]) == (NAME, "DDIM")
