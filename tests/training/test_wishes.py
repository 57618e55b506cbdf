"""Wishes: variety, correctness, separation into training and held-out, and reference captions."""

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
from diffserve.world.captions import Content, Requirements, caption, sentence
from diffserve.world.prompt_reading import parse_sentence
from diffserve.world.render import render
from diffserve.world.scenes import COLORS, OBJECTS, PLACES, RELATIONS, SIZES_PX, is_held_out, is_legible, scenes


def all_phrases() -> dict[str, Phrases]:
    pools = {name: value for name, value in msgspec.structs.asdict(sentences()).items() if isinstance(value, Phrases)}
    pools |= {f"relation {name}": value for name, value in sentences().relations.items()}
    return pools | {f"count {count}": value for count, value in sentences().counts.items()}


def edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


# The canonical sentence


def test_a_sentence_is_read_back_as_what_it_says() -> None:
    for scene in chain(islice(scenes(1, held_out=False), 1500), islice(scenes(1, held_out=True), 300)):
        content = Content.by(scene)
        assert parse_sentence(sentence(content)) == content


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
    assert sentence(Content(names, relation, size, background)) == words


@pytest.mark.parametrize(
    "words",
    ["", "a cat", "on the beach", "a tiger on the beach", "a cat in the snow in the snow", "A cat in the snow"],
)
def test_other_text_is_not_read(words: str) -> None:
    assert parse_sentence(words) is None


def test_the_captions_of_the_image_model_contain_the_sentence() -> None:
    rng = random.Random(0)
    for scene in islice(scenes(2, held_out=False), 25):
        expected = sentence(Content.by(scene))
        assert any(caption(scene, rng) == expected for _ in range(4000)), expected


def test_a_staged_sentence_is_a_scene_that_says_it() -> None:
    for scene in islice(scenes(3, held_out=False), 200):
        content = Content.by(scene)
        assert Content.by(content.stage(random.Random(0))) == content


def test_a_relation_may_be_expressed_in_reverse() -> None:
    settled = Requirements.exactly(Content(("cat", "dog"), "left of", "plain", "red"))
    assert settled.complete
    assert settled.allows(Content(("dog", "cat"), "right of", "plain", "red"))
    assert not settled.allows(Content(("dog", "cat"), "left of", "plain", "red"))
    assert not settled.allows(Content(("cat", "dog"), "next to", "plain", "red"))
    assert not settled.allows(Content(("cat", "dog"), "left of", "plain", "blue"))


def test_only_the_outer_two_of_between_may_change_places() -> None:
    content = Content(("cat", "dog", "fox"), "between", "plain", "red")
    settled = Requirements.exactly(content)
    assert settled.allows(replace(content, names=("cat", "fox", "dog")))
    assert not settled.allows(replace(content, names=("dog", "cat", "fox")))
    together = Requirements.exactly(replace(content, relation=None))
    assert together.allows(Content(("fox", "dog", "cat"), None, "plain", "red"))


def test_open_parts_may_be_chosen_but_nothing_may_be_added() -> None:
    pets, anywhere = frozenset(("cat", "dog")), frozenset((*COLORS, *PLACES))
    settled = Requirements((pets, frozenset(("moon",))), frozenset(RELATIONS), frozenset(("plain",)), anywhere)
    assert not settled.complete
    assert settled.allows(Content(("moon", "dog"), "above", "plain", "night sky"))
    assert not settled.allows(Content(("moon", "pig"), "above", "plain", "night sky"))
    assert not settled.allows(Content(("dog",), None, "plain", "night sky"))
    assert not settled.allows(Content(("dog", "moon", "star"), None, "plain", "night sky"))


# Words


def test_every_word_of_the_world_has_informal_wordings() -> None:
    vocabulary = words()
    assert set(vocabulary.names) == set(OBJECTS)
    assert set(vocabulary.colors) == set(vocabulary.color_associations) == set(COLORS)
    assert set(vocabulary.places) == set(vocabulary.tags) == set(PLACES)
    assert all(len(names_for(name)) >= 5 for name in OBJECTS)
    members = chain(*vocabulary.categories.values(), *(names for names, _ in vocabulary.moods.values()))
    assert set(members) <= set(OBJECTS)


def test_every_language_has_all_words_of_the_others() -> None:
    vocabulary = languages()
    tables = (vocabulary.objects, vocabulary.backgrounds, vocabulary.relations)
    assert {len(wordings) for table in tables for wordings in table.values()} == {len(vocabulary.openings)}
    assert set(vocabulary.objects) <= set(OBJECTS)
    assert set(vocabulary.backgrounds) <= {*COLORS, *PLACES}
    assert set(vocabulary.relations) == set(RELATIONS)


def test_no_wording_means_two_things() -> None:
    names = [word.removeprefix("*") for name in OBJECTS for word in names_for(name)]
    assert sorted(names) == sorted(set(names))
    colors = [word for color in COLORS for word in colors_for(color)]
    assert sorted(colors) == sorted(set(colors))
    places = [word for place in PLACES for word in words().places[place]]
    assert sorted(places) == sorted(set(places))


def test_training_and_held_out_phrases_share_nothing() -> None:
    for name, pool in all_phrases().items():
        training, held_out = set(pool.side(held_out=False)), set(pool.side(held_out=True))
        assert training, name
        assert held_out, name
        assert not training & held_out, name


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
    texts = set()
    for _ in range(300):
        typed = misspell(text, rng)
        texts.add(typed)
        words = typed.split(" ")
        if len(words) != len(text.split(" ")):
            continue
        pairs = list(zip(text.split(" "), words, strict=True))
        assert sum(original != changed for original, changed in pairs) <= 0.2 * len(words)
        assert all(original == changed for original, changed in pairs if len(original) < MIN_LETTERS)
    assert len(texts) > 250


