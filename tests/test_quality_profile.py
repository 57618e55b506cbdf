"""Quality profiles: which settings a quality word means on each interface, and errors of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import ConfigError
from diffserve.api.types import DiffusionParams, ModelInfo, Picture
from diffserve.media.start_picture import StartPicture
from diffserve.service.http.bodies import parse
from diffserve.service.images.inputs import Start
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.schemas import EditBody, GenerateBody
from diffserve.service.responses.response_plan import plan_image
from diffserve.service.responses.schemas import ResponseBody, Tool
from diffserve.service.responses.turns import Turn
from diffserve.settings.layers import load_settings
from diffserve.settings.quality import QUALITIES
from diffserve.settings.quality_profile import QualityPoint, QualityPoints, QualityProfile, read_profile
from tests.schedulers.test_learned import learned
from tests.service.test_capabilities import INFO, image_of
from ui.create.parameters import Form, form_of, order_of, quality_labels

CONFIG = load_settings(env={}).serve
FAST = "learned:fast"
SETTINGS = ("sampler", "num_steps", "cache_interval", "guidance_interval")


def point(sampler: str, num_steps: int, **fields: Any) -> QualityPoint:
    return QualityPoint(sampler=sampler, num_steps=num_steps, seconds=num_steps / 10, psnr_db=30.0, **fields)


BUILT_IN = QualityPoints(
    draft=point("ddim", 5), auto=point("ddim", 7), standard=point("unipc", 9), fine=point("unipc", 14),
    max=point("dpmpp_2m karras", 40),
)  # fmt: skip
POINTS = msgspec.structs.replace(
    BUILT_IN,
    draft=point(FAST, 4),
    auto=point("unipc", 8, cache_interval=2, guidance_interval=(0.0, 0.7), exact=0.9),
)
PROFILE = QualityProfile(
    model="my-model", digest=INFO.digest, guidance_scale=INFO.default_guidance_scale, measure='a "test"',
    measured_on="nowhere", points=POINTS, built_in=BUILT_IN,
)  # fmt: skip
EXPECTED: dict[str, tuple[Any, ...]] = {
    "draft": (FAST, 4, 1, (0.0, 1.0)),
    "auto": ("unipc", 8, 2, (0.0, 0.7)),
    "standard": ("unipc", 9, 1, (0.0, 1.0)),
    "fine": ("unipc", 14, 1, (0.0, 1.0)),
    "max": ("dpmpp_2m karras", 40, 1, (0.0, 1.0)),
}
EXPECTED |= {"low": EXPECTED["draft"], "medium": EXPECTED["standard"]}
EXPECTED |= dict.fromkeys(("high", "hd", "xhigh"), EXPECTED["fine"])


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    file = tmp_path / "profile.toml"
    file.write_text(PROFILE.to_toml(), encoding="utf-8")
    return file


@pytest.fixture
def info(profile_file: Path, tmp_path: Path) -> ModelInfo:
    folder = tmp_path / "samplers"
    folder.mkdir()
    (folder / "fast.json").write_text(learned(model_digest=INFO.digest + "0" * 52).to_json())
    return msgspec.structs.replace(
        INFO, quality_profile=str(profile_file), sampler_dirs=(str(folder),), shallow_share=0.3
    )


def planned(info: ModelInfo, start: Start | None = None, **fields: Any) -> ImagePlan:
    kind = GenerateBody if start is None else EditBody
    body = parse(kind, json.dumps({"prompt": "a fox", **fields}).encode())
    return plan_images(body, info, CONFIG, "img-1", start=start)


def settings_of(params: DiffusionParams) -> tuple[Any, ...]:
    return tuple(getattr(params, name) for name in SETTINGS)


def start_image(strength: float) -> Start:
    return Start(StartPicture(picture=Picture(width_px=512, height_px=512, data=bytes(512 * 512 * 3))), strength)


def test_a_profile_is_read_as_it_was_written(profile_file: Path) -> None:
    assert read_profile(profile_file) == PROFILE


@pytest.mark.parametrize("word", EXPECTED)
def test_a_word_means_the_point_of_the_profile_in_generations_and_responses(info: ModelInfo, word: str) -> None:
    plan = planned(info, quality=word)
    assert settings_of(plan.request.diffusion) == EXPECTED[word]
    assert (plan.quality, plan.warnings) == (word, ())
    tool = Tool(type="image_generation", quality=word)
    body = plan_image(ResponseBody(input="a fox"), tool, [Turn("user", "a fox")], "a fox", None, is_stream=False)
    assert settings_of(plan_images(body, info, CONFIG, "img-1").request.diffusion) == EXPECTED[word]


def test_a_request_without_quality_is_unchanged(info: ModelInfo) -> None:
    without = msgspec.structs.replace(info, quality_profile="")
    for fields in ({}, {"steps": 7}, {"sampler": "ddim"}, {"cache_interval": 3}):
        assert planned(info, **fields).request.diffusion == planned(without, **fields).request.diffusion
    assert planned(info).request.diffusion == DiffusionParams()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_inference_steps": 7}, {"steps": 7}, {"sampler": "heun"}, {"sampler_name": "Euler a"},
        {"sigma_schedule": "karras"}, {"scheduler": "Karras"}, {"spacing": "leading"}, {"eta": 0.5},
        {"sampler": FAST}, {"prompt": "a fox <lora:sdxl_lightning_4step_lora>"},
    ],
    ids=str,
)  # fmt: skip
def test_explicit_steps_or_sampler_win_and_only_missing_steps_follow_the_quality(
    info: ModelInfo, fields: dict[str, Any]
) -> None:
    without = msgspec.structs.replace(info, quality_profile="")
    for word in ("draft", "auto", "max"):
        diffusion = planned(info, quality=word, **fields).request.diffusion
        assert diffusion == planned(without, quality=word, **fields).request.diffusion
        is_fixed = "steps" in str(fields) or fields.get("sampler") == FAST
        assert (diffusion.num_steps in (None, 7)) == (is_fixed or word == "auto")


def test_explicit_savings_win(info: ModelInfo) -> None:
    diffusion = planned(info, quality="auto", cache_interval=3).request.diffusion
    assert settings_of(diffusion) == ("unipc", 8, 3, (0.0, 0.7))
    diffusion = planned(info, quality="auto", guidance_interval=[0.1, 0.9]).request.diffusion
    assert settings_of(diffusion) == ("unipc", 8, 2, (0.1, 0.9))
    undivided = msgspec.structs.replace(info, shallow_share=None)
    assert planned(undivided, quality="auto").request.diffusion.cache_interval == 1


def test_requests_that_learned_samplers_refuse_use_the_built_in_points(info: ModelInfo) -> None:
    built_in = ("ddim", 5, 1, (0.0, 1.0))
    assert settings_of(planned(info, start_image(0.5), quality="draft").request.diffusion) == built_in
    assert settings_of(planned(info, start_image(1.0), quality="draft").request.diffusion) == EXPECTED["draft"]
    assert settings_of(planned(info, start_image(0.5), quality="auto").request.diffusion) == EXPECTED["auto"]
    values: dict[str, Any] = {"guidance_scale": 3.0, "similarity_threshold": 0.9, "switch_at": 0.5}
    for name, value in values.items():
        assert settings_of(planned(info, quality="draft", **{name: value}).request.diffusion) == built_in
    same = planned(info, quality="draft", guidance_scale=INFO.default_guidance_scale)
    assert settings_of(same.request.diffusion) == EXPECTED["draft"]
    unlearned = msgspec.structs.replace(info, sampler_dirs=())
    assert settings_of(planned(unlearned, quality="draft").request.diffusion) == built_in


def test_a_profile_of_another_model_is_ignored_with_a_warning(info: ModelInfo) -> None:
    other = msgspec.structs.replace(info, digest="f" * 12)
    plan = planned(other, quality="draft")
    assert settings_of(plan.request.diffusion) == (None, 12, 1, (0.0, 1.0))
    (warning,) = plan.warnings
    assert "profile.toml was measured with my-model [0123456789], not with my-model [ffffffffff]" in warning
    assert planned(other).warnings == ()
    shipped = msgspec.structs.replace(INFO, model_id="embedded", quality_profile="auto")
    assert planned(shipped, quality="draft").warnings == ()
    assert planned(shipped, quality="draft").request.diffusion.num_steps == 12


def test_a_profile_that_was_damaged_after_the_start_is_ignored_with_a_warning(
    info: ModelInfo, profile_file: Path
) -> None:
    profile_file.write_text("model = ", encoding="utf-8")
    plan = planned(info, quality="fine")
    assert plan.request.diffusion.num_steps == 60
    assert "profile.toml is not valid TOML" in plan.warnings[0]


CHANGES: dict[str, tuple[str, str, str]] = {
    "text": ("num_steps = 40", 'num_steps = "many"', "points.max.num_steps is 'many'; expected `int`"),
    "zero": ("num_steps = 40", "num_steps = 0", "points.max: num_steps is 0; ask for at least 1 step"),
    "sampler": ('"dpmpp_2m karras"', '"dmp"', "points.max: sampler is 'dmp'"),
    "interval": ("cache_interval = 2", "cache_interval = 0", "points.auto: cache_interval is 0; it must lie between"),
    "unknown": ("cache_interval = 2", "cache = 2", "points.auto: object contains unknown field `cache`"),
    "word": ("[points.max]", "[points.most]", "points: object contains unknown field `most`"),
    "missing": ("num_steps = 40", "", "points.max: object missing required field `num_steps`"),
    "learned": ('"ddim"', '"learned:fast"', "built_in.draft.sampler is 'learned:fast'; give a sampler"),
    "toml": ("digest = ", "digest ", "is not valid TOML"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_errors_of_a_profile_name_file_key_and_value_before_a_model_is_loaded(
    profile_file: Path, tmp_path: Path, change: str
) -> None:
    before, after, message = CHANGES[change]
    text = profile_file.read_text(encoding="utf-8")
    assert before in text
    profile_file.write_text(text.replace(before, after), encoding="utf-8")
    config = tmp_path / "config.toml"
    config.write_text(f"[model]\nquality_profile = '{profile_file}'\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(config=config, env={})
    assert message in caught.value.message
    assert str(profile_file) in caught.value.message
    assert "model.quality_profile" in caught.value.message


def test_a_missing_profile_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the quality profile .*gone\.toml.*diffserve calibrate"):
        load_settings(env={"DIFFSERVE_MODEL_QUALITY_PROFILE": str(tmp_path / "gone.toml")})


def test_capabilities_and_the_page_name_the_points(info: ModelInfo) -> None:
    image = image_of(info)
    assert list(image.quality_steps.items()) == [
        ("draft", 4), ("auto", 8), ("standard", 9), ("fine", 14), ("max", 40)
    ]  # fmt: skip
    assert image.quality_points["auto"].guidance_interval == (0.0, 0.7)
    assert {*image.quality_points} == {*QUALITIES}
    assert quality_labels(image)[1] == ("Auto, 8 steps", "auto")
    assert image_of(INFO).quality_points == {}


@pytest.mark.parametrize("word", QUALITIES)
def test_the_page_sends_the_quality_and_the_server_resolves_it(info: ModelInfo, word: str) -> None:
    image = image_of(info)
    fields = order_of(Form(prompt="a fox", quality=word), image).fields
    assert "num_inference_steps" not in fields
    plan = planned(info, quality=fields["quality"])
    assert settings_of(plan.request.diffusion) == EXPECTED[word]
    typed = order_of(Form(prompt="a fox", quality=word, steps="7"), image).fields
    assert (typed["num_inference_steps"], "quality" in typed) == (7, False)
    selected = order_of(Form(prompt="a fox", quality=word, sampler=FAST), image).fields
    assert (selected["num_inference_steps"], "quality" in selected) == (4, False)


def test_the_page_repeats_an_image_by_its_own_steps_and_sampler(info: ModelInfo) -> None:
    form = form_of("a fox\nSteps: 8, Sampler: DDIM, CFG scale: 7, Seed: 1, Size: 512x512", image_of(info))
    assert (form.quality, form.steps, form.sampler) == (None, "8", "ddim")


def test_the_command_line_runs_the_point(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffserve.cli import main
    from diffserve.runtime.model import load_model

    path = tiny_model("sd15")
    digest = load_model(path, dtype="float32", device="cpu").info.digest
    points = QualityPoints(**dict.fromkeys(QUALITIES, point("unipc", 3)))
    profile = msgspec.structs.replace(PROFILE, digest=digest, points=points, built_in=None)
    (tmp_path / "profile.toml").write_text(profile.to_toml(), encoding="utf-8")
    config = tmp_path / "config.toml"
    config.write_text(f"[model]\nnum_steps = 2\nquality_profile = '{tmp_path / 'profile.toml'}'\n", encoding="utf-8")

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main([
                "generate", "a fox", "--model", str(path), "--config", str(config), "--size", "64x64", "--seed", "1",
                "-o", str(tmp_path / "fox.png"), "--overwrite", *arguments,
            ])  # fmt: skip
        assert caught.value.code == 0
        return capsys.readouterr().out

    assert " 3 steps of unipc" in run("--quality", "max")
    assert " 3 steps of unipc" in run("--quality", "auto")
    assert " 1 step of ddim" in run("--quality", "draft", "--sampler", "ddim")
    assert " 2 steps of " in run()
