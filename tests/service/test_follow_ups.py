"""Follow-ups about images: changes are merged with the earlier prompt, and a new prompt replaces it."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from openai import OpenAI

from diffserve.media.images import read_infotext
from diffserve.service.responses.turns import Turn, merge_warnings, merged, prompt_of
from diffserve.world.prompt_reading import merge_scenes
from tests.service.server import RunningServer

PICTURE = ("AAAA",)


@pytest.mark.parametrize(
    ("follow_up", "prompt"),
    [
        ("now at night", "a red fox, at night"),
        ("at night", "a red fox, at night"),
        ("Please make it snow.", "a red fox, snow."),
        ("in the style of Hokusai", "a red fox, in the style of Hokusai"),
        ("but without the hat", "a red fox, without the hat"),
        ("bigger", "a red fox, bigger"),
        ("add a cat", "a red fox, add a cat"),
        ("a cat instead", "a red fox, a cat instead"),
        ("again", "a red fox"),
        ("a boat on a lake", "a boat on a lake"),
        ("now a boat", "a boat"),
        ("draw me a boat", "draw me a boat"),
        ("two owls", "two owls"),
        ("the fox at night", "the fox at night"),
    ],
)
def test_a_follow_up_changes_the_earlier_prompt_or_replaces_it(follow_up: str, prompt: str) -> None:
    assert merged("a red fox.", follow_up).removesuffix(".") == prompt.removesuffix(".")


@pytest.mark.parametrize(
    ("prompt", "change", "sentence"),
    [
        ("a fox", "at night", "a fox in the night sky"),
        ("a fox on a red background", "on the beach", "a fox on the beach"),
        ("a fox on the beach", "bigger", "a large fox on the beach"),
        ("a small fox on the beach", "at sea", "a small fox in the ocean"),
        ("a fox", "the beach", "a fox on the beach"),
        ("a fox on the beach", "and a cat", "a fox next to a cat on the beach"),
        ("two foxes on the beach", "and a fox", "three foxes on the beach"),
        ("a fox on the beach", "a cat instead", "a cat on the beach"),
        ("a fox to the left of a cat", "in the desert", "a fox to the left of a cat in the desert"),
        ("a fox", "in watercolor", None),
        ("a knight", "at night", None),
        ("three foxes", "and a cat", None),
        ("two foxes", "bigger", None),
    ],
)
def test_a_change_in_the_picture_world_gives_a_canonical_sentence(
    prompt: str, change: str, sentence: str | None
) -> None:
    assert merge_scenes(prompt, change) == sentence


def test_the_prompt_of_a_conversation_is_folded_over_its_turns() -> None:
    fox, night, snow = (Turn("user", words) for words in ("a fox", "now at night", "in the snow"))
    painted, owl = Turn("assistant", "", PICTURE), Turn("assistant", "", PICTURE, prompt="an owl on a roof")
    assert prompt_of((fox, painted, night)) == "a fox, at night"
    assert prompt_of((fox, painted, night, painted, snow)) == "a fox, at night, in the snow"
    assert prompt_of((fox, painted, night, painted, snow), is_world=True) == "a fox in the snow"
    assert prompt_of((fox, owl, night)) == "an owl on a roof, at night"
    assert prompt_of((fox, Turn("assistant", "hello"), night)) == "now at night", "the answer was no picture"
    assert prompt_of((fox, painted, Turn("user", "at night", PICTURE))) == "at night", "the user sent another picture"
    assert prompt_of((painted,)) == ""
    assert merge_warnings("a fox, at night", (fox, painted, night)) == [
        "the follow-up was merged with the earlier prompt: a fox, at night"
    ]
    assert merge_warnings("a fox", (fox,)) == []


@pytest.mark.slow
def test_a_response_that_follows_another_generates_the_merged_prompt(client: OpenAI) -> None:
    tool: Any = {"type": "image_generation", "size": "64x64", "num_inference_steps": 2, "seed": 7}
    first = client.responses.create(model="gpt-5", input="a red fox", tools=[tool])
    later = client.responses.create(
        model="gpt-5",
        input="now at night",
        previous_response_id=first.id,
        tools=[tool],
    )
    [call] = later.output
    assert call.type == "image_generation_call"
    assert call.revised_prompt == "a red fox, at night"
    assert (read_infotext(base64.b64decode(call.result or "")) or "").startswith("a red fox, at night\n")
    assert later.model_extra is not None
    assert "the follow-up was merged with the earlier prompt: a red fox, at night" in later.model_extra["warnings"]
    last = client.responses.create(
        model="gpt-5",
        input="in the snow",
        previous_response_id=later.id,
        tools=[tool],
    )
    assert getattr(last.output[0], "revised_prompt", "") == "a red fox, at night, in the snow"


@pytest.mark.slow
def test_a_chat_with_images_merges_a_follow_up(server: RunningServer) -> None:
    how = {"modalities": ["image", "text"], "size": "64x64", "num_inference_steps": 2, "seed": 7}
    messages = [{"role": "user", "content": "a red fox"}]
    first = server.client.post("/v1/chat/completions", json={**how, "messages": messages}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "now at night"}]
    later = server.client.post("/v1/chat/completions", json={**how, "messages": messages}).json()
    assert later["choices"][0]["message"]["revised_prompt"] == "a red fox, at night"
