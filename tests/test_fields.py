"""Tests of the field table: every place that writes fields down by hand agrees with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import FORM_FIELDS, REQUEST_FIELDS, SHARED_FIELDS
from diffserve.api.types import DenoisingRecipe, DiffusionParams
from diffserve.client.recipe import EditFields, Recipe
from diffserve.service.images.schemas import EditBody

NAMES = {"num_inference_steps": "num_steps"}
"""Names in ``DiffusionParams`` that differ from those of requests."""

OUTSIDE_DIFFUSION = {"seed", "size", "best_of", "template"}
NOT_RECORDED = {"token_merging", "best_of"}
STRUCTURED = {"micro_conditioning"}


@pytest.mark.parametrize("name", sorted(REQUEST_FIELDS.keys() - OUTSIDE_DIFFUSION))
def test_diffusion_params_have_the_defaults_of_the_table(name: str) -> None:
    assert getattr(DiffusionParams(), NAMES.get(name, name)) == REQUEST_FIELDS[name].default


@pytest.mark.parametrize("name", sorted(REQUEST_FIELDS))
def test_the_client_has_the_types_of_the_table(name: str) -> None:
    if name not in STRUCTURED:
        assert get_type_hints(EditFields)[name] == REQUEST_FIELDS[name].type


@pytest.mark.parametrize("name", sorted(SHARED_FIELDS.keys() - NOT_RECORDED))
def test_recipes_of_server_and_client_have_every_shared_field(name: str) -> None:
    assert name in DenoisingRecipe.__struct_fields__
    assert name in Recipe.__struct_fields__


def test_the_http_body_takes_every_field() -> None:
    assert EditBody.model_fields.keys() >= REQUEST_FIELDS.keys()


def test_the_fields_of_the_form_are_those_with_texts() -> None:
    assert set(FORM_FIELDS) == {name for name, field in REQUEST_FIELDS.items() if field.form}


def outside_values() -> list[tuple[str, Any]]:
    """Return values just outside the bounds of each field."""
    values: list[tuple[str, Any]] = []
    for name, field in REQUEST_FIELDS.items():
        if field.type in (int, float) and field.minimum is not None and field.maximum is not None:
            values += [(name, field.minimum - 1), (name, field.maximum + 1), (name, float("nan"))]
            values += [(name, field.minimum)] if field.is_minimum_excluded else []
        values += [(name, "other")] if field.choices and name not in OUTSIDE_DIFFUSION else []
    return values


@pytest.mark.parametrize(("name", "value"), outside_values())
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is ") as refused:
        DiffusionParams(**{name: value})
    assert refused.value.param == name


def test_the_table_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, diffserve.api.fields; assert not {'torch', 'pydantic', 'fastapi', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
