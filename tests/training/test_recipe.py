"""The training recipe's parts: tokenizer, networks, normalisation, resumable runs."""

from __future__ import annotations

import copy
import json
import math
import random
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from transformers import CLIPTokenizer

from diffserve.api.errors import ConfigError
from diffserve.media.images import decode_image
from diffserve.models.learned_samplers import OWN_SAMPLERS
from diffserve.models.upscalers import OWN_UPSCALERS
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime.loading.checkpoint import NOT_COVERED
from diffserve.runtime.model import OWN_LORAS
from diffserve.runtime.vae.preview import PreviewDecoder
from diffserve.training import denoiser_training, train, training_loop
from diffserve.training.denoiser_training import (
    FINISH_SHARE,
    MAX_TOKENS,
    TEXT_WIDTH,
    Denoiser,
    continue_denoiser,
    interpolate,
    stratified_timesteps,
    train_denoiser,
    train_tokenizer,
)
from diffserve.training.export import POSTERIOR_STD, export, fold_normalisation
from diffserve.training.latents import (
    DIRECTIONS,
    READ_TOKENS,
    UNSAID,
    LatentScenes,
    LayoutHead,
    batches,
    channel_statistics,
    emphasis,
    encode_scenes,
    layout,
    normalise,
)
from diffserve.training.preview_training import CONFIG
from diffserve.training.samples import preview_sheet, round_trip_sheet
from diffserve.training.training_loop import Run, TrainSettings, adamw, fingerprint, rate_factor
from diffserve.training.vae_training import LATENT_CHANNELS, build_vae, train_vae
from diffserve.world.captions import caption, held_out, loose_caption
from diffserve.world.render import render
from diffserve.world.scenes import OBJECTS, scenes
from tests.tiny_models import EMBEDDED, unet

SINGLE = ("one object", "plain")

