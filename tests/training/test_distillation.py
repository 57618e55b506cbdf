"""Distillation: the timestep ladder, trajectories, the low-rank change, and the shipped distilled weights."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import CLIPTokenizer

from diffserve.api.types import GenerationRequest
from diffserve.engine import Engine
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime import load_model
from diffserve.runtime.loading.checkpoint import MANIFEST_FILE
from diffserve.settings.layers import load_settings
from diffserve.training import card, denoiser_training
from diffserve.training.denoiser_training import TEXT_WIDTH, Denoiser, build_scheduler, train_tokenizer
from diffserve.training.distillation import (
    NUM_STEPS,
    DistillSettings,
    Ladder,
    LowRankChange,
    TrajectoryStore,
    collect,
    ddim_step,
    distill,
    save_adapter,
    velocity_to,
)
from diffserve.training.eval.captions import DISTILLED, judge_held_out, score
from diffserve.training.export import export
from diffserve.training.latents import LatentScenes
from diffserve.training.vae_training import LATENT_CHANNELS, build_vae
from diffserve.world.scenes import scenes
from tests.tiny_models import EMBEDDED, unet

TURBO = EMBEDDED_DIRECTORY.with_name("turbo")
RANK = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    directory = train_tokenizer(tmp_path_factory.mktemp("tokenizer"), num_captions=1000)
    return CLIPTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def teacher(tokenizer: CLIPTokenizer) -> Denoiser:
    """Build a denoiser whose UNet has the shipped layout and a third of its width."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denoiser_training, "build_unet", lambda: unet(EMBEDDED, context=TEXT_WIDTH))
        return Denoiser(tokenizer).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def change(teacher: Denoiser) -> LowRankChange:
    """Build a change that is not zero."""
    torch.manual_seed(1)
    change = LowRankChange(teacher.unet, RANK)
    for up in change.up:
        torch.nn.init.normal_(up, std=0.02)
    return change.requires_grad_(False)


def settings(iterations: int = 4, **overrides: int) -> DistillSettings:
    options = {"rank": RANK, "substeps": 1, "trajectories": 6, "rounds": 2, "warmup": 1} | overrides
    return DistillSettings(iterations, 4, 1e-3, checkpoint_every=2, **options)  # type: ignore[arg-type]


def canvases() -> list[LatentScenes]:
    source = scenes(0, held_out=False)
    sizes = ((6, 8, 8), (3, 8, 16))
    return [
        LatentScenes(list(islice(source, count)), torch.zeros(count, LATENT_CHANNELS, height, width).half())
        for count, height, width in sizes
    ]


def test_the_distilled_model_visits_the_trailing_timesteps_and_the_teacher_those_between() -> None:
    ladder = Ladder(substeps=3)
    assert ladder.timesteps == [999, 749, 499, 249]
    assert [timestep for timestep, _ in ladder.steps(1)] == [749, 666, 582]
    for index, angle in enumerate(ladder.turns()):
        assert sum(part for _, part in ladder.steps(index)) == pytest.approx(angle)
    assert sum(ladder.turns()) == pytest.approx(np.pi / 2)


def test_turning_by_the_angles_is_ddim() -> None:
    scheduler = build_scheduler()
    scheduler.set_timesteps(NUM_STEPS)
    torch.manual_seed(0)
    points = reference = torch.randn(2, 8, 4, 4)
    for timestep, angle in zip(scheduler.timesteps, Ladder(substeps=2).turns(), strict=True):
        velocity = torch.randn(2, 8, 4, 4)
        points = ddim_step(points, velocity, angle)
        reference = scheduler.step(velocity, timestep, reference).prev_sample
        assert torch.allclose(points, reference, atol=1e-4)


def test_the_target_velocity_reaches_the_goal_in_one_step() -> None:
    torch.manual_seed(0)
    points, goal = torch.randn(2, 3, 8, 4, 4).unbind()
    assert torch.allclose(ddim_step(points, velocity_to(points, goal, 0.3), 0.3), goal, atol=1e-5)


def test_without_substeps_and_guidance_the_target_is_the_teachers_velocity(teacher: Denoiser) -> None:
    torch.manual_seed(0)
    noise, ids, empty = torch.randn(2, LATENT_CHANNELS, 8, 8), torch.randint(3, 50, (2, 32)), torch.full((1, 32), 2)
    trajectories = collect(teacher, None, noise, ids, empty, Ladder(substeps=1), guidance_scale=1.0)
    assert torch.equal(trajectories.points[:, 0], noise.half())
    context = teacher.text_encoder(ids).last_hidden_state
    for index, timestep in enumerate(Ladder(substeps=1).timesteps):
        predicted = teacher.unet(trajectories.points[:, index].float(), timestep, context).sample
        assert torch.allclose(
            trajectories.velocities[:, index].float(), predicted, atol=0.05 * float(predicted.abs().max())
        )


