"""Whose turn it is: in the long run both sides get their share of the time, whatever a call of each costs."""

from __future__ import annotations

import pytest

from diffserve.engine.time_share import TimeShare


def texts_turn(share: TimeShare) -> bool:
    """Read the property through a function, because a type checker assumes that it does not change."""
    return share.is_texts_turn


def run(share: TimeShare, image_s: float, text_s: float, num_turns: int = 40_000) -> tuple[float, float, int]:
    """Seconds of both sides when both always have work, and the most calls between two steps."""
    spent = [0.0, 0.0]
    calls = max_calls = 0
    for _ in range(num_turns):
        if share.is_texts_turn:
            share.record_text_call(text_s, has_moved=True)
            spent[1] += text_s
            calls += 1
        else:
            share.record_image_step(image_s, has_moved=True, is_shared=True)
            spent[0] += image_s
            max_calls, calls = max(max_calls, calls), 0
    return spent[0], spent[1], max_calls


@pytest.mark.parametrize("image_s", [0.001, 0.1, 3.0])
@pytest.mark.parametrize("text_s", [0.001, 0.02, 0.7])
@pytest.mark.parametrize("part", [0.1, 0.25, 0.6])
def test_texts_get_their_share_of_the_time(part: float, text_s: float, image_s: float) -> None:
    share = TimeShare(part)
    images, texts, _ = run(share, image_s, text_s)
    assert texts / (images + texts) == pytest.approx(part, abs=0.03)
    assert share.text_s / (share.image_s + share.text_s) == pytest.approx(part, abs=0.03)


def test_calls_come_in_bursts_of_what_two_steps_earn() -> None:
    assert run(TimeShare(0.25), image_s=0.09, text_s=0.01)[2] in (6, 7)


def test_a_call_longer_than_a_burst_waits_for_many_steps() -> None:
    images, texts, max_calls = run(TimeShare(0.25), image_s=0.01, text_s=0.09)
    assert max_calls == 1
    assert images / 0.01 == pytest.approx(27 * texts / 0.09, rel=0.1)


def saved_up(part: float = 0.5, step_s: float = 0.1) -> TimeShare:
    """Return a time share after a hundred steps without text requests."""
    share = TimeShare(part)
    for _ in range(100):
        share.record_image_step(step_s, has_moved=True, is_shared=False)
    return share


def test_nothing_is_known_before_the_first_step() -> None:
    share = TimeShare(0.2)
    assert not texts_turn(share)
    assert share.call_s is None
    share.record_image_step(0.4, has_moved=True, is_shared=False)
    assert share.call_s == pytest.approx(0.1)
    assert not texts_turn(share)
    share.record_image_step(0.4, has_moved=True, is_shared=False)
    assert texts_turn(share)


def test_who_comes_now_and_then_is_heard_at_once() -> None:
    share = saved_up()
    assert texts_turn(share)
    assert share.admits_texts
    assert share.image_s == 0.0


def test_who_asks_for_nothing_saves_little_up() -> None:
    share = saved_up()
    for _ in range(3):
        assert texts_turn(share)
        share.record_text_call(0.1001, has_moved=True)
    assert not texts_turn(share)


def test_newcomers_are_let_in_during_the_first_half_of_a_burst() -> None:
    share = TimeShare(0.5)
    while not texts_turn(share):
        share.record_image_step(0.1, has_moved=True, is_shared=True)
    open_for = [share.admits_texts]
    while texts_turn(share):
        share.record_text_call(0.01, has_moved=True)
        open_for.append(share.admits_texts)
    assert open_for == sorted(open_for, reverse=True)
    assert open_for.count(True) == pytest.approx(len(open_for) / 2, abs=2)


def num_steps_before_a_call(share: TimeShare, image_s: float = 0.1) -> int:
    num_steps = 0
    while not texts_turn(share):
        share.record_image_step(image_s, has_moved=True, is_shared=True)
        num_steps += 1
    return num_steps


def test_a_call_that_took_for_ever_is_not_paid_back_for_ever() -> None:
    share = saved_up()
    share.record_text_call(1e6, has_moved=True)
    assert num_steps_before_a_call(share) == pytest.approx(52, abs=2)


def test_a_turn_during_which_the_machine_slept_changes_little() -> None:
    share = TimeShare(0.5)
    run(share, image_s=0.1, text_s=0.01, num_turns=200)
    num_steps_before_a_call(share)
    share.record_text_call(60.0, has_moved=True)
    assert num_steps_before_a_call(share) <= 6
    share.record_image_step(60.0, has_moved=True, is_shared=True)
    num_calls = 0
    while texts_turn(share):
        share.record_text_call(0.01, has_moved=True)
        num_calls += 1
    assert num_calls <= 60


def test_a_side_that_cannot_move_lets_the_other_go_on() -> None:
    share = saved_up()
    share.record_text_call(0.0, has_moved=False)
    assert not texts_turn(share), "texts that wait for pages would keep the images from giving some back"
    share.record_image_step(0.0, has_moved=False, is_shared=True)
    assert texts_turn(share), "images that wait for pages would keep the texts from giving some back"


def test_texts_pay_nothing_for_time_in_which_images_could_not_move() -> None:
    share = saved_up()
    for _ in range(100):
        share.record_text_call(1.0, has_moved=True)
        share.record_image_step(0.0, has_moved=False, is_shared=True)
    share.record_text_call(0.1, has_moved=True)
    assert num_steps_before_a_call(share) <= 3


@pytest.mark.parametrize("part", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_that_starves_one_side_cannot_be(part: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        TimeShare(part)
