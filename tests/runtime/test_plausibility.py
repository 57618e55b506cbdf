"""A model that answers as another kind than its files say is refused at load, by the name of what it is."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import ModelLoadError
from diffserve.disk_cache import DiskCache
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading import plausibility
from diffserve.runtime.loading.checkpoint import MANIFEST_FILE
from diffserve.runtime.loading.plausibility import (
    Formulation,
    Plausibility,
    judge,
    probe,
    readings,
)
from diffserve.settings.layers import load_settings
from schedulers import NoiseSchedule, Preconditioning
from schedulers.table import FloatArray
from tests.device import DEVICE

VELOCITY = "v_prediction"


@pytest.fixture(scope="module")
def embedded() -> DiffusionModel:
    """Return the shipped model, which was trained for velocity."""
    return load_model("embedded", dtype="float32", device=DEVICE)


class Dressed:
    """The shipped UNet behind the front of another formulation: asked as that one is, it answers as that one would."""

    extra_channels = 0

    def __init__(self, model: DiffusionModel, front: Formulation) -> None:
        self.model, self.front = model, front
        self.train_sigmas = model.schedule.finite_sigmas()
        self.inside = Formulation(Preconditioning(VELOCITY), self.train_sigmas)

    def predict(
        self, shown: torch.Tensor, timesteps: torch.Tensor, contexts: torch.Tensor, **added: Any
    ) -> torch.Tensor:
        sigma = self._sigma(timesteps.double().numpy())
        x = shown / self.front.scale(torch.ones(3, 1, 1, 1), sigma)[0]
        scaled_input, timestep = self.inside.scale(x, sigma)
        output = self.model.unet.predict(scaled_input, torch.tensor(timestep), contexts, **added).cpu()
        denoised = self.inside.read(x, sigma, output)
        at_rest = self.front.read(x, sigma, torch.zeros_like(x))
        return (denoised - at_rest) / self.front.read(torch.zeros_like(x), sigma, torch.ones_like(x))

    def _sigma(self, timesteps: FloatArray) -> FloatArray:
        """Return the noise level that the wrapped network's reading assigns to the timesteps."""
        if self.front.preconditioning is None:
            time = np.clip(timesteps / 1000, 1e-3, 1 - 1e-3)
            return np.asarray(time / (1 - time), dtype=np.float64)
        if self.front.preconditioning.is_continuous:
            return np.asarray(np.exp(4 * np.clip(timesteps, -2, 2)), dtype=np.float64)
        logs = np.interp(timesteps, np.arange(self.train_sigmas.size), np.log(self.train_sigmas))
        return np.asarray(np.exp(logs), dtype=np.float64)


def schedule_of(name: str) -> NoiseSchedule:
    """Return the embedded model's betas with the prediction type ``name``."""
    betas = json.loads((EMBEDDED_DIRECTORY / "scheduler/scheduler_config.json").read_text(encoding="utf-8"))
    if "CosXL" in name:
        cosxl = {"_class_name": "EDMEulerScheduler", "prediction_type": VELOCITY, "sigma_data": 1.0}
        return NoiseSchedule.from_config(cosxl)
    if "EDM" in name:
        return NoiseSchedule.from_config({"_class_name": "EDMDPMSolverMultistepScheduler"})
    return NoiseSchedule.from_config(betas | {"prediction_type": name})


NAMES = tuple(readings(schedule_of(VELOCITY))[1])


@pytest.mark.slow
@pytest.mark.parametrize("truth", NAMES)
def test_network_is_known_for_what_it_is_whatever_its_files_say(embedded: DiffusionModel, truth: str) -> None:
    """Declare the correct type and a wrong one, except flow matching, which cannot be declared."""
    network: Any = Dressed(embedded, readings(embedded.schedule)[1][truth])
    for declared in {truth, NAMES[NAMES.index(truth) - 1]} - {"flow matching"}:
        schedule = schedule_of(declared)
        plausibility = probe(network, embedded.vae, embedded.text, schedule, embedded.native_size)
        assert plausibility.declared == declared
        assert plausibility.best == truth
        assert plausibility.errors[truth] < 0.5
        assert plausibility.contradicts == (declared != truth)


@pytest.mark.parametrize("model", ["embedded", "embedded-turbo"])
def test_shipped_models_answer_as_their_files_say(model: str) -> None:
    plausibility = load_model(model, dtype="float32", device=DEVICE).plausibility
    assert plausibility is not None
    assert plausibility.best == plausibility.declared == VELOCITY
    assert plausibility.is_plausible


@pytest.mark.parametrize("declared", ["epsilon", "sample"])
def test_shipped_weights_under_another_prediction_type_are_refused(declared: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED_DIRECTORY, tmp_path / "model"))
    (path / MANIFEST_FILE).unlink()
    file = path / "scheduler/scheduler_config.json"
    changed = json.loads(file.read_text()) | {"prediction_type": declared, "rescale_betas_zero_snr": False}
    file.write_text(json.dumps(changed))
    with pytest.raises(ModelLoadError, match=f"files say {declared}, its UNet behaves like v_prediction") as caught:
        load_model(path, dtype="float32", device=DEVICE)
    assert "\n" not in caught.value.message
    unasked = msgspec.structs.replace(load_settings(model=str(path), env={}).model, probe=False)
    assert load_model(path, dtype="float32", device=DEVICE, profile=unasked).plausibility is None


@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl", "inpaint9", "embedded"])
def test_random_weights_load_with_a_warning(
    kind: str, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plausibility = load_model(tiny_model(kind), dtype="float32", device=DEVICE).plausibility
    assert plausibility is not None
    assert not plausibility.contradicts
    assert not plausibility.is_plausible
    assert "random, damaged or distilled" in caplog.text


def test_probe_is_run_once_for_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path)
    first = load_model("embedded", dtype="float32", device=DEVICE, cache=cache).plausibility
    monkeypatch.setattr(plausibility, "_answer", None)
    assert load_model("embedded", dtype="float32", device=DEVICE, cache=cache).plausibility == first


def test_answers_that_are_not_finite_are_no_better_than_random() -> None:
    judge(Plausibility("epsilon", {"epsilon": 1e9, "sample": 1e9}), Path("model"))
    judge(Plausibility("epsilon", {"epsilon": 0.7, "sample": 0.6}), Path("model"))
    with pytest.raises(ModelLoadError):
        judge(Plausibility("epsilon", {"epsilon": 0.9, "sample": 0.4}), Path("model"))