def test_a_distilled_model_on_its_own_path_is_led_by_its_own_velocity(teacher: Denoiser, change: LowRankChange) -> None:
    torch.manual_seed(0)
    noise, ids, empty = torch.randn(2, LATENT_CHANNELS, 8, 8), torch.randint(3, 50, (2, 32)), torch.full((1, 32), 2)
    distilled = change.merge_into(teacher)
    taught, followed = (
        collect(teacher, who, noise, ids, empty, Ladder(2), guidance_scale=3.0) for who in (None, distilled)
    )
    assert torch.equal(taught.velocities[:, 0], followed.velocities[:, 0])
    angle = Ladder(2).turns()[0]
    goal = ddim_step(taught.points[:, 0].float(), taught.velocities[:, 0].float(), angle)
    assert torch.allclose(taught.points[:, 1].float(), goal, atol=1e-2)
    assert not torch.allclose(followed.points[:, 1].float(), goal, atol=1e-2)


def test_a_fresh_change_changes_nothing_and_leaves_the_outer_layers_alone(teacher: Denoiser) -> None:
    fresh = LowRankChange(teacher.unet, RANK)
    merged = fresh.merge_into(teacher).unet.state_dict()
    assert all(torch.equal(merged[name], part) for name, part in teacher.unet.state_dict().items())
    assert "mid_block.resnets.0.conv1" in fresh.layers
    assert not {"conv_in", "conv_out", "time_embedding.linear_1"} & set(fresh.layers)


def test_the_merged_model_answers_as_the_change_does_in_training(teacher: Denoiser, change: LowRankChange) -> None:
    torch.manual_seed(0)
    points, context = torch.randn(2, LATENT_CHANNELS, 8, 8), torch.randn(2, 32, 192)
    timesteps = torch.tensor([999, 249])
    with torch.no_grad():
        trained = change.velocity(teacher.unet, points, timesteps, context)
        merged = change.merge_into(teacher).unet(points, timesteps, encoder_hidden_states=context).sample
        before = teacher.unet(points, timesteps, encoder_hidden_states=context).sample
    assert torch.allclose(trained, merged, atol=1e-5)
    assert not torch.allclose(merged, before, atol=1e-2)


def test_rounds_fall_due_over_the_first_half_of_the_iterations(
    teacher: Denoiser, tokenizer: CLIPTokenizer, tmp_path: Path
) -> None:
    store = TrajectoryStore(settings(iterations=80, rounds=4), tmp_path, teacher, canvases(), tokenizer)
    assert [store.rounds_due(iteration) for iteration in (0, 9, 10, 20, 30, 79)] == [1, 1, 2, 3, 4, 4]


def test_trajectories_of_every_canvas_are_kept_and_read_again(
    teacher: Denoiser, tokenizer: CLIPTokenizer, tmp_path: Path
) -> None:
    first, again = (TrajectoryStore(settings(), tmp_path, teacher, canvases(), tokenizer) for _ in range(2))
    first.collect_round(teacher)
    modified_ns = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again.collect_round(teacher)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == modified_ns
    batches = [[part.clone() for part in store.batch(random.Random(0))] for store in (first, again)]
    assert all(torch.equal(first, second) for first, second in zip(*batches, strict=True))
    shapes = {tuple(first.batch(random.Random(seed))[0].shape) for seed in range(20)}
    assert shapes == {(4, LATENT_CHANNELS, 8, 8), (4, LATENT_CHANNELS, 8, 16)}


@pytest.mark.slow
def test_an_interrupted_distillation_resumes_comes_nearer_to_its_teacher_and_bills_every_setting(
    teacher: Denoiser, tokenizer: CLIPTokenizer, tmp_path: Path
) -> None:
    first = distill(settings(iterations=6), tmp_path, teacher, canvases(), tokenizer)
    iterations: list[int] = []
    run_settings = settings(iterations=12)
    again = distill(
        run_settings,
        tmp_path,
        teacher,
        canvases(),
        tokenizer,
        lambda _, iteration: iterations.append(iteration),
        look_every=3,
    )
    assert iterations == [9, 12]
    assert any(up.abs().max() > 0 for up in first.up)
    assert not torch.equal(first.up[0], again.up[0])
    bill = json.loads((tmp_path / "distill.json").read_text(encoding="utf-8"))
    assert (bill["iterations_done"], bill["substeps"], bill["rank"]) == (12, 1, RANK)
    assert bill["flops"] > 0
    store = TrajectoryStore(run_settings, tmp_path, teacher, canvases(), tokenizer)
    store.collect_round(teacher)
    points, velocities, steps, ids = store.batch(random.Random(0))
    timesteps = torch.tensor(store.ladder.timesteps)[steps]
    errors = []
    with torch.no_grad():
        for unet in (teacher.unet, again.merge_into(teacher).unet):
            context = teacher.text_encoder(ids).last_hidden_state
            guess = unet(points, timesteps, encoder_hidden_states=context).sample
            errors.append(float((guess - velocities).square().mean()))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.slow
