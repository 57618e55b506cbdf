"""What a test needs of the processor that it runs on."""

from __future__ import annotations

import pytest

from diffserve.runtime.precision import cpu_int8_unit

needs_int8 = pytest.mark.skipif(cpu_int8_unit() is None, reason="this CPU does not multiply int8 in hardware")
