"""Wishes go in, prompts come out: events, fallbacks, seeds, cancellations, failures."""

from __future__ import annotations

import threading

import pytest

from diffserve.api.errors import DeadlineExceeded, InvalidRequest, QueueFull
from diffserve.api.rewrite_types import RewriteDelta, RewriteEvent, RewriteFinished, RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextAccepted, TextEvent, TextFinished, TextRequest
from diffserve.api.types import Cancelled, Failed, RewriteOptions
from diffserve.engine.rewriter import Rewriter
from diffserve.rewriting.grammar import caption_constraint
from diffserve.runtime.decoding.constraint import DEAD
from tests.engine.rewriting.conftest import MakeRewriter
from tests.engine.rewriting.scripted import CONTEXT_TOKENS

FOX = "a red fox, deep snow, warm evening light"
BOATS = {"a boat", "a ship", "a raft"}


def drive(rewriter: Rewriter) -> tuple[list[RewriteEvent], list[TextEvent]]:
    """Tick like a server until there is no work."""
    events, text_events = rewriter.feed([])
    while rewriter.texts.has_work:
        new, other_events = rewriter.feed(rewriter.texts.tick())
        events, text_events = events + new, text_events + other_events
    return events, text_events


def finished(events: list[RewriteEvent], request_id: str) -> RewriteFinished:
    [end] = [event for event in events if event.request_id == request_id and not isinstance(event, RewriteDelta)]
    assert isinstance(end, RewriteFinished)
    return end


def test_a_wish_becomes_the_prompt_that_the_model_says(make_rewriter: MakeRewriter) -> None:
    [rewrite] = make_rewriter().rewrite("something for winter")
    assert (rewrite.prompt, rewrite.answer, rewrite.fallback, rewrite.warning) == (FOX, FOX, None, None)
    assert rewrite.mean_entropy < 0.01


