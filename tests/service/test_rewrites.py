"""Prompt rewriting over a real socket: alone, and before an image is generated."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import httpx
import pytest
from openai import OpenAI

from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from tests.service.server import SOON_S, RunningServer, files_of, wait_for
from tests.service.talker import FOX, SCRIPT

pytestmark = pytest.mark.slow

REWRITE = "/v1/prompts/rewrite"


def rewritten(server: RunningServer, prompt: str, **fields: Any) -> dict[str, Any]:
    response = server.client.post(REWRITE, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a complete stream; the event's own field repeats the type."""
    *events, done, tail = text.split("\n\n")
    assert (done, tail) == ("data: [DONE]", "")
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def test_a_wish_becomes_a_prompt(text_server: RunningServer) -> None:
    answer = rewritten(text_server, "something with a fox", model="talker")
    assert answer["id"].startswith("rwt-")
    assert (answer["object"], answer["model"], answer["style"]) == ("prompt.rewrite", "talker", "tags")
    [entry] = answer["data"]
    assert (entry["prompt"], entry["revised_prompt"]) == ("something with a fox", FOX)
    assert (entry["warning"], entry["fallback"]) == (None, None)
    assert 0 <= entry["mean_entropy"] < 0.01
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 4
    assert answer["timings"]["total_s"] >= answer["timings"]["ttft_s"] > 0


@pytest.mark.parametrize(
    ("wish", "fallback"),
    [('a sign that says "Open"', "lost_words"), ("sorry", "refused"), ("unsure", "unsure"), ("?", "empty")],
)
def test_an_unsuitable_answer_leaves_the_wish_unchanged_with_the_reason(
    text_server: RunningServer, wish: str, fallback: str
) -> None:
    [entry] = rewritten(text_server, wish)["data"]
    assert (entry["prompt"], entry["revised_prompt"], entry["fallback"]) == (wish, None, fallback)
    assert entry["warning"].endswith("the prompt was left as it is.")


def test_an_unsure_answer_can_be_forced(text_server: RunningServer) -> None:
    [entry] = rewritten(text_server, "unsure", force=True)["data"]
    assert entry["revised_prompt"] in SCRIPT["unsure"]
    assert entry["mean_entropy"] == pytest.approx(math.log(8) / 2, abs=0.01)


def test_several_prompts_are_sampled_reproducibly(text_server: RunningServer) -> None:
    def drawn(seed: int) -> list[str]:
        data = rewritten(text_server, "unsure", n=6, seed=seed, force=True)["data"]
        return [entry["revised_prompt"] for entry in data]

    assert drawn(5) == drawn(5)
    assert drawn(5)[0] == drawn(6)[0] == "an apple"  # sorted by likelihood
    assert drawn(5)[2] == drawn(6)[1]
    assert len(set(drawn(5))) > 1


def test_style_and_system_reach_the_model(text_server: RunningServer) -> None:
    plain = rewritten(text_server, "a fox", style="prose")
    custom = rewritten(text_server, "a fox", style="prose", system="be brief")
    assert plain["style"] == custom["style"] == "prose"
    assert custom["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"]


def test_a_stream_has_tokens_and_then_the_complete_answer(text_server: RunningServer) -> None:
    response = text_server.client.post(REWRITE, json={"prompt": "a fox", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, completed = events_of(response.text)
    assert [event["type"] for event in deltas] == ["prompt_rewrite.delta"] * len(deltas)
    assert "".join(event["delta"] for event in deltas) == FOX
    assert len(deltas) >= 3
    assert completed["type"] == "prompt_rewrite.completed"
    assert completed["data"] == rewritten(text_server, "a fox")["data"]
    assert {event["id"] for event in deltas} == {completed["id"]}


def test_a_disconnect_ends_the_rewriting(text_server: RunningServer) -> None:
    body = {"prompt": "unsure", "n": 64, "stream": True, "force": True}
    with httpx.stream("POST", f"{text_server.url}{REWRITE}", json=body, timeout=SOON_S) as stream:
        next(stream.iter_lines())
    wait_for(lambda: text_server.num_requests() == 0, SOON_S, "the cancellation")


# Before a picture ---------------------------------------------------------------------------------------------------


def test_nothing_is_rewritten_without_a_request(text_server: RunningServer) -> None:
    response = text_server.paint("a fox")
    assert response.json()["data"][0]["revised_prompt"] is None
    assert files_of(response) == files_of(text_server.paint("a fox", prompt_rewriter="off"))


@pytest.mark.parametrize("choice", ["auto", "force", {}, {"style": "tags", "seed": 3}, {"system": "be brief"}])
def test_the_image_is_generated_from_the_revised_prompt(text_server: RunningServer, choice: object) -> None:
    response = text_server.paint("something with a fox", prompt_rewriter=choice, seed=5)
    [entry] = response.json()["data"]
    assert entry["revised_prompt"] == FOX
    pixels = [decoded(file) for file in (*files_of(response), *files_of(text_server.paint(FOX, seed=5)))]
    assert pixels[0] == pixels[1]
    assert pixels[0] != decoded(files_of(text_server.paint("something with a fox", seed=5))[0])


def decoded(file: bytes) -> bytes:
    from diffserve.media.images import decode_image

    return decode_image(file).data


def test_the_file_records_the_wish(text_server: RunningServer) -> None:
    [file] = files_of(text_server.paint("something: with a fox,\nplease", prompt_rewriter="auto"))
    text = read_infotext(file)
    assert text is not None
    assert 'Original prompt: "something: with a fox,\\nplease"' in text
    read = parse_infotext(text)
    assert (read.prompt, read.fields["Original prompt"]) == (FOX, "something: with a fox,\nplease")


@pytest.mark.parametrize("wish", ["sorry", "unsure", "?"])
def test_a_rejected_rewrite_causes_a_warning_and_the_image_is_generated(text_server: RunningServer, wish: str) -> None:
    response = text_server.paint(wish, prompt_rewriter="auto")
    assert response.json()["data"][0]["revised_prompt"] is None
    [warning] = response.json()["warnings"]
    assert warning.endswith("the prompt was left as it is.")
    assert decoded(files_of(response)[0]) == decoded(files_of(text_server.paint(wish))[0])


def test_force_accepts_what_auto_rejects(text_server: RunningServer) -> None:
    [entry] = text_server.paint("unsure", prompt_rewriter="force").json()["data"]
    assert entry["revised_prompt"] in SCRIPT["unsure"]


def test_every_image_of_a_request_is_generated_from_the_same_prompt(text_server: RunningServer) -> None:
    entries = text_server.paint("unsure", n=3, prompt_rewriter="force").json()["data"]
    assert len({entry["revised_prompt"] for entry in entries}) == 1


def test_without_a_language_model_the_wish_is_used_with_a_warning(server: RunningServer) -> None:
    response = server.paint("a fox", prompt_rewriter="auto")
    assert response.json()["data"][0]["revised_prompt"] is None
    assert "no language model is loaded" in response.json()["warnings"][0]
    assert files_of(response) == files_of(server.paint("a fox"))


def test_openai_client_reads_the_revised_prompt(text_client: OpenAI) -> None:
    answer = text_client.images.generate(
        prompt="a fox", extra_body={"num_inference_steps": 1, "prompt_rewriter": "auto", "seed": 1}
    )
    assert answer.data is not None
    assert answer.data[0].revised_prompt == FOX
    assert base64.b64decode(answer.data[0].b64_json or "").startswith(b"\x89PNG")
