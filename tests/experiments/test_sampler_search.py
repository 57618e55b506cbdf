"""The search for step tables: DPM++ 2M at its start, better at its end, one command for every family of models."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bench_concurrency import forget_highest, highest_bytes
from benchmarks.random_models import save_hollow_model
from diffserve.cli import main
from diffserve.experiments.search.learnable_table import LearnableTable
from diffserve.experiments.search.pairs import Pairs
from diffserve.experiments.search.sampler_search import Memory, SamplerSearch, SearchPlan
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.model import load_model
from schedulers import NoiseSchedule, compile_table
from schedulers.learned import LearnedSampler
from schedulers.noise import make_betas
from schedulers.update import rows_of

BETAS = make_betas("scaled_linear", 1000, 0.00085, 0.012)
PROMPTS = [f"a {color} cat" for color in ("red", "blue", "green", "gray", "pink", "old", "new", "big", "odd", "sad")]


@pytest.mark.parametrize(("prediction", "is_zero_snr"), [("epsilon", False), ("v_prediction", True)])
def test_the_start_is_dpm_solver(prediction: str, is_zero_snr: bool) -> None:
    schedule = NoiseSchedule.from_betas(BETAS, prediction, zero_terminal_snr=is_zero_snr)
    rows = LearnableTable(schedule, 5)().detach().numpy()
    built_in = rows_of(compile_table("dpmpp_2m", schedule, 5, spacing="trailing")).numpy()
    first = 2 if is_zero_snr else 0  # the replacements for the infinite noise level of row 0 differ
    np.testing.assert_allclose(rows[first:], built_in[first:], rtol=1e-5, atol=1e-6)


def test_weights_that_are_set_are_those_of_the_rows_and_are_differentiable() -> None:
    table = LearnableTable(NoiseSchedule.from_betas(BETAS, "epsilon"), 4)
    table.space(1.2)
    assert table.timesteps.tolist() == pytest.approx([999.0 - 1000.0 * (step / 4) ** 1.2 for step in range(4)])
    table.set_row(2, 0.4, [0.7, -0.2, 0.1])
    assert table.row_weights(2, 4) == pytest.approx([0.4, 0.7, -0.2, 0.1, 0.0])
    table().sum().backward()
    assert all(parameter.grad is not None for parameter in table.parameters())


def test_the_path_is_interpolated_exactly_for_cubic_curves() -> None:
    times = torch.tensor([999.0, 700.0, 400.0, 200.0, 50.0, -1.0], dtype=torch.float64)
    path = (1e-9 * times**3 - 1e-6 * times**2 + 0.5).reshape(-1, 1, 1, 1, 1)
    pairs = Pairs(path[0], path, times, None)  # type: ignore[arg-type]
    for timestep in (990.0, 555.0, 100.0, 3.0):
        assert pairs.at(timestep).item() == pytest.approx(1e-9 * timestep**3 - 1e-6 * timestep**2 + 0.5)


def test_sets_share_no_prompts() -> None:
    plan = SearchPlan.split(PROMPTS, 3.0)
    assert [len(prompts) for prompts in plan.prompts] == [6, 2, 2]
    assert sorted(sum(plan.prompts, ())) == sorted(PROMPTS)


def test_memory_is_stated_and_decides_on_recomputation(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("sdxl"), dtype="float32", device="cpu")
    one_image, two = (Memory.of(model, batch) for batch in (1, 2))
    assert two.activations == pytest.approx(2 * one_image.activations, rel=0.1)
    small = one_image._replace(free=4 * one_image.activations)
    assert small.recomputes(4)
    assert not small.recomputes(1)
    assert "each UNet call is computed again for its gradient" in small.describe(4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd2", "sdxl"])
def test_a_search_comes_closer_to_converged_latents(tiny_model: Callable[[str], Path], kind: str) -> None:
    model = load_model(tiny_model(kind), dtype="float32", device="cpu")
    search = SamplerSearch(model, SearchPlan.split(PROMPTS, 3.0, target_steps=12, iterations=10))
    search.prepare()
    gains: list[float] = []
    table = search.run(4, "tiny-4", lambda now: gains.append(now.gain_db))
    assert table.num_rows == 4
    assert table.measured["gain_db"] > 3.0
    assert max(gains) > 3.0
    assert math.isfinite(table.measured["psnr_db"])
    search.memory = search.memory._replace(free=1)
    assert search.memory.recomputes(4)
    again = search.run(4, "tiny-4", lambda now: None)
    assert again.columns["b0"] == pytest.approx(table.columns["b0"], abs=1e-4), "recomputed calls give equal gradients"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_the_command_writes_files_that_load(tiny_model: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    prompts, folder = tmp_path / "prompts.txt", tmp_path / "samplers"
    prompts.write_text("\n".join(PROMPTS))
    arguments = ["sweep", "--search", "--steps", "2", "--prompts", str(prompts), "--model", str(tiny_model(kind))]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--device", "cpu", "-o", str(folder)])
    assert done.value.code == 0
    [file] = folder.iterdir()
    sampler = LearnedSampler.from_json(file.read_text())
    assert sampler.name == file.stem
    assert sampler.num_rows == 2
    assert json.loads(file.read_text())["search"]["pairs"] == {"training": 6, "validation": 2, "test": 2}
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "-o", str(folder)])
    assert refused.value.code == 2, "an existing file is not overwritten"


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be reset here")
def test_the_memory_for_a_large_model_is_stated_from_its_shapes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)
    path = save_hollow_model("sdxl-random", tmp_path, dtype=torch.float16)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    arguments = ["sweep", "--search", "--plan-only", "--steps", "5,8", "--prompts", str(prompts), "--model", str(path)]
    forget_highest(os.getpid())
    before = highest_bytes(os.getpid())
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--device", "cpu", "--dtype", "bfloat16", "-o", str(tmp_path / "samplers")])
    assert done.value.code == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert [line[: len("memory for 5")] for line in lines] == ["memory for 5", "memory for 8"]
    [weights_gb, activations_gb] = [float(number) for number in re.findall(r"([\d.]+) GB of", lines[0])]
    assert weights_gb == pytest.approx(2 * 2.567, rel=0.01), "the UNet has 2.567e9 parameters of 2 bytes"
    assert 10 < activations_gb < 500
    added_gb = (highest_bytes(os.getpid()) - before) / 1e9
    assert added_gb < weights_gb / 2, "the weights were allocated"
    assert not (tmp_path / "samplers").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--search needs --steps"),
        (["--steps", "0"], "--steps has 0; a search takes 1 to 50"),
        (["--steps", "5", "--guidance", "3,5"], "a search takes one scale"),
        (["--steps", "5", "--prompts", "4"], "--prompts has 4 different prompts; a search needs at least 5"),
        (["--steps", "5", "--dtype", "int8"], "quantized networks have no gradients"),
        (["--steps", "51"], "--steps has 51; a search takes 1 to 50"),
        (["--steps", "many"], "--steps has 'many', which is not a whole number."),
        (["--steps", "9-5"], "--steps has '9-5', which is an empty range"),
        (["--steps", "5", "--prompts", "nowhere.txt"], "cannot read prompts from 'nowhere.txt'"),
        (["--steps", "5", "-o", "/dev/null/samplers"], "cannot write to '/dev/null/samplers': Not a directory."),
        (
            ["--steps", "5", "--samplers", "ddim"],
            "--search takes --steps, --guidance, --prompts, --seed and --plan-only",
        ),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--search", "-o", str(tmp_path / "samplers"), *arguments])
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "samplers").exists()