SEPARATE = (OWN_LORAS, OWN_SAMPLERS, OWN_UPSCALERS)
"""Folders of the shipped model that training does not write with its weights."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    directory = train_tokenizer(tmp_path_factory.mktemp("tokenizer"), num_captions=4000)
    return CLIPTokenizer.from_pretrained(directory)


def test_every_object_is_a_token_a_word_and_captions_fit(tokenizer: CLIPTokenizer) -> None:
    for name in OBJECTS:
        assert len(tokenizer(name).input_ids) == 2 + len(name.split()), name
    longest = max(len(tokenizer(words).input_ids) for _, words in held_out(300))
    assert longest < MAX_TOKENS


def test_unknown_words_are_tokenized_by_letters(tokenizer: CLIPTokenizer) -> None:
    ids = tokenizer("zebra").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "zebra"


def test_the_learning_rate_warms_up_stays_and_falls() -> None:
    settings = TrainSettings(iterations=1000, batch_size=1, learning_rate=1.0, warmup=100, decay_share=0.5)
    rates = [rate_factor(i, settings) for i in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[100:500] == pytest.approx([1.0] * 400)
    assert rates[500:] == sorted(rates[500:], reverse=True)
    assert rates[-1] < 0.02


def test_a_stage_with_a_time_limit_ends_at_a_low_learning_rate(tmp_path: Path) -> None:
    settings = TrainSettings(1000, 1, 1.0, warmup=1, decay_share=0.5, max_seconds=60)
    assert [rate_factor(10, settings, seconds) for seconds in (0, 30, 45, 60)] == pytest.approx([1, 1, 0.505, 0.01])
    assert rate_factor(999, settings, 1) < 0.02
    net = torch.nn.Linear(3, 3)
    run = Run("tiny", net, settings, tmp_path)
    for iteration in run.iterations():
        run.seconds += 20  # simulates elapsed time
        run.step(net(torch.ones(1, 3)).square().sum())
        assert iteration < 3
    assert run.iteration == 3
    assert (tmp_path / "tiny.pt").is_file()
    assert json.loads((tmp_path / "tiny.json").read_text())["iterations_done"] == 3


def test_stratified_timesteps_cover_the_range_once_each() -> None:
    timesteps = stratified_timesteps(50, 1000)
    assert (timesteps // 20).tolist() == list(range(50))


def test_folding_the_normalisation_into_the_autoencoder_changes_no_picture() -> None:
    torch.manual_seed(0)
    vae = build_vae().eval()
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.inference_mode():
        raw = vae.encode(pixels).latent_dist.mode()
        mean, std = channel_statistics(raw)
        folded = fold_normalisation(vae, mean, std)
        posterior = folded.encode(pixels).latent_dist
        assert torch.allclose(posterior.mode(), normalise(raw, mean, std), atol=1e-4)
        assert torch.allclose(posterior.std, torch.full_like(posterior.std, POSTERIOR_STD), rtol=1e-3)
        assert torch.allclose(folded.decode(posterior.mode()).sample, vae.decode(raw).sample, atol=1e-4)


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 3)
    first = Run("tiny", net, TrainSettings(3, 1, 1e-2, checkpoint_every=1), tmp_path)
    for _ in first.iterations():
        first.step(net(torch.ones(1, 3)).square().sum())
    again = Run("tiny", torch.nn.Linear(3, 3), TrainSettings(5, 1, 1e-2), tmp_path)
    assert again.iteration == 3
    assert torch.equal(again.net.weight, net.weight)
    assert torch.equal(again.average.weight, first.average.weight)


def test_a_run_rejects_a_checkpoint_of_other_weights(tmp_path: Path) -> None:
    teachers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    names = [fingerprint(teacher) for teacher in teachers]
    assert names == [fingerprint(copy.deepcopy(teacher)) for teacher in teachers]
    net, settings = torch.nn.Linear(3, 3), TrainSettings(1, 1, 1e-2)
    Run("tiny", net, settings, tmp_path, made_from=names[0]).save()
    Run("tiny", net, settings, tmp_path, made_from=names[0])
    with pytest.raises(ConfigError, match=rf"tiny\.pt was made from other weights than {names[1]}.*--work"):
        Run("tiny", net, settings, tmp_path, made_from=names[1])


def test_a_run_leaves_a_bill_of_time_and_operations(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 5)
    settings = TrainSettings(4, 2, 1e-2)
    run = Run("tiny", net, settings, tmp_path, [adamw(net.parameters(), settings)])
    for _ in run.iterations():
        run.step(net(torch.ones(2, 3)).square().sum())
    bill = json.loads((tmp_path / "tiny.json").read_text(encoding="utf-8"))
    assert bill["iterations_done"] == 4
    # forward and the gradient of the weights: twice 2 x 3 x 5 multiply-adds of two operations each
    assert bill["flops"] == 4 * 2 * 2 * (2 * 3 * 5)


def test_embeddings_follow_their_tokens_to_a_new_vocabulary(tokenizer: CLIPTokenizer, tmp_path: Path) -> None:
    smaller = CLIPTokenizer.from_pretrained(train_tokenizer(tmp_path / "tokenizer", num_captions=300))
    assert len(smaller) != len(tokenizer)
    first, second = Denoiser(smaller), Denoiser(tokenizer)
    weights = export(tmp_path / "weights", build_vae(), first, smaller)
    second.load(weights, tokenizer)
    rows = [net.text_encoder.get_input_embeddings().weight for net in (first, second)]
    fox = [words.convert_tokens_to_ids("fox</w>") for words in (smaller, tokenizer)]
    assert torch.allclose(rows[0][fox[0]], rows[1][fox[1]], atol=1e-3)
    assert torch.allclose(first.unet.conv_in.weight, second.unet.conv_in.weight, atol=1e-3)


def test_scenes_are_encoded_once_on_every_canvas(tmp_path: Path) -> None:
    vae = build_vae().eval()
    first = encode_scenes(vae, tmp_path, num_scenes=25, seed=3, device="cpu")
    assert [tuple(shelf.latents.shape) for shelf in first] == [(21, 8, 16, 16), (2, 8, 24, 16), (2, 8, 16, 24)]
    modified_ns = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(modified_ns) == 3
    again = encode_scenes(vae, tmp_path, num_scenes=25, seed=3, device="cpu")
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(first, again, strict=True))
    assert modified_ns == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    other = encode_scenes(build_vae().eval(), tmp_path, num_scenes=25, seed=3, device="cpu")
    assert not any(torch.equal(a.latents, b.latents) for a, b in zip(first, other, strict=True))


def test_a_non_finite_loss_leaves_the_weights_alone(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    run = Run("tiny", net, TrainSettings(1, 1, 1e-2), tmp_path)
    before = net.weight.clone()
    run.step(net(torch.full((1, 2), math.nan)).sum())
    assert torch.equal(net.weight, before)


def test_a_layout_names_the_left_or_upper_object_first() -> None:
    source = [scene for scene in islice(scenes(2, held_out=False), 400) if scene.relation in DIRECTIONS]
    assert {scene.relation for scene in source} == DIRECTIONS
    for scene in source:
        place = (lambda placed: placed.y_px) if scene.relation in ("above", "below") else (lambda placed: placed.x_px)
        first, second = sorted(scene.objects, key=place)
        assert layout(scene) == (list(OBJECTS).index(first.name), list(OBJECTS).index(second.name))
    assert {layout(scene) for scene in islice(scenes(2, held_out=False), 50) if scene.relation is None} == {UNSAID}


def test_the_layout_loss_reads_the_last_tokens_and_ignores_unknown_layouts() -> None:
    torch.manual_seed(0)
    head, context = LayoutHead(12).requires_grad_(False), torch.randn(3, 9, 12)
    layouts = torch.tensor([(4, 7), UNSAID, (1, 0)])
    scores = torch.stack([head(states[-READ_TOKENS:]).mean(dim=0) for states in context]).view(3, 2, len(OBJECTS))
    by_hand = -sum(scores[row, side].log_softmax(0)[layouts[row, side]] for row in (0, 2) for side in (0, 1)) / 4
    assert head.loss(context, layouts) == pytest.approx(float(by_hand))
    context[:, :-READ_TOKENS] += 1
    assert head.loss(context, layouts) == pytest.approx(float(by_hand))
    assert head.loss(context[:1], torch.tensor([UNSAID])) == 0


def test_the_auxiliary_loss_moves_the_weights_and_is_not_reported(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    run = Run("tiny", net, TrainSettings(1, 1, 1e-2, warmup=1), tmp_path)
    before = net.weight.clone()
    run.step(0 * net(torch.ones(1, 2)).sum(), aside=net(torch.ones(1, 2)).sum())
    assert not torch.equal(net.weight, before)
    assert run.smooth_loss == 0


def test_interpolation_ends_at_both_denoisers(tokenizer: CLIPTokenizer) -> None:
    start, end = Denoiser(tokenizer), Denoiser(tokenizer)
    assert fingerprint(interpolate(start, end, 0.0)) == fingerprint(start)
    assert fingerprint(interpolate(start, end, 1.0)) == fingerprint(end)
    half = interpolate(start, end, 0.5).unet.conv_in.weight
    assert torch.allclose(half, (start.unet.conv_in.weight + end.unet.conv_in.weight) / 2, atol=1e-6)


def test_the_weight_of_plain_single_objects_is_configurable() -> None:
    source = list(islice(scenes(4, held_out=False), 200))
    grown = {emphasis(scene, 2.5) / emphasis(scene) for scene in source if (scene.kind, scene.size) == SINGLE}
    same = {emphasis(scene, 2.5) / emphasis(scene) for scene in source if (scene.kind, scene.size) != SINGLE}
    assert (grown, same) == ({2.5}, {1.0})


def test_training_captions_use_difficult_wordings_more_often() -> None:
    source = [scene for scene in islice(scenes(4, held_out=False), 2000) if scene.relation in ("left of", "right of")]
    rng = random.Random(0)
    lessons, exam = (sum("on its" in word(scene, rng) for scene in source) for word in (loose_caption, caption))
    assert lessons > 1.7 * exam > 0


@pytest.mark.slow
def test_a_few_iterations_of_the_denoiser_lower_the_loss(
    tokenizer: CLIPTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoiser_training, "build_unet", lambda: unet(EMBEDDED, context=TEXT_WIDTH))
    torch.manual_seed(0)
    data = [LatentScenes(list(islice(scenes(0, held_out=False), 4)), torch.randn(4, LATENT_CHANNELS, 8, 8).half())]
    settings = TrainSettings(4, 4, 1e-3, warmup=1, decay_share=0.1)
    batch, ids, layouts = next(batches(data, tokenizer, settings, 0))
    assert batch.shape == (4, LATENT_CHANNELS, 8, 8)
    assert ids.shape == (4, MAX_TOKENS)
    assert layouts.shape == (4, 2)
    losses: list[float] = []

    def look(net: Denoiser, iteration: int) -> None:
        losses.append(_loss(net, data[0], ids))

    long = train_denoiser(settings, tmp_path, data, tokenizer, None, look, look_every=1)
    assert losses[-1] < losses[0]
    assert (tmp_path / "denoiser.pt").is_file()
    brief = TrainSettings(1, 4, 1e-3, warmup=1, decay_share=0.1)
    finished = continue_denoiser("finish", long, brief, tmp_path, data, tokenizer, look, 1)
    assert len(losses) == 4 + 1
    last = torch.load(tmp_path / "finish.pt", weights_only=True)["average"]
    name = "unet.conv_in.weight"
    start = long.state_dict()[name]
    assert torch.allclose(finished.state_dict()[name], start + FINISH_SHARE * (last[name] - start), atol=1e-6)
    assert not torch.equal(last[name], start)
    again = continue_denoiser("finish", long, brief, tmp_path, data, tokenizer)
    assert fingerprint(again) == fingerprint(finished)
    with pytest.raises(ConfigError, match=r"finish\.pt was made from other weights"):
        continue_denoiser("finish", finished, brief, tmp_path, data, tokenizer)


@pytest.mark.slow
def test_tuning_the_shipped_weights_keeps_their_autoencoder_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "NEWTON_SCHULZ_STEPS", 1)  # at full width these steps take most of an iteration
    shipped = EMBEDDED_DIRECTORY
    leg = partial(train.tune, tmp_path, "cpu", batch=1, num_scenes=24, look_every=100)
    leg(iterations=1, start=shipped)
    weights = tmp_path / "weights"
    files = (path.relative_to(shipped) for path in shipped.rglob("*.*"))
    covered = {file.as_posix() for file in files if file.parts[0] not in SEPARATE} - NOT_COVERED | {"world.json"}
    assert {path.relative_to(weights).as_posix() for path in weights.rglob("*.*")} == covered
    for part, is_kept in {"vae": True, "text_encoder": False, "unet": False}.items():
        (before, after) = (load_file(next((root / part).glob("*.safetensors"))) for root in (shipped, weights))
        assert set(before) == set(after)
        assert all(torch.equal(before[name], after[name]) for name in before) == is_kept, part
    # one warm-up iteration changes little, so the weights stay close
    change = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 0 < change < 0.01
    first = torch.load(tmp_path / "tune.pt", weights_only=True)
    leg(iterations=2)
    second = torch.load(tmp_path / "tune.pt", weights_only=True)
    assert [first["iteration"], second["iteration"]] == [1, 2]
    assert first["made_from"] == second["made_from"] != ""


@torch.inference_mode()
def _loss(net: Denoiser, data: LatentScenes, ids: torch.Tensor) -> float:
    latents = data.latents.float()
    timesteps = torch.full((4,), 999)
    return float((net(torch.zeros_like(latents), timesteps, ids) + latents).square().mean())


@pytest.mark.slow
def test_training_the_autoencoder_writes_round_trip_sheets(tmp_path: Path) -> None:
    def look(net: AutoencoderKL, iteration: int) -> None:
        round_trip_sheet(net, tmp_path / f"vae-{iteration}.png")
        preview_sheet(PreviewDecoder(CONFIG), net, tmp_path / f"preview-{iteration}.png")

    train_vae(TrainSettings(2, 2, 1e-3, warmup=1), tmp_path, look=look, look_every=2)
    sheets = {path.name: decode_image(path.read_bytes()).array for path in tmp_path.glob("*.png")}
    assert {name: sheet.shape for name, sheet in sheets.items()} == {
        "vae-2.png": (2 * 128, 8 * 128, 3),
        "preview-2.png": (2 * 128, 8 * 128, 3),
    }
    truth = np.concatenate([render(scene) for scene, _ in held_out(8)], axis=1)
    assert np.array_equal(sheets["vae-2.png"][:128], truth)
