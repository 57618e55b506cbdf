"""What is loaded, what is refused, and that nothing foreign is ever run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffserve.api.errors import ConfigError, ModelLoadError, ModelNotFound
from diffserve.runtime.language import LanguageModel, LayerShape, load_language_model, loading
from diffserve.runtime.language.attention import register
from diffserve.runtime.language.weight_only import compute_choice
from diffserve.runtime.loading.library_imports import import_quietly
from tests.device import DEVICE
from tests.runtime.language import tiny
from tests.runtime.language.conftest import Load

KINDS = (*tiny.KINDS, *tiny.OTHER_KINDS)


def load(directory: Path, **settings: Any) -> LanguageModel:
    return load_language_model(directory, **{"dtype": "float32", "device": DEVICE, **settings})


def change_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_is_loaded_and_described(kind: str, language: Load) -> None:
    model = language(kind)
    assert model.info.architecture == type(tiny.make_network(kind)).__name__
    assert (model.info.vocab_size, model.info.context_tokens) == (tiny.VOCAB_SIZE, tiny.CONTEXT_TOKENS)
    assert (model.info.model_id, model.end_ids, model.info.dtype) == (kind, (tiny.END_ID,), "float32")
    assert len(model.layers) == 2
    assert len(model.info.digest) == 64


def test_windows_and_softcaps_are_seen_layer_by_layer(language: Load) -> None:
    assert language("gemma2").layers == (LayerShape(2, 16, 7, 5.0), LayerShape(2, 16, None, 5.0))
    assert language("mistral").layers == (LayerShape(2, 8, 7), LayerShape(2, 8, 7))
    assert language("llama").layers == (LayerShape(2, 8), LayerShape(2, 8))


def test_sliding_layers_of_qwen2_keep_their_window(tmp_path: Path) -> None:
    settings = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model = load(tiny.save(tmp_path / "qwen2", "qwen2", **settings))
    assert [layer.window for layer in model.layers] == [None, 5]


def test_several_end_tokens_are_all_taken(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    settings = {"eos_token_id": [tiny.END_ID, 7]}
    (directory / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert load(directory).end_ids == (tiny.END_ID, 7)


def test_the_digest_tells_weights_apart_and_the_page_key_precisions_too(tmp_path: Path, language: Load) -> None:
    other = load(tiny.save(tmp_path / "other", "llama", seed=1))
    same = load(tiny.save(tmp_path / "same", "llama"), dtype="int8")
    assert other.info.digest != language("llama").info.digest == same.info.digest
    assert len({model.spec().digest for model in (other, same, language("llama"))}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_stay_near_the_float32_model(dtype: str, directory: Callable[[str], Path], language: Load) -> None:
    model = load(directory("llama"), dtype=dtype)
    assert model.spec().dtype == model.dtype == getattr(torch, dtype)
    ids = tiny.random_ids(20, seed=0)
    exact = language("llama").plain_logits(ids)
    assert (model.plain_logits(ids).float() - exact).abs().max() < 0.05 * exact.abs().max()


# What is refused --------------------------------------------------------------------------------------------------


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model directory"):
        load(tmp_path / "nowhere")


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickle"):
        load(directory)


def test_code_that_comes_with_weights_is_never_run(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Evil: pass\n", encoding="utf-8")
    change_config(directory, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    assert load(directory).info.architecture == "LlamaForCausalLM"
    change_config(directory, model_type="evil")
    with pytest.raises(ModelLoadError):
        load(directory)
    assert not (tmp_path / "run").exists()


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys.*layers\.1\.mlp\.up_proj"):
        load(directory)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    directory = change_config(tiny.save(tmp_path / "llama", "llama"), intermediate_size=40)
    with pytest.raises(ModelLoadError):
        load(directory)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError):
        load(directory)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    (directory / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="not JSON"):
        load(directory)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    for file in directory.glob("token*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load(directory)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, None),
        (
            {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 80}
            | {"short_factor": [1.25] * 4, "long_factor": [2.0] * 4},
            80,
        ),
    ],
)
def test_texts_stay_within_the_length_from_which_positions_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any], longest: int | None
) -> None:
    directory = tiny.save(tmp_path / "llama", "llama")
    directory = change_config(directory, rope_parameters={"rope_theta": 10000.0, **rope})
    model = load(directory)
    longest = longest or json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    assert model.info.context_tokens == longest
    ids = tiny.random_ids(longest, seed=0)
    reference = import_quietly("transformers", "AutoModelForCausalLM").from_pretrained(directory).eval().to(DEVICE)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids], device=DEVICE)).logits[0]
    monkeypatch.setattr(loading, "PROBE_CUTS", ((0, 9), (9, 10), (10, longest)))
    assert torch.allclose(loading._paged_logits(model, ids), expected, atol=1e-3)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_rotations_that_do_not_depend_on_the_length_are_served(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type != "linear":
        rope["original_max_position_embeddings"] = 80
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    load(change_config(tiny.save(tmp_path / "llama", "llama"), rope_parameters=rope))


def test_layers_of_an_unknown_kind_are_refused() -> None:
    config = tiny.make_config("llama")
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelLoadError, match="linear_attention"):
        loading.check_config(config, "here")


def test_an_encoder_decoder_is_refused() -> None:
    config = tiny.make_config("llama")
    config.is_encoder_decoder = True
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        loading.check_config(config, "here")


def test_a_class_with_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Mamba keeps a running state, no keys and values."""
    from diffserve.runtime.loading.library_imports import hushed, import_quietly

    config = import_quietly("transformers", "MambaConfig")(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=tiny.END_ID
    )
    with hushed("transformers"):
        import_quietly("transformers", "MambaForCausalLM")(config).save_pretrained(tmp_path / "mamba")
        tiny.make_tokenizer().save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelLoadError, match=r"linear_attention|MambaForCausalLM"):
        load(tmp_path / "mamba")


