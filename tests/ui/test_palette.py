"""The page's description of what a model of a closed world can and cannot generate."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from diffserve.client import World
from diffserve.models.vocabulary import read_vocabulary
from ui.create.palette import shown, unknown_in, warning_of

WEIGHTS = Path(__file__).resolve().parents[2] / "diffserve" / "embedded" / "weights"
SMALL = World(objects=("fox", "owl", "grapes"), places=("beach", "snow"), colors=("orange",), words=("a", "fox"))


def embedded() -> World:
    vocabulary = read_vocabulary(WEIGHTS)
    assert vocabulary is not None
    return World(objects=vocabulary.objects, places=vocabulary.places, colors=vocabulary.colors, words=vocabulary.words)


def clicks(world: World) -> list[str]:
    """Return what every button adds to the prompt."""
    panel, things = shown(world)
    assert panel["visible"]
    return [unescape(say) for say in re.findall(r'data-say="([^"]*)"', things)]


def test_words_unknown_to_the_model_are_listed() -> None:
    assert unknown_in("an astronaut riding a horse", embedded()) == ("astronaut", "riding", "horse")
    assert unknown_in("Four dogs", embedded()) == ("four",)
    assert unknown_in("a fox next to a cactus on the beach", embedded()) == ()
    assert unknown_in("an astronaut", None) == ()
    assert unknown_in("a fox BREAK a (cactus:-1)", embedded()) == ()
    assert unknown_in("an (astronaut:1000)", embedded()) == (), "a weight that is not allowed may be half written"
    assert unknown_in("two gifts and a robot <lora:gift:0.8>", embedded()) == ("robot",)
    assert unknown_in("a gift", embedded(), "sepia, gift:0.5") == () != unknown_in("a gift", embedded(), "gift:")


def test_unknown_words_are_escaped_and_limited_in_number() -> None:
    warning = warning_of(("<b>", "horse", *map(str, range(9))))
    assert "“<b>&lt;b&gt;</b>”, “<b>horse</b>”" in warning
    assert warning.count("<b>") == 6
    assert "and 5 more" in warning
    assert warning_of(()) == ""


def test_every_button_uses_words_that_the_model_knows() -> None:
    assert clicks(SMALL) == [
        "a fox", "an owl", "grapes", "on the beach", "in the snow", "on an orange background"
    ]  # fmt: skip
    assert len(clicks(embedded())) == 60 + 8 + 12
    assert [say for say in clicks(embedded()) if unknown_in(say, embedded())] == []
    many = [many for many in re.findall(r'data-many="([^"]*)"', shown(embedded())[1]) if many]
    assert len(many) == 60
    assert {"foxes", "octopuses", "butterflies", "fish", "bunches of cherries"} <= set(many)
    assert [each for each in many if unknown_in(each, embedded())] == []


def test_a_model_with_an_open_vocabulary_has_no_buttons() -> None:
    panel, _ = shown(None)
    assert not panel["visible"]
