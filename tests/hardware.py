"""Marks for tests that need a processor, a kernel or a package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from diffserve.runtime.precision import cpu_int8_unit

needs_int8 = pytest.mark.skipif(cpu_int8_unit() is None, reason="this CPU does not multiply int8 in hardware")

needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="the package openvino is not installed")
