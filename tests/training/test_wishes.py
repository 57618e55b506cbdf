"""Wishes as people type them: varied, true, kept apart; and the one sentence each is rewritten to."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, islice

import msgspec
import pytest

from diffserve.training.wishes import BY_HAND_SHARE, held_out_wishes, shows, wishes, wishes_by_hand
from diffserve.training.wishes.noise import MIN_LETTERS, as_typed, known_words, misspell, slip
from diffserve.training.wishes.words import Phrases, colors_for, languages, many, names_for, sentences, words
from diffserve.training.wishes.writer import Writer, is_kept_combination
from diffserve.world.canonical import Asked, Said, sentence
from diffserve.world.captions import caption
from diffserve.world.prompt_reading import parse_sentence
from diffserve.world.render import render
from diffserve.world.scenes import COLORS, OBJECTS, PLACES, RELATIONS, SIZES_PX, is_held_out, is_legible, scenes


def all_phrases() -> dict[str, Phrases]:
    found = {name: value for name, value in msgspec.structs.asdict(sentences()).items() if isinstance(value, Phrases)}
    found |= {f"relation {name}": value for name, value in sentences().relations.items()}
    return found | {f"count {count}": value for count, value in sentences().counts.items()}


def edit_distance(one: str, two: str) -> int:
    row = list(range(len(two) + 1))
    for i, a in enumerate(one, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(two, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


# The canonical sentence


def test_a_sentence_is_read_back_as_what_it_says() -> None:
    for scene in chain(islice(scenes(1, held_out=False), 1500), islice(scenes(1, held_out=True), 300)):
        said = Said.by(scene)
        assert parse_sentence(sentence(said)) == said


@pytest.mark.parametrize(
    ("names", "relation", "size", "background", "words"),
    [
        (("cat", "dog"), "left of", "plain", "orange", "a cat to the left of a dog on an orange background"),
        (("moon",), None, "small", "night sky", "the small moon in the night sky"),
        (("grapes",) * 2, None, "plain", "snow", "two bunches of grapes in the snow"),
        (("owl", "corn", "sun"), "between", "plain", "beach", "an owl between corn and the sun on the beach"),
        (("crab", "bus", "rose"), None, "plain", "city", "a crab, a bus and a rose in the city"),
    ],
)
def test_sentences_read_well(
    names: tuple[str, ...], relation: str | None, size: str, background: str, words: str
) -> None:
    assert sentence(Said(names, relation, size, background)) == words


@pytest.mark.parametrize(
    "words",
    ["", "a cat", "on the beach", "a tiger on the beach", "a cat in the snow in the snow", "A cat in the snow"],
)
def test_other_text_is_not_read(words: str) -> None:
    assert parse_sentence(words) is None


def test_the_captions_of_the_image_model_contain_the_sentence() -> None:
    rng = random.Random(0)
    for scene in islice(scenes(2, held_out=False), 25):
        wanted = sentence(Said.by(scene))
        assert any(caption(scene, rng) == wanted for _ in range(4000)), wanted


def test_a_staged_sentence_is_a_scene_that_says_it() -> None:
    for scene in islice(scenes(3, held_out=False), 200):
        said = Said.by(scene)
        assert Said.by(said.stage(random.Random(0))) == said


def test_the_same_may_be_said_from_the_other_side() -> None:
    asked = Asked.exactly(Said(("cat", "dog"), "left of", "plain", "red"))
    assert asked.complete
    assert asked.allows(Said(("dog", "cat"), "right of", "plain", "red"))
    assert not asked.allows(Said(("dog", "cat"), "left of", "plain", "red"))
    assert not asked.allows(Said(("cat", "dog"), "next to", "plain", "red"))
    assert not asked.allows(Said(("cat", "dog"), "left of", "plain", "blue"))


def test_only_the_outer_two_of_between_may_change_places() -> None:
    said = Said(("cat", "dog", "fox"), "between", "plain", "red")
    asked = Asked.exactly(said)
    assert asked.allows(replace(said, names=("cat", "fox", "dog")))
    assert not asked.allows(replace(said, names=("dog", "cat", "fox")))
    together = Asked.exactly(replace(said, relation=None))
    assert together.allows(Said(("fox", "dog", "cat"), None, "plain", "red"))


def test_what_is_left_open_may_be_chosen_and_nothing_added() -> None:
    pets, anywhere = frozenset(("cat", "dog")), frozenset((*COLORS, *PLACES))
    asked = Asked((pets, frozenset(("moon",))), frozenset(RELATIONS), frozenset(("plain",)), anywhere)
    assert not asked.complete
    assert asked.allows(Said(("moon", "dog"), "above", "plain", "night sky"))
    assert not asked.allows(Said(("moon", "pig"), "above", "plain", "night sky"))
    assert not asked.allows(Said(("dog",), None, "plain", "night sky"))
    assert not asked.allows(Said(("dog", "moon", "star"), None, "plain", "night sky"))


# Words


def test_every_word_of_the_world_has_loose_ones() -> None:
    known = words()
    assert set(known.names) == set(OBJECTS)
    assert set(known.colors) == set(known.color_associations) == set(COLORS)
    assert set(known.places) == set(known.tags) == set(PLACES)
    assert all(len(names_for(name)) >= 5 for name in OBJECTS)
    members = chain(*known.categories.values(), *(names for names, _ in known.moods.values()))
    assert set(members) <= set(OBJECTS)


def test_every_language_has_all_words_of_the_others() -> None:
    known = languages()
    tables = (known.objects, known.backgrounds, known.relations)
    assert {len(wordings) for table in tables for wordings in table.values()} == {len(known.openings)}
    assert set(known.objects) <= set(OBJECTS)
    assert set(known.backgrounds) <= {*COLORS, *PLACES}
    assert set(known.relations) == set(RELATIONS)


def test_no_wording_means_two_things() -> None:
    names = [word.removeprefix("*") for name in OBJECTS for word in names_for(name)]
    assert sorted(names) == sorted(set(names))
    colors = [word for color in COLORS for word in colors_for(color)]
    assert sorted(colors) == sorted(set(colors))
    places = [word for place in PLACES for word in words().places[place]]
    assert sorted(places) == sorted(set(places))


def test_training_and_held_out_phrases_share_nothing() -> None:
    for name, pool in all_phrases().items():
        training, kept = set(pool.side(held_out=False)), set(pool.side(held_out=True))
        assert training, name
        assert kept, name
        assert not training & kept, name


def test_relations_name_the_objects_in_the_order_of_the_answer_unless_a_preposition_comes_first() -> None:
    for relation in ("left of", "right of", "above", "below", "next to"):
        for held_out in (False, True):
            for pattern in sentences().relations[relation].side(held_out=held_out):
                fronted = pattern.startswith(("to the", "left of", "right of", "above", "on top", "under", "below"))
                assert (pattern.index("{a}") < pattern.index("{b}")) != fronted, pattern


# Typing


def test_a_slip_changes_one_place_and_never_lands_on_another_word() -> None:
    rng = random.Random(0)
    for word in ("rose", "bear", "peach", "mushroom", "background", "star"):
        for _ in range(100):
            typed = slip(word, rng)
            assert edit_distance(typed, word) <= 2
            assert typed == word or typed not in known_words()


def test_misspelt_text_keeps_most_words_and_all_the_short_ones() -> None:
    rng = random.Random(1)
    text = "could you please draw a cute cat to the left of a happy bear on a yellow background"
    seen = set()
    for _ in range(300):
        typed = misspell(text, rng)
        seen.add(typed)
        words = typed.split(" ")
        if len(words) != len(text.split(" ")):
            continue
        pairs = list(zip(text.split(" "), words, strict=True))
        assert sum(one != two for one, two in pairs) <= 0.2 * len(words)
        assert all(one == two for one, two in pairs if len(one) < MIN_LETTERS)
    assert len(seen) > 250


def test_half_of_all_wishes_come_through_the_keyboard_unharmed() -> None:
    rng = random.Random(2)
    text = "a cute cat to the left of a happy bear on a yellow background, please"
    unharmed = sum(as_typed(text, rng).lower().rstrip(".!? ") in (text, text.replace(",", "")) for _ in range(1000))
    assert 400 < unharmed < 700


# Wishes


def test_the_stream_of_wishes_depends_on_the_seed_alone() -> None:
    one, two, other = (list(islice(wishes(seed, held_out=False), 40)) for seed in (3, 3, 4))
    assert one == two != other


def test_one_scene_is_wished_for_in_countless_ways() -> None:
    said = Said(("cat", "dog"), "left of", "plain", "red")
    writer = Writer(random.Random(0), held_out=False)
    assert len({writer.free(said) for _ in range(200)}) > 190


def test_a_complete_wish_names_all_it_asks_for() -> None:
    writer = Writer(random.Random(1), held_out=False)
    for scene in islice(scenes(5, held_out=False), 400):
        text = writer.free(Said.by(scene))
        for name in scene.names:
            singular = [word.removeprefix("*") for word in names_for(name)]
            assert any(word in text for word in (*singular, *map(many, singular))), (name, text)
        if scene.size != "plain":
            assert any(word in text for word in words().sizes[scene.size]), text


def test_the_answer_grants_the_wish_and_its_scene_says_so() -> None:
    for one in islice(wishes(6, held_out=False), 600):
        said = parse_sentence(one.caption)
        assert said is not None
        assert one.asked.allows(said), one
        assert Said.by(one.scene) == said
        assert one.text.strip()
        assert is_legible(one.scene) or not one.asked.complete


def test_all_kinds_of_wishes_occur() -> None:
    drawn = list(islice(wishes(7, held_out=False), 600))
    vague = [one for one in drawn if not one.asked.complete]
    assert 0.1 < len(vague) / len(drawn) < 0.3
    assert {len(one.scene.objects) for one in drawn} == {1, 2, 3}
    assert {one.scene.size for one in drawn} == set(SIZES_PX)
    assert any(one.text.isupper() for one in drawn)
    assert any(not one.text.isascii() for one in drawn), "no other language"
    assert any(one.text == one.caption for one in drawn), "no caption that is already canonical"


def test_cosy_with_an_animal_and_the_moon_is_granted_sensibly() -> None:
    asked = next(one for one in wishes_by_hand() if one.text.startswith("something cosy with an animal")).asked
    assert asked.allows(Said(("cat", "moon"), "below", "plain", "night sky"))
    assert not asked.allows(Said(("car", "moon"), "below", "plain", "night sky"))
    assert not asked.allows(Said(("cat", "star"), "below", "plain", "night sky"))


def test_training_never_shows_a_scene_or_a_combination_that_is_held_out() -> None:
    assert not any(is_held_out(one.scene) for one in islice(wishes(8, held_out=False), 600))
    for held_out in (False, True):
        writer = Writer(random.Random(0), held_out=held_out)
        parts: list[list[str]] = []

        def attempt(writer: Writer = writer, parts: list[list[str]] = parts) -> tuple[str, list[str]]:
            parts.append([writer.name("cat"), writer.where("beach")])
            return "", parts[-1]

        for _ in range(30):
            writer.uncommon(attempt)
            assert is_kept_combination(parts[-1]) == held_out


def test_held_out_wishes_are_fixed_and_apart_from_training() -> None:
    kept = held_out_wishes(200)
    assert kept == held_out_wishes(200)
    assert len(kept) == 200
    texts = {one.text for one in kept}
    assert len(texts) > 195
    assert not texts & {one.text for one in islice(wishes(0, held_out=False), 1500)}
    generated = kept[len(wishes_by_hand()) :]
    assert all(is_held_out(one.scene) for one in generated if one.asked.complete)


def test_held_out_wishes_by_hand_ask_for_things_of_the_world() -> None:
    written = wishes_by_hand()
    assert len(written) == round(200 * BY_HAND_SHARE)
    for one in written:
        said = parse_sentence(one.caption)
        assert said is not None
        assert one.asked.allows(said), one
        assert set(chain(*one.asked.names)) <= set(OBJECTS), one
        assert one.asked.backgrounds <= {*COLORS, *PLACES}, one
        assert one.asked.sizes <= set(SIZES_PX), one
        assert one.asked.relations <= {*RELATIONS, "between", None}, one


def test_a_picture_grants_a_vague_wish_with_any_choice() -> None:
    pets = frozenset(("cat", "dog"))
    asked = Asked((pets, frozenset(("moon",))), frozenset(RELATIONS), frozenset(("plain",)), frozenset(("night sky",)))
    fitting = Said(("moon", "dog"), "right of", "plain", "night sky")
    other = replace(fitting, names=("moon", "pig"))
    assert shows(render(fitting.stage(random.Random(0))), asked)
    assert not shows(render(other.stage(random.Random(0))), asked)
    assert not shows(render(replace(fitting, background="black").stage(random.Random(0))), asked)


def test_a_vague_wish_of_two_objects_is_granted_whatever_it_leaves_open() -> None:
    (wish,) = [one for one in held_out_wishes(200) if one.text == "something cosy with an animal and the moon"]
    said = Said(("cat", "moon"), "left of", "plain", "night sky")
    other = Said(("cat", "apple"), "left of", "plain", "night sky")
    assert shows(render(said.stage(random.Random(0))), wish.asked)
    assert not shows(render(other.stage(random.Random(0))), wish.asked)
