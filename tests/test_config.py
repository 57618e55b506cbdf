"""Settings: layered files, the origin of every value, and error messages with a fix."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from diffserve.api.errors import ConfigError
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY, WORLD_FILE
from diffserve.settings.config import DTYPES
from diffserve.settings.layers import KEYS, PROFILES, REMOVED, REMOVED_VALUE_HINTS, Flag, configs_dir, load_settings


def user_file(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("profile", PROFILES)
def test_built_in_profile_is_complete_and_every_value_has_an_origin(profile: str) -> None:
    settings = load_settings(model=profile, env={})
    assert settings.model.model_id == profile
    assert sorted(settings.origins) == sorted(KEYS)
    assert set(settings.origins.values()) == {f"configs/{profile}.toml", "configs/serve.toml"}


def test_all_built_in_files_exist() -> None:
    assert sorted(path.name for path in configs_dir().glob("*.toml")) == [
        "edge.toml",
        "embedded-turbo.toml",
        "embedded.toml",
        "sd15.toml",
        "sdxl.toml",
        "serve.toml",
    ]


@pytest.mark.parametrize("profile", PROFILES)
def test_config_may_name_a_built_in_profile(profile: str) -> None:
    assert load_settings(config=profile, env={}).model == load_settings(model=profile, env={}).model


def test_edge_overlays_any_model_and_the_environment_overrides_edge() -> None:
    plain, edge = load_settings(model="sd15", env={}), load_settings(model="sd15", config="edge", env={})
    assert (edge.model.dtype, edge.engine.threads, edge.serve.spare_engine, edge.text.model) == ("int8", 1, False, "")
    assert msgspec.structs.replace(edge.model, dtype=plain.model.dtype) == plain.model
    assert edge.origins["engine.threads"] == "configs/edge.toml"
    assert edge.origins["engine.max_decodes_per_tick"] == "configs/edge.toml"
    assert load_settings(config="edge", env={"DIFFSERVE_ENGINE_THREADS": "2"}).engine.threads == 2
    assert load_settings(config="edge", env={}).model.path == "embedded"


def test_model_option_overrides_every_other_path(tmp_path: Path) -> None:
    file = user_file(tmp_path, "[model]\npath = '/somewhere'\n")
    settings = load_settings(model="embedded", config=file, env={"DIFFSERVE_MODEL_PATH": "/elsewhere"})
    assert settings.model.path == "embedded"


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[serve]\nport = 8123\n", encoding="utf-8-sig")
    assert load_settings(config=str(file), env={}).serve.port == 8123


def test_embedded_model_is_the_default() -> None:
    settings = load_settings(env={})
    assert settings.model.path == "embedded"
    assert settings.model.good_sizes[0] == (128, 128)
    assert settings.serve.host == "127.0.0.1"


def test_each_layer_overrides_the_lower_ones_and_is_recorded_as_origin(tmp_path: Path) -> None:
    file = user_file(tmp_path, "[serve]\nport = 1111\nhost = '127.0.0.2'\nlog_level = 'debug'\n")
    settings = load_settings(
        config=file,
        env={"DIFFSERVE_SERVE_PORT": "2222", "DIFFSERVE_SERVE_LOG_LEVEL": "error", "PATH": "/bin"},
        flags={"serve.port": Flag("--port", 3333), "serve.host": Flag("--host", None)},
    )
    assert (settings.serve.port, settings.origins["serve.port"]) == (3333, "--port")
    assert (settings.serve.log_level, settings.origins["serve.log_level"]) == ("error", "DIFFSERVE_SERVE_LOG_LEVEL")
    assert (settings.serve.host, settings.origins["serve.host"]) == ("127.0.0.2", str(file))
    assert settings.origins["serve.max_body_bytes"] == "configs/serve.toml"


def test_environment_text_is_converted_to_the_type_of_its_field() -> None:
    settings = load_settings(
        env={
            "DIFFSERVE_MODEL_GOOD_SIZES": "96x96, 96x128",
            "DIFFSERVE_ENGINE_MAX_ROWS": "4",
            "DIFFSERVE_ENGINE_DETERMINISTIC": "true",
            "DIFFSERVE_MODEL_GUIDANCE_SCALE": "2.5",
        }
    )
    assert settings.model.good_sizes == ((96, 96), (96, 128))
    assert settings.engine.max_rows == 4
    assert settings.engine.deterministic is True
    assert settings.model.guidance_scale == 2.5


def test_only_the_embedded_models_use_the_embedded_rewriter_by_default() -> None:
    models = {profile: load_settings(model=profile, env={}).text.model for profile in PROFILES}
    assert models == {"embedded": "embedded", "embedded-turbo": "embedded", "sd15": "", "sdxl": ""}


def test_int4_is_accepted_for_a_language_model_and_refused_for_an_image_model() -> None:
    assert load_settings(env={"DIFFSERVE_TEXT_DTYPE": "int4"}).text.dtype == "int4"
    with pytest.raises(ConfigError, match="DIFFSERVE_MODEL_DTYPE: dtype is 'int4'"):
        load_settings(env={"DIFFSERVE_MODEL_DTYPE": "int4"})


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_removed_key_is_ignored_with_a_warning_that_names_its_replacement(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, name = key.split(".")
    file, variable = user_file(tmp_path, f"[{table}]\n{name} = 'x'\n"), f"DIFFSERVE_{table}_{name}".upper()
    assert load_settings(config=file, env={variable: "x"}) == load_settings(env={})
    for where in (f"{file}: {key}", variable):
        assert f"{where} has no effect: it was removed in 0.2; {REMOVED[key]}" in caplog.messages
    assert key not in KEYS


def test_the_removed_dtype_float8_becomes_bfloat16_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = user_file(tmp_path, "[model]\ndtype = 'float8'\n[models.b]\npath = 'embedded'\ndtype = 'fp8'\n")
    settings = load_settings(config=file, env={})
    assert [model.dtype for model in (settings.model, *settings.models)] == ["bfloat16"] * 2
    assert load_settings(env={"DIFFSERVE_MODEL_DTYPE": "float8"}).model.dtype == "bfloat16"
    assert load_settings(env={}, flags={"model.dtype": Flag("--dtype", "fp8")}).model.dtype == "bfloat16"
    assert caplog.messages == [
        f"{where}, which was removed in 0.2; bfloat16 is used. Set bfloat16, or int8 where memory is short."
        for where in (
            f"{file}: model.dtype is float8",
            f"{file}: models.b: model.dtype is fp8",
            "DIFFSERVE_MODEL_DTYPE is float8",
            "--dtype is fp8",
        )
    ]


@pytest.mark.parametrize("value", ["serial", "static", "same-key"])
def test_a_removed_policy_is_ignored_with_a_warning_that_names_its_replacement(
    value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = user_file(tmp_path, f"[engine]\npolicy = '{value}'\n")
    settings = load_settings(config=file, env={"DIFFSERVE_ENGINE_POLICY": value})
    assert settings.engine.policy == "latency"
    for where in (f"{file}: engine.policy", "DIFFSERVE_ENGINE_POLICY"):
        hint = REMOVED_VALUE_HINTS["engine.policy"]
        assert f"{where} is '{value}', which has no effect: it was removed in 0.2; {hint}" in caplog.messages


def test_auto_becomes_none_for_a_number_and_stays_auto_otherwise() -> None:
    engine = load_settings(env={}).engine
    assert engine.max_rows is None
    assert engine.deterministic == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nprot = 1\n", "unknown key serve.prot; did you mean port?"),
        ("[sevre]\nport = 1\n", r"unknown table [sevre]; did you mean serve?"),
        ("port = 1\n", "unknown table [port]"),
        ("engine = 3\n", "engine is 3; write it as a table, [engine], with keys below it."),
        ("[serve]\nport = 'high'\n", "serve.port is 'high': give a whole number."),
        ("[model]\ngood_sizes = [['a', 64]]\n", "good_sizes is [['a', 64]]: give a list of sizes"),
        ("[model]\ngood_sizes = 64\n", "good_sizes is 64: give a list of sizes, such as [[512, 512], [768, 512]]."),
        ("[serve]\nwebhook_hosts = [1]\n", 'webhook_hosts is [1]: give a list of texts, such as ["one", "two"].'),
        ("[serve]\ndevices = 'cpu'\n", "serve.devices is 'cpu': give a list of texts"),
        ("[serve]\nport = 70000\n", "port is 70000; it must lie between 0"),
        ("[serve]\nhost = ' '\n", "host is empty"),
        ("[serve]\nlog_level = 'loud'\n", "serve.log_level is 'loud': choose one of debug, info, warning, error."),
        ("[serve]\nmax_size_px = 8\n", "max_size_px is 8; it must be 64 or more."),
        ("[serve]\nrequest_timeout_s = inf\n", "request_timeout_s is inf"),
        ("[model]\nsampler = 'eular'\n", "'eular'"),
        ("[model]\nspacing = 'wide'\n", "spacing is 'wide'; choose one of auto, leading, linspace, quadratic, "),
        ("[model]\ndtype = 'float6'\n", f"choose one of {', '.join(DTYPES)}."),
        ("[model]\nnum_steps = 0\n", "model.num_steps: num_steps is 0; ask for at least 1 step."),
        ("[model]\ngood_sizes = [[128]]\n", "model.good_sizes is [[128]]: give a list of sizes"),
        ("[model]\ngood_sizes = [[0, 128]]\n", "every side must be 1 px or more"),
        ("[model]\nmax_side_px = 100\n", "max_side_px is 100; good_sizes has a side of 192 px."),
        ("[engine]\nmax_rows = 1\n", "max_rows is 1; it must lie between 2 and 256: a guided image needs 2 rows"),
        ("[engine]\nmax_rows = 1_000_000\n", "max_rows is 1000000; it must lie between 2 and 256"),
        ("[engine]\nmax_lanes = 1_000_000_000_000\n", "max_lanes is 1000000000000; it must lie between"),
        ("[engine]\nslo_scale = inf\n", "slo_scale is inf; it must lie between"),
        ("[engine]\npolicy = 'fair'\n", "engine.policy: policy is 'fair'; choose one of latency, throughput, goodput"),
        ("[engine]\nslo_scale = 0.5\n", "slo_scale is 0.5; it must lie between 1"),
        ("[text]\nmax_batch_tokens = 1_000_000_000_000\n", "max_batch_tokens is 1000000000000; it must lie between"),
        ("[text]\nmax_ngram = 3\nmin_ngram = 4\n", "max_ngram is 3 and min_ngram 4; max_ngram must not be smaller."),
        ("[engine]\ndeterministic = 'maybe'\n", "engine.deterministic is 'maybe': choose one of true, false, auto."),
        ("[text]\ntime_share = 0\n", "text.time_share: time_share is 0.0; it must lie between 0 and 1"),
        ("[text]\ntime_share = nan\n", "time_share is nan"),
        ("[text]\ndtype = 'int2'\n", "text.dtype: dtype is 'int2'; choose one of auto, float32"),
        ("[text]\nrewriter_entropy = -1.0\n", "rewriter_entropy is -1.0; it must be a positive number"),
        ("[text]\nrewriter_style = ''\n", "rewriter_style is empty; give auto or a style's name."),
        ("[text]\nmax_sequences = 0\n", "text.max_sequences: max_sequences is 0; it must lie between 1 and 4,096."),
        ("[text]\nmodle = 'x'\n", "unknown key text.modle; did you mean model?"),
        ("[serve\n", "is not valid TOML"),
        (f"a = {'[' * 5000}", "is not valid TOML: it is nested too deeply"),
    ],
)
def test_error_about_a_file_names_the_file_the_key_and_the_value(tmp_path: Path, text: str, message: str) -> None:
    file = user_file(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_settings(config=file, env={})
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message
    assert not caught.value.message.endswith("?.")


def test_error_about_a_variable_names_it() -> None:
    with pytest.raises(ConfigError, match="DIFFSERVE_SERVE_PORT is 'x'"):
        load_settings(env={"DIFFSERVE_SERVE_PORT": "x"})
    with pytest.raises(ConfigError, match=r"did you mean DIFFSERVE_SERVE_PORT"):
        load_settings(env={"DIFFSERVE_SERVER_PORT": "8000"})
    with pytest.raises(ConfigError, match=r"GOOD_SIZES is '64': give sizes such as 512x512, 768x512\.$"):
        load_settings(env={"DIFFSERVE_MODEL_GOOD_SIZES": "64"})


def test_variables_of_the_clients_are_not_settings() -> None:
    """A shell that exports the address of a server can also start one."""
    variables = {"DIFFSERVE_SERVER": "http://127.0.0.1:8000", "DIFFSERVE_API_KEY": "key"}
    assert load_settings(env=variables) == load_settings(env={})


def test_error_about_an_option_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^--sampler: "):
        load_settings(env={}, flags={"model.sampler": Flag("--sampler", "eular")})


def test_a_number_of_thousands_of_digits_is_invalid_toml(tmp_path: Path) -> None:
    file = user_file(tmp_path, f"[serve]\nport = {'9' * 5000}\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_settings(config=str(file), env={})


def test_error_about_a_missing_file_lists_the_built_in_choices() -> None:
    with pytest.raises(ConfigError, match=r"no-such.toml.*No such file.*embedded, embedded-turbo, sd15, sdxl"):
        load_settings(config="no-such.toml", env={})


def diffusers_directory(root: Path, *, sample_size: int, is_sdxl: bool = False, **scheduler: object) -> Path:
    files = {
        "unet": ("config.json", {"sample_size": sample_size}),
        "vae": ("config.json", {"block_out_channels": [1, 1, 1, 1]}),
        "scheduler": ("scheduler_config.json", scheduler),
    }
    for folder, (name, content) in files.items():
        (root / folder).mkdir(parents=True)
        (root / folder / name).write_text(json.dumps(content), encoding="utf-8")
    if is_sdxl:
        (root / "text_encoder_2").mkdir()
    return root


def test_model_path_starts_from_the_profile_of_its_family(tmp_path: Path) -> None:
    path = diffusers_directory(tmp_path / "My Model", sample_size=128, is_sdxl=True)
    settings = load_settings(model=str(path), env={})
    assert settings.model.path == str(path)
    assert settings.model.model_id == "my-model"
    assert settings.model.good_sizes[0] == (1024, 1024)
    assert settings.origins["model.path"] == "--model"
    assert settings.origins["model.guidance_scale"] == "configs/sdxl.toml"


def test_further_models_have_names_and_inherit_user_set_keys_of_the_first(tmp_path: Path) -> None:
    path = diffusers_directory(tmp_path / "My Model", sample_size=128, is_sdxl=True)
    file = user_file(
        tmp_path,
        f"[model]\ndtype = 'float32'\nnum_steps = 9\n[models]\nturbo = 'embedded-turbo'\n"
        f"[models.photo]\npath = '{path}'\nguidance_scale = 2\n",
    )
    settings = load_settings(config=file, env={}, models=[str(path), "again=embedded"])
    models_by_name = {model.model_id: model for model in settings.models}
    assert list(models_by_name) == ["turbo", "photo", "my-model", "again"]
    assert {model.dtype for model in models_by_name.values()} == {"float32"}
    assert (settings.model.num_steps, models_by_name["again"].num_steps, models_by_name["turbo"].num_steps) == (
        9,
        25,
        4,
    )
    assert (models_by_name["photo"].path, models_by_name["photo"].guidance_scale) == (str(path), 2.0)
    assert models_by_name["photo"].good_sizes[0] == (1024, 1024)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models]\n'../x' = 'embedded'\n", "models.../x: a model name may have letters"),
        ("[models]\nx = 3\n", "models.x is 3; give a path, or a table"),
        ("[models]\nx = '/nowhere'\n", "models.x: there is no model at '/nowhere'"),
        ("[models]\nembedded = 'embedded-turbo'\n", "two models are called 'embedded'"),
        ("[models.x]\npath = 'embedded'\nnum_step = 3\n", "models.x: unknown key num_step; did you mean num_steps?"),
        ("[models.x]\npath = 'embedded'\nnum_steps = 0\n", "models.x: model.num_steps: num_steps is 0"),
        ("models = 3\n", "models is 3; write it as a table"),
    ],
)
def test_error_about_a_further_model_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(config=user_file(tmp_path, text), env={})
    assert message in error.value.message


def test_size_and_spacing_are_read_from_the_model_directory(tmp_path: Path) -> None:
    path = diffusers_directory(
        tmp_path / "sd2", sample_size=96, timestep_spacing="trailing", rescale_betas_zero_snr=True
    )
    model = load_settings(model=str(path), env={}).model
    assert model.good_sizes == ((768, 768),)
    assert (model.spacing, model.sampler) == ("trailing", "dpmpp_2m")


def test_copy_of_the_embedded_model_has_the_same_profile_and_its_own_name(tmp_path: Path) -> None:
    copy = shutil.copytree(EMBEDDED_DIRECTORY, tmp_path / "Copy")
    model, embedded = load_settings(model=str(copy), env={}).model, load_settings(env={}).model
    assert model == replace(embedded, model_id="copy", path=str(copy))
    (copy / WORLD_FILE).write_text("{")
    assert load_settings(model=str(copy), env={}).model.good_sizes == ((128, 128),), "like any other model"


def test_user_file_overrides_values_of_the_model_directory_that_it_names(tmp_path: Path) -> None:
    path = diffusers_directory(tmp_path / "sd2", sample_size=96, timestep_spacing="trailing")
    file = user_file(tmp_path, f"[model]\npath = {str(path)!r}\nspacing = 'leading'\n")
    settings = load_settings(config=file, env={})
    assert settings.model.path == str(path)
    assert settings.model.spacing == "leading"
    assert settings.origins["model.good_sizes"] == str(path)


@pytest.mark.parametrize(
    ("tensor", "profile"),
    [("conditioner.embedders.1.model.text_projection", "sdxl"), ("model.diffusion_model.out.0.weight", "sd15")],
)
def test_family_of_a_single_file_is_detected_from_its_header(tmp_path: Path, tensor: str, profile: str) -> None:
    header = json.dumps({tensor: {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    file = tmp_path / "painter.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    settings = load_settings(model=str(file), env={})
    assert settings.origins["model.sampler"] == f"configs/{profile}.toml"
    assert settings.model.model_id == "painter"


def test_single_file_with_zero_terminal_snr_uses_trailing_spacing(tmp_path: Path) -> None:
    header = json.dumps({"ztsnr": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    file = tmp_path / "painter.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    model = load_settings(model=str(file), env={}).model
    assert (model.sampler, model.spacing) == ("dpmpp_2m", "trailing")


def test_unreadable_model_is_reported_only_by_the_loader(tmp_path: Path) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"\xff" * 9)
    assert load_settings(model=str(file), env={}).model.path == str(file)
    assert load_settings(model=str(tmp_path / "nowhere"), env={}).model.model_id == "nowhere"
