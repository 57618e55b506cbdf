"""Marks for tests that need a processor, a kernel or a package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from diffserve.runtime.precision import cpu_int8_unit
from tests.device import DEVICE

needs_int8 = pytest.mark.skipif(cpu_int8_unit() is None, reason="this CPU does not multiply int8 in hardware")

needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="the package openvino is not installed")


def _multiplies_float8() -> bool:
    values = torch.ones((16, 16), device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.ones((16, 1), device=DEVICE)
    try:
        torch._scaled_mm(values, values.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


needs_float8 = pytest.mark.skipif(
    not _multiplies_float8(), reason=f"this torch has no float8 product with a scale for each row on {DEVICE}"
)