def test_half_of_all_wishes_have_no_typing_noise() -> None:
    rng = random.Random(2)
    text = "a cute cat to the left of a happy bear on a yellow background, please"
    unharmed = sum(as_typed(text, rng).lower().rstrip(".!? ") in (text, text.replace(",", "")) for _ in range(1000))
    assert 400 < unharmed < 700


# Wishes


def test_the_stream_of_wishes_depends_on_the_seed_alone() -> None:
    first, second, other = (list(islice(wishes(seed, held_out=False), 40)) for seed in (3, 3, 4))
    assert first == second != other


def test_one_scene_is_wished_for_in_countless_ways() -> None:
    content = Content(("cat", "dog"), "left of", "plain", "red")
    writer = Writer(random.Random(0), held_out=False)
    assert len({writer.free(content) for _ in range(200)}) > 190


def test_a_complete_wish_names_all_it_asks_for() -> None:
    writer = Writer(random.Random(1), held_out=False)
    for scene in islice(scenes(5, held_out=False), 400):
        text = writer.free(Content.by(scene))
        for name in scene.names:
            singular = [word.removeprefix("*") for word in names_for(name)]
            assert any(word in text for word in (*singular, *map(many, singular))), (name, text)
        if scene.size != "plain":
            assert any(word in text for word in words().sizes[scene.size]), text


def test_the_answer_grants_the_wish_and_its_scene_says_so() -> None:
    for wish in islice(wishes(6, held_out=False), 600):
        content = parse_sentence(wish.caption)
        assert content is not None
        assert wish.requirements.allows(content), wish
        assert Content.by(wish.scene) == content
        assert wish.text.strip()
        assert is_legible(wish.scene) or not wish.requirements.complete


def test_all_kinds_of_wishes_occur() -> None:
    drawn = list(islice(wishes(7, held_out=False), 600))
    vague = [wish for wish in drawn if not wish.requirements.complete]
    assert 0.1 < len(vague) / len(drawn) < 0.3
    assert {len(wish.scene.objects) for wish in drawn} == {1, 2, 3}
    assert {wish.scene.size for wish in drawn} == set(SIZES_PX)
    assert any(wish.text.isupper() for wish in drawn)
    assert any(not wish.text.isascii() for wish in drawn), "no other language"
    assert any(wish.text == wish.caption for wish in drawn), "no caption that is already canonical"


def test_cosy_with_an_animal_and_the_moon_is_granted_sensibly() -> None:
    settled = next(
        wish for wish in wishes_by_hand() if wish.text.startswith("something cosy with an animal")
    ).requirements
    assert settled.allows(Content(("cat", "moon"), "below", "plain", "night sky"))
    assert not settled.allows(Content(("car", "moon"), "below", "plain", "night sky"))
    assert not settled.allows(Content(("cat", "star"), "below", "plain", "night sky"))


def test_training_never_shows_a_scene_or_a_combination_that_is_held_out() -> None:
    assert not any(is_held_out(wish.scene) for wish in islice(wishes(8, held_out=False), 600))
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
    held_out = held_out_wishes(200)
    assert held_out == held_out_wishes(200)
    assert len(held_out) == 200
    texts = {wish.text for wish in held_out}
    assert len(texts) > 195
    assert not texts & {wish.text for wish in islice(wishes(0, held_out=False), 1500)}
    generated = held_out[len(wishes_by_hand()) :]
    assert all(is_held_out(wish.scene) for wish in generated if wish.requirements.complete)


def test_held_out_wishes_by_hand_ask_for_things_of_the_world() -> None:
    written = wishes_by_hand()
    assert len(written) == round(200 * BY_HAND_SHARE)
    for wish in written:
        content = parse_sentence(wish.caption)
        assert content is not None
        assert wish.requirements.allows(content), wish
        assert set(chain(*wish.requirements.names)) <= set(OBJECTS), wish
        assert wish.requirements.backgrounds <= {*COLORS, *PLACES}, wish
        assert wish.requirements.sizes <= set(SIZES_PX), wish
        assert wish.requirements.relations <= {*RELATIONS, "between", None}, wish


def test_a_picture_grants_a_vague_wish_with_any_choice() -> None:
    pets = frozenset(("cat", "dog"))
    settled = Requirements(
        (pets, frozenset(("moon",))), frozenset(RELATIONS), frozenset(("plain",)), frozenset(("night sky",))
    )
    fitting = Content(("moon", "dog"), "right of", "plain", "night sky")
    other = replace(fitting, names=("moon", "pig"))
    assert shows(render(fitting.stage(random.Random(0))), settled)
    assert not shows(render(other.stage(random.Random(0))), settled)
    assert not shows(render(replace(fitting, background="black").stage(random.Random(0))), settled)


def test_a_vague_wish_of_two_objects_is_granted_whatever_it_leaves_open() -> None:
    (wish,) = [
        candidate
        for candidate in held_out_wishes(200)
        if candidate.text == "something cosy with an animal and the moon"
    ]
    content = Content(("cat", "moon"), "left of", "plain", "night sky")
    other = Content(("cat", "apple"), "left of", "plain", "night sky")
    assert shows(render(content.stage(random.Random(0))), wish.requirements)
    assert not shows(render(other.stage(random.Random(0))), wish.requirements)