def test_attention_that_gives_other_logits_over_pages_is_refused(language: Load) -> None:
    """Here two layers write to the same pages; whatever the reason, the comparison finds it."""
    network = tiny.make_network("llama").to(DEVICE)
    network.set_attn_implementation(register())
    source = language("llama")
    broken = LanguageModel(network, source.tokenizer, source.info, source.layers, source.device, source.dtype)
    loading.check_parity(broken)
    network.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelLoadError, match="other logits over pages"):
        loading.check_parity(broken)


# Weights only -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_int8_weights_are_smaller_and_near(kind: str, directory: Callable[[str], Path], language: Load) -> None:
    model, exact = load(directory(kind), dtype="int8"), language(kind)
    assert model.info.dtype == "int8"
    assert model.info.weights_bytes < exact.info.weights_bytes
    ids = tiny.random_ids(30, seed=0)
    expected = exact.plain_logits(ids)
    assert (model.plain_logits(ids).float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_int4_weights_are_near_or_refused_with_the_way_out(
    kind: str, directory: Callable[[str], Path], language: Load
) -> None:
    from diffserve.runtime.language.weight_only import CpuInt4Linear, int4_problem

    problem = int4_problem(torch.device(DEVICE))
    if problem is not None:
        with pytest.raises(ConfigError, match=r"int4.*choose int8"):
            load(directory(kind), dtype="int4")
        return
    model = load(directory(kind), dtype="int4")
    assert any(isinstance(part, CpuInt4Linear) for part in model.network.modules())
    ids = tiny.random_ids(30, seed=0)
    expected = language(kind).plain_logits(ids)
    assert (model.plain_logits(ids).float() - expected).abs().mean() < 0.4 * expected.abs().mean()


def test_the_int4_kernel_multiplies_what_its_codes_say() -> None:
    from diffserve.runtime.language.weight_only import GROUP_WEIGHTS, CpuInt4Linear, int4_problem

    problem = int4_problem(torch.device("cpu"))
    if problem is not None:
        pytest.skip(problem)
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
    groups = exact.weight.float().view(32, -1, GROUP_WEIGHTS)
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    hidden = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    error = (CpuInt4Linear(exact)(hidden) - exact(hidden)).abs().float()
    assert float(error.max()) < float(step.max()) * 0.5 * float(hidden.abs().float().sum(-1).max())
    assert float(error.mean()) > 0


def test_an_unknown_dtype_names_the_known_ones(directory: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="float32"):
        load(directory("llama"), dtype="int3")


@pytest.mark.parametrize("dtype", ["int8_dynamic", "float8"])
def test_precisions_of_image_models_are_refused_for_texts(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"'{dtype}', which no language model has; choose one of auto"):
        compute_choice("cpu", dtype)
