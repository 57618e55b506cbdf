"""Learnt words: every layout of their files, read as diffusers reads them, and refused where they cannot be."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffserve.api.errors import InvalidRequest, ModelNotFound
from diffserve.media.infotext import parse_infotext, write_infotext
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.text.learnt_words import read_words
from tests.device import DEVICE, tolerance
from tests.engine.pipelines import image_request
from tests.runtime.conftest import PIPELINES, LoadTiny
from tests.runtime.paged_prompts import pages_of

DIM = 64
PROMPTS = ("a sloth cat", "red, sloth on the sloth", "sloth")
NUM_VECTORS = (1, 3)


def vectors(count: int, seed: int = 7) -> torch.Tensor:
    return torch.randn((count, DIM), generator=torch.Generator().manual_seed(seed))


def save(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content, path)
    return path


def knowing(model: DiffusionModel, directory: Path, folder: Path) -> DiffusionModel:
    """Load ``model`` of ``directory`` again, with the learnt words in ``folder``."""
    profile = msgspec.structs.replace(model.profile, embeddings_dir=str(folder), probe=False)
    return load_model(directory, dtype="float32", device=DEVICE, profile=profile)


def encode(model: DiffusionModel, prompt: str) -> torch.Tensor:
    return model.text.encode(prompt, width_px=64, height_px=64).cond


@pytest.mark.parametrize("count", NUM_VECTORS)
@pytest.mark.parametrize("kind", ["sd15", "sd2", "sdxl"])
def test_words_are_read_as_by_diffusers(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path, kind: str, count: int
) -> None:
    first, second = vectors(count), vectors(count, seed=8)
    is_pair = kind == "sdxl"
    save(tmp_path / "sloth.safetensors", {"clip_l": first, "clip_g": second} if is_pair else {"emb_params": first})
    model = knowing(tiny(kind), tiny_model(kind), tmp_path)
    with hushed("transformers", "diffusers"):
        reference_pipeline = import_quietly(
            "diffusers", PIPELINES.get(kind, "StableDiffusionPipeline")
        ).from_pretrained(
            str(tiny_model(kind)), **({} if is_pair else {"safety_checker": None, "requires_safety_checker": False})
        )
        places = (("text_encoder", "tokenizer", first), ("text_encoder_2", "tokenizer_2", second))[: 1 + is_pair]
        for encoder, tokenizer, learnt in places:
            where = {
                "text_encoder": getattr(reference_pipeline, encoder),
                "tokenizer": getattr(reference_pipeline, tokenizer),
            }
            reference_pipeline.load_textual_inversion(
                {"sloth": learnt if count > 1 else learnt[0]}, token="sloth", **where
            )
        reference_pipeline.to(DEVICE)
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = (
                reference_pipeline.encode_prompt(prompt)
                if is_pair
                else reference_pipeline.encode_prompt(prompt, DEVICE, 1, True)
            )
        actual = model.text.encode(prompt, width_px=64, height_px=64)
        torch.testing.assert_close(actual.cond, expected[0][0], rtol=0, atol=tolerance(1e-5))
        if is_pair:
            torch.testing.assert_close(actual.pooled_cond, expected[2][0], rtol=0, atol=tolerance(1e-5))
    assert torch.equal(encode(model, "a slothful cat"), encode(tiny(kind), "a slothful cat")), "a word is whole"
    assert model.info.learnt_words == ("sloth",)


def test_every_layout_is_the_same_word_and_pages_tell_it_from_letters(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    learnt = vectors(2)
    layouts: dict[str, dict[str, Any]] = {
        "deep/c.safetensors": {"<c-toy>": learnt},
        "d.safetensors": {"d": learnt},
        "e.safetensors": {"emb_params": learnt},
        "f.safetensors": {"f": learnt[0].clone(), "emb_params": learnt},
    }
    for name, content in layouts.items():
        save(tmp_path / name, content)
    (tmp_path / "readme.txt").write_text("not a word")
    model = knowing(tiny("sd15"), tiny_model("sd15"), tmp_path)
    assert model.info.learnt_words == ("d", "c", "<c-toy>", "e", "f")
    encodings = {name: encode(model, f"red {name} fox") for name in model.info.learnt_words}
    assert all(torch.equal(encoding, encodings["d"]) for encoding in encodings.values())
    assert not torch.equal(encodings["d"], encode(tiny("sd15"), "red d fox"))
    pages = pages_of(model)
    conditionings = [pages.condition(f"red {name} fox", None, width_px=64, height_px=64) for name in ("d", "zz")]
    keys = [pages.gather([conditioning.cond]).layers[0].keys for conditioning in conditionings]
    plain = model.unet.cross_attention.keys_values(encodings["d"][None]).layers[0].keys
    torch.testing.assert_close(keys[0], plain, rtol=0, atol=tolerance(1e-5))
    assert not torch.allclose(keys[0], keys[1], atol=1e-3)


def test_a_word_is_weighed_found_in_capitals_and_never_cut(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    save(tmp_path / "sloth.safetensors", {"emb_params": vectors(6)})
    model = knowing(tiny("sd15"), tiny_model("sd15"), tmp_path)
    assert torch.equal(encode(model, "a SLOTH"), encode(model, "a sloth"))
    weighted = model.text.windows("a (sloth:1.3)")[0].chunks[0]
    assert weighted.weights[:9] == (1.0, 1.0, *(1.3,) * 6, 1.0)
    filler = "cat " * 71
    first, second = (window.chunks[0].ids for window in model.text.windows(f"{filler}sloth dog"))
    ids = list(model.text.encoders[0].learnt.ids["sloth"])
    assert not set(ids) & set(first)
    assert list(second[1:7]) == ids


def test_words_of_another_family_stay_out_and_prompts_with_them_are_refused(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "wide.safetensors", {"emb_params": torch.zeros(2, 1024)})
    save(tmp_path / "two.safetensors", {"clip_l": vectors(1), "clip_g": vectors(1)})
    model = knowing(tiny("sd15"), tiny_model("sd15"), tmp_path)
    assert (
        "the learned word 'wide' is skipped: wide.safetensors is 1024 numbers wide, but this model reads 64."
        in caplog.text
    )
    assert model.info.learnt_words == ()
    for name, why in (("Wide", "is 1024 numbers wide"), ("two", "is 64 and 64 numbers wide")):
        with pytest.raises(InvalidRequest, match=f"the learned word '{name}' cannot be used: .* {why}") as no:
            encode(model, f"a {name} fox")
        assert no.value.param == "prompt"
    assert torch.equal(encode(model, "a widely red fox"), encode(tiny("sd15"), "a widely red fox"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"a": torch.zeros(64), "b": torch.zeros(64)}, "holds 'a', 'b', which is not a learned word"),
        ({"emb_params": torch.zeros(1, 2, 64)}, "holds 'emb_params', which is not a learned word"),
        ({"emb_params": torch.full((1, 64), torch.nan)}, "1 to 75, all finite"),
        ({"emb_params": torch.zeros(76, 64)}, "holds 76 vectors"),
        ({"clip_l": torch.zeros(1, 64), "clip_g": torch.zeros(2, 64)}, "hold different numbers of vectors"),
    ],
)
def test_file_that_is_no_word_is_returned_with_its_problem(tmp_path: Path, content: Any, problem: str) -> None:
    save(tmp_path / "x.safetensors", content)
    [word] = read_words(tmp_path, [DIM])
    assert (word.names, word.vectors) == (("x",), ())
    assert word.problem.startswith("x.safetensors")
    assert problem in word.problem


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no folder .*none; model.embeddings_dir must be the folder"):
        read_words(tmp_path / "none", [DIM])


def test_second_file_of_one_name_is_skipped_and_a_name_inside_a_file_is_given_once(tmp_path: Path) -> None:
    for name in ("one/cat", "two/Cat", "two/dog"):
        save(tmp_path / f"{name}.safetensors", {"<toy>": vectors(1)})
    first, second, third = read_words(tmp_path, [DIM])
    assert (first.names, third.names, second.names) == (("cat", "<toy>"), ("dog",), ("two/Cat.safetensors",))
    assert second.problem == "another file in the folder is called 'Cat', too; rename one."


def test_file_that_cannot_be_used_takes_no_name_from_one_that_can(tmp_path: Path) -> None:
    (tmp_path / "cat.pt").write_bytes(b"")
    save(tmp_path / "cat.safetensors", {"emb_params": vectors(1)})
    usable, pickled = read_words(tmp_path, [DIM])
    assert (usable.names, usable.problem, pickled.names) == (("cat",), "", ("cat.pt",))
    assert pickled.problem.startswith("cat.pt is a pickle file")


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        {"string_to_token": {"*": 265}, "string_to_param": {"*": vectors(2)}, "name": "old"},
        {"string_to_param": nn.ParameterDict({"*": nn.Parameter(vectors(2))})},
        {"<cat-toy>": vectors(1)[0]},
    ],
    ids=["A1111", "ParameterDict", "diffusers"],
)
def test_command_in_the_refusal_of_a_pickle_file_converts_it(tmp_path: Path, content: dict[str, Any]) -> None:
    torch.save(content, tmp_path / "my cat.pt")
    [word] = read_words(tmp_path, [DIM])
    command = word.problem.partition("lose: python ")[2]
    subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path, check=True)
    converted = read_words(tmp_path, [DIM])[0]
    expected = vectors(1) if "<cat-toy>" in content else vectors(2)
    assert converted.names == ("my cat",)
    torch.testing.assert_close(converted.vectors[0], expected, rtol=0, atol=0)


def test_a_picture_with_a_learnt_word_is_another(
    tiny: LoadTiny, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from diffserve.engine import Engine
    from diffserve.settings.config import EngineConfig

    save(tmp_path / "sloth.safetensors", {"emb_params": vectors(1)})
    model = knowing(tiny("sd15"), tiny_model("sd15"), tmp_path)
    request = image_request("sd15", "ddim", prompt="a sloth", seed=1, num_steps=2)
    (learnt,), (plain,) = (
        Engine(candidate, EngineConfig(max_rows=2)).generate([request]) for candidate in (model, tiny("sd15"))
    )
    assert learnt.picture != plain.picture
    digest = hashlib.sha256((tmp_path / "sloth.safetensors").read_bytes()).hexdigest()
    hashes = parse_infotext(write_infotext(learnt, width_px=64, height_px=64)).fields["TI hashes"]
    assert hashes == f"sloth: {digest[:12]}"
    assert not plain.word_digests