def test_a_saved_change_is_loaded_and_paints_four_steps_by_itself(
    teacher: Denoiser, change: LowRankChange, tokenizer: CLIPTokenizer, tmp_path: Path
) -> None:
    export(tmp_path / "weights", build_vae(), teacher, tokenizer)
    path = save_adapter(tmp_path / "turbo", change, base="../weights")
    model = load_model(path, dtype="float32", device="cpu")
    merged = change.merge_into(teacher).unet.state_dict()
    for name, part in model.unet.network.state_dict().items():
        assert torch.allclose(part, merged[name], atol=2e-3), name
    result = Engine.from_pretrained(path, dtype="float32", device="cpu").generate(
        GenerationRequest(prompt="a fox", seed=1)
    )[0]
    assert (result.sampler, result.num_evaluations, result.guidance_scale) == ("ddim", NUM_STEPS, 1.0)


def test_the_settings_of_the_shipped_model_match_its_adapter(change: LowRankChange, tmp_path: Path) -> None:
    model = load_settings(model="embedded-turbo", env={}).model
    spec = json.loads((save_adapter(tmp_path, change) / "adapter.json").read_text(encoding="utf-8"))
    assert spec.pop("base") == "embedded"
    assert spec == {name: getattr(model, name) for name in spec}
    teachers = load_settings(model="embedded", env={}).model
    assert (model.spacing, model.good_sizes) == (teachers.spacing, teachers.good_sizes)


# The distilled model that ships -------------------------------------------------------------------------------------

ships = pytest.mark.skipif(not TURBO.is_dir(), reason="no distilled model ships with these weights yet")


@pytest.fixture(scope="module")
def turbo() -> Engine:
    return Engine.from_pretrained("embedded-turbo")


@ships
def test_the_shipped_change_is_a_16_bit_lora_of_about_two_and_a_half_megabytes() -> None:
    files = sorted(path.relative_to(TURBO).as_posix() for path in TURBO.rglob("*") if path.is_file())
    weights = "pytorch_lora_weights.safetensors"
    assert files == ["adapter.json", MANIFEST_FILE, weights, "scheduler/scheduler_config.json"]
    assert sum((TURBO / name).stat().st_size for name in files) <= 2_600_000
    with safe_open(TURBO / weights, framework="np") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


@ships
def test_a_bare_prompt_takes_the_distilled_model_four_evaluations(turbo: Engine) -> None:
    result = turbo.generate("a fox on a blue background")[0]
    assert (turbo.info.model_id, turbo.info.family) == ("embedded-turbo", "embedded")
    assert (result.sampler, result.num_evaluations) == ("ddim", NUM_STEPS)


@ships
def test_the_published_scores_of_the_distilled_model_reach_most_of_its_teachers(turbo: Engine) -> None:
    teachers, distilled_scores = (
        json.loads((card.RESULTS / name).read_text(encoding="utf-8"))
        for name in ("captions.json", "turbo-captions.json")
    )
    assert (distilled_scores["digest"], distilled_scores["num_steps"], distilled_scores["guidance_scale"]) == (
        turbo.info.digest,
        NUM_STEPS,
        1.0,
    )
    assert distilled_scores["scores"]["all"]["count"] == 300
    assert distilled_scores["scores"]["all"]["exact_share"] >= 0.85 * teachers["scores"]["all"]["exact_share"]


@ships
@pytest.mark.slow
def test_a_sample_of_the_held_out_captions_confirms_the_distilled_models_scores(turbo: Engine) -> None:
    published = json.loads((card.RESULTS / "turbo-captions.json").read_text(encoding="utf-8"))
    share = score(judge_held_out(turbo, 10, DISTILLED)).exact_share
    # three standard errors of a sample of ten: seven of them are right
    expected = published["scores"]["all"]["exact_share"]
    assert abs(share - expected) <= 3 * (expected * (1 - expected) / 10) ** 0.5
