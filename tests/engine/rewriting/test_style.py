"""Style files: an error names the file, the key and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.rewriting.cleaning import find_lost, find_names, find_quotes
from diffserve.rewriting.judging import TextWindow
from diffserve.rewriting.style import Style, load_style, style_for_family, style_names
from diffserve.runtime.text.clip_vocabulary import WINDOW_TOKENS, clip_tokenizer
from diffserve.settings.layers import configs_dir

TAGS = configs_dir() / "rewriter" / "tags.toml"


@pytest.fixture(scope="module")
def clip() -> TextWindow:
    return TextWindow.of_tokenizer(clip_tokenizer(pad="!"), WINDOW_TOKENS)


def changed(tmp_path: Path, before: str, after: str) -> Path:
    text = TAGS.read_text(encoding="utf-8")
    assert before in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    return path


def test_there_is_a_style_for_every_family() -> None:
    assert style_names() == ("embedded", "prose", "tags")
    assert [style_for_family(family) for family in ("embedded", "sd1", "sd2", "sdxl")] == [
        "embedded",
        "tags",
        "tags",
        "prose",
    ]
    assert {load_style(name).name for name in style_names()} == set(style_names())


@pytest.mark.parametrize("name", ["tags", "prose"])
def test_examples_do_themselves_what_they_ask_of_the_model(name: str, clip: TextWindow) -> None:
    style = load_style(name)
    assert style.prompt.examples
    for example in style.prompt.examples:
        assert clip.fits(example.prompt)
        assert not find_lost(example.prompt, find_quotes(example.wish), find_names(example.wish))
        words = len(example.prompt.split())
        assert words < clip.num_tokens * style.prompt.words_per_token


@pytest.mark.parametrize("name", ["tags", "prose"])
def test_the_system_text_names_the_words_that_fit(name: str) -> None:
    prompt = load_style(name).prompt
    assert f"at most {int(75 * prompt.words_per_token)} words" in prompt.system_for(75)
    assert "{" not in prompt.system_for(75)
    assert "\n" not in prompt.system_for(75)


@pytest.mark.parametrize("name", ["poem", "", "../serve", "tags.toml", "/etc/passwd"])
def test_a_style_that_is_not_there_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"choose one of embedded, prose, tags\.") as caught:
        load_style(name)
    assert caught.value.param == "style"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("max_tokens =", "max_token =", "mine.toml: unknown key answer.max_token; did you mean max_tokens?"),
        ("[further]", "[furher]", r"unknown table \[furher\]; did you mean further\?"),
        ('parts = "tags"', 'parts = "tag"', "invalid enum value 'tag' - at `answer.parts`"),
        ("max_tokens = 200", 'max_tokens = "many"', "expected `int`, got `str` - at `answer.max_tokens`"),
        ("max_tokens = 200", "max_tokens = 0", "answer.max_tokens is 0; it must be above 0"),
        ("max_entropy = 2.5", "max_entropy = nan", "answer.max_entropy is nan; it must be above 0"),
        ("top_p = 0.95\n", "", "missing required field `top_p` - at `further`"),
        ("temperature = 0.9", "temperature = -1.0", "mine.toml: further.temperature is -1.0; give a number"),
        ('"i can\'t", ', '"I can\'t", ', "answer.refusals must be in lower case"),
        ("[prompt]", "[prompt", "mine.toml is not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(before: str, after: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Style.read(changed(tmp_path, before, after))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml' cannot be read: No such file"):
        Style.read(tmp_path / "none.toml")
