"""Errors that stick end the engine; errors that do not cost one picture, as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffserve.api.errors import ConfigError, DeviceLost, DiffserveError
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine.image.engine import Engine
from diffserve.faults import FAULTS_VARIABLE, parse_faults
from diffserve.runtime import load_model
from diffserve.runtime.device_health import DeviceProbe, install_faults, is_sticky
from diffserve.settings.config import EngineConfig

STICKY = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "HIP error: unspecified launch failure",
    "MPS backend: command buffer exited with error status",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
)
PASSING = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory",
    "CUDA error: invalid argument",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "Input type (float) and bias type (c10::Half) should be the same",
)


class NumberedError(RuntimeError):
    """An error with the driver's number, like torch.AcceleratorError."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


@pytest.mark.parametrize("text", STICKY)
def test_what_the_driver_says_when_nothing_works_any_more_is_known(text: str) -> None:
    assert is_sticky(RuntimeError(text))


@pytest.mark.parametrize("text", PASSING)
def test_what_costs_a_single_call_is_not_taken_for_it(text: str) -> None:
    assert not is_sticky(RuntimeError(text))
    assert not is_sticky(torch.OutOfMemoryError(text))


def test_the_drivers_number_counts_more_than_its_words() -> None:
    assert is_sticky(NumberedError("CUDA error: in words nobody has seen yet", 710))
    assert not is_sticky(NumberedError("CUDA error: out of memory", 2))
    assert not is_sticky(ValueError("device-side assert"))


def test_an_error_that_came_of_a_sticky_one_is_sticky() -> None:
    error = KeyError("x")
    error.__context__ = RuntimeError(STICKY[0])
    assert is_sticky(error)


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Engine:
    return Engine(load_model(tiny_model("sd15"), dtype="float32"), EngineConfig(max_rows=4))


def small(seed: int = 0) -> GenerationRequest:
    params = DiffusionParams(num_steps=2, sampler="ddim")
    return GenerationRequest(prompt="x", seed=seed, width_px=64, height_px=64, diffusion=params)


def breaks(engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, what)
    install_faults(engine.model.unet)


def test_a_sticky_error_leaves_the_engine_and_a_passing_one_fails_its_picture(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm_up()
    probe = DeviceProbe(engine.model)
    breaks(engine, monkeypatch, "unet.error@1, unet.sticky@8")
    with pytest.raises(DiffserveError, match="an injected fault"):
        engine.generate(GenerationRequest(prompt="x", diffusion=DiffusionParams(num_steps=1, guidance_scale=1.0)))
    probe.check()
    assert len(engine.generate(small())) == 1
    with pytest.raises(DeviceLost, match="device-side assert"):
        engine.generate([small(seed) for seed in range(20)])


def test_a_trial_call_finds_out_a_device_that_fails_in_words_of_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = DeviceProbe(engine.model)
    assert probe.is_of_use
    probe.check()
    breaks(engine, monkeypatch, "unet.broken@1")
    with pytest.raises(DeviceLost, match="permanent fault"):
        probe.check()


def test_a_trial_call_that_runs_out_of_memory_or_never_worked_proves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    probe = DeviceProbe(engine.model)
    monkeypatch.setattr(engine.model.unet, "predict", no_memory)
    probe.check()
    breaks(engine, monkeypatch, "unet.broken@1")
    never = DeviceProbe(engine.model)
    assert not never.is_of_use
    never.check()


def test_a_trial_call_whose_numbers_are_not_finite_finds_the_device_lost(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = DeviceProbe(engine.model)
    monkeypatch.setattr(engine.model.unet, "predict", lambda *a, **n: torch.full((1, 4, 8, 8), torch.nan))
    with pytest.raises(DeviceLost, match="not finite"):
        probe.check()


def test_without_the_variable_nothing_is_wrapped_and_a_wrong_one_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FAULTS_VARIABLE, raising=False)
    install_faults(engine.model.unet)
    assert "predict" not in vars(engine.model.unet)
    monkeypatch.setenv(FAULTS_VARIABLE, "kill.job_added@1")
    install_faults(engine.model.unet)
    assert "predict" not in vars(engine.model.unet)
    with pytest.raises(ConfigError, match="the points are job_inserted, "):
        parse_faults("kill.lunch@1")
    for wrong in ("unet.sticky", "unet.melts@3", "unet.hang@0", "vae.hang@1", "kill.job_added"):
        with pytest.raises(ConfigError, match=r"unet\.KIND@CALL"):
            parse_faults(wrong)