def test_a_server_feeds_every_tick_and_gets_the_final_event(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    request = RewriteRequest(wish="something for winter", num_prompts=2)
    assert rewriter.submit(request) == request.request_id
    assert rewriter.num_live == 1
    events, text_events = drive(rewriter)
    end = finished(events, request.request_id)
    assert (text_events, len(events), rewriter.num_live) == ([], 1, 0)
    assert [rewrite.prompt for rewrite in end.rewrites] == [FOX, FOX]
    assert (end.style, end.model) == ("tags", rewriter.texts.info.model_id)
    assert end.usage.output_tokens == 2 * 4
    assert end.usage.prompt_tokens > 2 * 200, "the system text is said in each"
    assert 0 < end.timings.ttft_s <= end.timings.total_s


def test_texts_of_other_people_pass_through_untouched(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    other = TextRequest(prompt="<say 0>", params=SamplingParams(temperature=0), add_special_tokens=False)
    rewriter.texts.submit(other)
    rewriter.submit(RewriteRequest(wish="something for winter"))
    events, text_events = drive(rewriter)
    assert len(events) == 1
    assert {event.request_id for event in text_events} == {other.request_id}
    assert isinstance(text_events[0], TextAccepted)
    assert isinstance(text_events[-1], TextFinished)
    assert text_events[-1].text == FOX


def test_several_wishes_share_ticks_and_the_system_text(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    answers = rewriter.answer([RewriteRequest(wish=f"winter number {number}") for number in range(6)])
    assert [answer.rewrites[0].prompt for answer in answers] == [FOX] * 6
    assert any(len(tick.rows) > 3 for tick in rewriter.texts.trace)
    assert answers[-1].usage.cached_tokens > 200


def test_more_wishes_than_may_wait_are_answered_in_turn(make_rewriter: MakeRewriter) -> None:
    answers = make_rewriter(max_waiting=2).answer([RewriteRequest(wish="winter") for _ in range(7)])
    assert [answer.rewrites[0].prompt for answer in answers] == [FOX] * 7


@pytest.mark.parametrize(
    ("wish", "reason", "warning"),
    [
        ("sorry to ask", "refused", "the rewriter declined to rewrite the prompt"),
        ("nothing", "empty", "the rewriter returned no text"),
        ("who knows", "empty", "the rewriter returned no text"),
        ("circles", "runaway", "the rewriter repeated itself"),
        ('a sign that says "Closed"', "lost_words", 'the rewriter left out "Closed"'),
        ("a tram in Lisbon", "lost_words", 'the rewriter left out "Lisbon"'),
        ("something wordy", "too_long", "the rewritten prompt has 40 tokens, but the image model reads only 30"),
        ("be unsure", "unsure", "the rewriter was not confident enough; "),
    ],
)
def test_what_cannot_be_taken_leaves_the_wish_as_it_is_and_says_so(
    wish: str, reason: str, warning: str, make_rewriter: MakeRewriter
) -> None:
    [rewrite] = make_rewriter(max_entropy=0.9).rewrite(wish)
    assert (rewrite.prompt, rewrite.fallback) == (wish, reason)
    assert rewrite.warning is not None
    assert rewrite.warning.startswith(warning)
    assert rewrite.warning.endswith("; the prompt was left as it is.")


def test_an_answer_that_does_not_end_is_not_taken(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter("embedded")  # which takes 32 tokens, and a random walk over words seldom ends
    [rewrite] = rewriter.rewrite("something for winter")
    assert rewrite.fallback == "runaway"
    assert "did not finish within 32 tokens" in str(rewrite.warning)


def test_the_embedded_style_says_only_captions_of_its_language(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter("embedded")
    drawn = rewriter.rewrite("something for winter", 12)[1:]  # random letters, but for the language
    model = rewriter.texts.model
    constraint = caption_constraint(model.tokenizer, model.end_ids)
    for rewrite in drawn:
        state = constraint.start
        for token_id in model.tokenizer(rewrite.answer).input_ids:
            state = constraint.advance(state, token_id)
        assert state != DEAD, rewrite.answer
    assert len({rewrite.answer[:8] for rewrite in drawn}) > 5


def test_words_of_the_wish_that_come_through_are_no_reason_to_fall_back(make_rewriter: MakeRewriter) -> None:
    [rewrite] = make_rewriter().rewrite('a sign that says "Open"')
    assert (rewrite.prompt, rewrite.fallback) == ('a shop window, a sign that says "Open", night', None)


def test_an_unsure_answer_is_taken_when_that_is_asked_for_and_a_refusal_never(make_rewriter: MakeRewriter) -> None:
    rewriter, force = make_rewriter(max_entropy=0.9), RewriteOptions(force=True)
    [taken] = rewriter.rewrite("be unsure", options=force)
    assert (taken.prompt, taken.fallback) == ("an apple", None)
    assert taken.mean_entropy > 0.9
    assert rewriter.rewrite("sorry", options=force)[0].fallback == "refused"


def test_thoughts_and_introductions_are_no_part_of_the_prompt(make_rewriter: MakeRewriter) -> None:
    [rewrite] = make_rewriter().rewrite("thoughts")
    assert rewrite.prompt == "a cat, moonlight"
    assert rewrite.answer.startswith("<think>")


def test_too_long_an_answer_loses_its_last_tags(make_rewriter: MakeRewriter) -> None:
    [rewrite] = make_rewriter().rewrite("a long list")
    assert rewrite.prompt == "an oak, an elm, a yew, a fir, a pine, an ash, a lime tree, a beech, a larch, an alder"
    assert rewrite.fallback is None


def test_the_first_prompt_is_the_likeliest_and_the_others_differ_by_seed(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    prompts = [rewrite.prompt for rewrite in rewriter.rewrite("either", 12)]
    assert prompts[0] == "a boat"
    assert set(prompts) == BOATS
    longer = rewriter.rewrite("either", 14, RewriteOptions(seed=0))
    assert [rewrite.prompt for rewrite in longer[:12]] == prompts
    other_prompts = [rewrite.prompt for rewrite in rewriter.rewrite("either", 12, RewriteOptions(seed=5))]
    assert other_prompts[0] == "a boat"
    assert other_prompts[1:8] == [rewrite.prompt for rewrite in longer[6:13]], "prompt i is drawn with seed + i"


def test_the_same_wish_seed_and_options_give_the_same_whoever_else_is_there(make_rewriter: MakeRewriter) -> None:
    alone = make_rewriter().rewrite("either", 5, RewriteOptions(seed=9))
    crowd = [RewriteRequest(wish=wish) for wish in ("winter", "a long list", "thoughts")]
    mine = RewriteRequest(wish="either", num_prompts=5, options=RewriteOptions(seed=9))
    together = make_rewriter().answer([*crowd, mine])[-1]
    assert [rewrite.prompt for rewrite in together.rewrites] == [rewrite.prompt for rewrite in alone]


def test_a_style_and_a_system_text_can_be_chosen_for_one_wish(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    [end] = rewriter.answer([RewriteRequest(wish="winter", options=RewriteOptions(style="prose", system="be brief"))])
    assert (end.style, end.rewrites[0].prompt) == ("prose", FOX)
    [plain] = rewriter.answer([RewriteRequest(wish="winter")])
    assert end.usage.prompt_tokens != plain.usage.prompt_tokens


def test_deltas_are_sent_as_they_come_without_thoughts(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    events = list(rewriter.stream(RewriteRequest(wish="something for winter", deltas=True)))
    assert [event.text for event in events[:-1] if isinstance(event, RewriteDelta)] == [
        "a red fox",
        ", deep snow",
        ", warm evening light",
    ]
    assert isinstance(events[-1], RewriteFinished)
    *shown, _ = rewriter.stream(RewriteRequest(wish="thoughts", deltas=True))
    assert [event.text for event in shown if isinstance(event, RewriteDelta)] == [
        "Here is your prompt: a cat, moonlight"
    ]


def test_deltas_name_the_prompt_they_belong_to(make_rewriter: MakeRewriter) -> None:
    *deltas, end = make_rewriter().stream(RewriteRequest(wish="either", num_prompts=4, deltas=True))
    assert isinstance(end, RewriteFinished)
    text_by_index = {delta.index: delta.text for delta in deltas if isinstance(delta, RewriteDelta)}
    assert text_by_index == {index: rewrite.answer for index, rewrite in enumerate(end.rewrites)}


def test_a_cancelled_rewrite_gives_its_pages_back_and_is_reported_once(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter(max_batch_tokens=64)
    request = RewriteRequest(wish="winter", num_prompts=3)
    rewriter.submit(request)
    rewriter.feed(rewriter.texts.tick())
    assert rewriter.cancel(request.request_id)
    events, text_events = drive(rewriter)
    assert (events, text_events) == ([Cancelled(request_id=request.request_id)], [])
    assert not rewriter.cancel(request.request_id)
    assert not rewriter.cancel("nobody")


def test_an_iterator_that_is_left_cancels_its_rewrite(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    events = rewriter.stream(RewriteRequest(wish="winter", num_prompts=2, deltas=True))
    next(iter(events))
    events.close()  # type: ignore[attr-defined] # it is a generator
    assert (rewriter.num_live, rewriter.texts.num_live) == (0, 0)
    assert drive(rewriter) == ([], [])


def test_a_deadline_fails_the_rewrite_once_though_both_of_its_texts_expire(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter(max_batch_tokens=16)
    request = RewriteRequest(wish="winter", num_prompts=2, deadline_s=1e-9)
    rewriter.submit(request)
    events, text_events = drive(rewriter)
    assert [(type(event), event.request_id) for event in events] == [(Failed, request.request_id)]
    assert text_events == []
    with pytest.raises(DeadlineExceeded):
        rewriter.answer([RewriteRequest(wish="winter", deadline_s=1e-9)])


def test_a_refused_request_leaves_nothing_behind(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter(max_waiting=1)
    with pytest.raises(QueueFull):
        rewriter.submit(RewriteRequest(wish="winter", num_prompts=2))  # the first question fits, the second does not
    assert rewriter.num_live == 0
    assert drive(rewriter) == ([], [])
    with pytest.raises(InvalidRequest, match=f"context of {CONTEXT_TOKENS} tokens"):
        rewriter.submit(RewriteRequest(wish="x" * CONTEXT_TOKENS))
    with pytest.raises(InvalidRequest, match="'poem'; choose one of embedded, prose, tags"):
        rewriter.submit(RewriteRequest(wish="winter", options=RewriteOptions(style="poem")))
    assert (rewriter.num_live, rewriter.texts.has_work) == (0, False)


def test_an_id_in_use_is_refused_and_the_first_goes_on(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    request = RewriteRequest(wish="winter")
    rewriter.submit(request)
    with pytest.raises(InvalidRequest, match="already in use"):
        rewriter.submit(request)
    assert finished(drive(rewriter)[0], request.request_id).rewrites[0].prompt == FOX


def test_threads_that_rewrite_at_once_get_their_own_answers(make_rewriter: MakeRewriter) -> None:
    rewriter = make_rewriter()
    prompts: dict[str, str] = {}
    wishes = ("winter", "thoughts", "a long list", 'a sign that says "Open"')
    threads = [
        threading.Thread(target=lambda wish=wish: prompts.update({wish: rewriter.rewrite(wish, 2)[1].prompt}))
        for wish in wishes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {wish: prompt[:8] for wish, prompt in prompts.items()} == dict(
        zip(wishes, ("a red fo", "a cat, m", "an oak, ", "a shop w"), strict=True)
    )
    assert drive(rewriter) == ([], [])
