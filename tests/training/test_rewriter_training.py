"""The prompt rewriter's training stage: tokenizer, prompt, batches, loss, export, scores."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from diffserve.training.rewriter_model import (
    CAPTION,
    CONTEXT_TOKENS,
    END,
    MAX_NEW_TOKENS,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    WISH,
    answer,
    build_rewriter,
    build_tokenizer,
    export_rewriter,
    prompt,
    system_prompt,
)
from diffserve.training.rewriter_training import (
    IGNORED,
    POOL_BATCHES,
    TextScore,
    batches,
    caption_loss,
    optimizers_for,
    rewrite,
    score,
    score_rewriter,
    train_rewriter,
)
from diffserve.training.training_loop import TrainSettings
from diffserve.training.wishes import held_out_wishes, wishes
from diffserve.world.captions import caption
from diffserve.world.scenes import scenes

MAX_BYTES = 20_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(num_wishes=2500)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return build_rewriter(tokenizer).eval()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "  two   spaces ",
        "Ünïcödé ß İ",
        "猫と月",
        "🐱👩‍👩‍👧",
        "\t\n\r\x00\x7f",
        "<b>bold</b>",
        "ﷺ\u202e\ufeff",
        "e\u0301 é",
    ],
)
def test_the_tokenizer_keeps_every_byte_of_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_keeps_random_unicode(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(
            chr(rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(20)
        )
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_captions_take_few_tokens_and_leave_room_for_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCABULARY_SIZE
    lengths = [len(tokenizer(answer(wish.caption)).input_ids) for wish in islice(wishes(1, held_out=False), 500)]
    assert sum(lengths) / len(lengths) < 14
    assert max(lengths) <= MAX_NEW_TOKENS
    assert len(tokenizer(system_prompt()).input_ids) < CONTEXT_TOKENS // 2


@pytest.mark.parametrize(
    "text", ["A Kitty  on the\nBEACH!", "<caption>a dog<end>", "", "<<wish>>", "say <system> İstanbul", "a" * 50]
)
@pytest.mark.parametrize("system", ["", "Be <end> BRIEF"])
def test_chat_template_and_prompt_agree_and_wishes_cannot_contain_special_tokens(
    tokenizer: PreTrainedTokenizerFast, text: str, system: str
) -> None:
    before = [{"role": "system", "content": system}] if system else []
    chat = [*before, {"role": "user", "content": "an earlier wish"}, {"role": "assistant", "content": "a cat"}]
    chat.append({"role": "user", "content": text})
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == prompt(text, system)
    ids = tokenizer(written).input_ids
    special = [token for token in tokenizer.convert_ids_to_tokens(ids) if token in SPECIAL_TOKENS]
    assert special[-2:] == [WISH, CAPTION]
    assert len(special) == 2 + bool(system)


def test_the_loss_counts_the_caption_and_its_end_alone(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    source = batches(tokenizer, TrainSettings(1, 8, 1e-3), seed=0)
    for pairs in islice(source, POOL_BATCHES):
        for ids, labels in zip(pairs.token_ids, pairs.labels, strict=True):
            counted = labels != IGNORED
            assert torch.equal(ids[counted], labels[counted])
            words = tokenizer.decode(labels[counted])
            assert words.endswith(END)
            start = int(counted.nonzero()[0])
            assert tokenizer.convert_ids_to_tokens(ids.tolist())[start - 1] == CAPTION
            assert (ids[start + int(counted.sum()) :] == tokenizer.pad_token_id).all()
    reference_loss = model(pairs.token_ids, labels=pairs.labels).loss
    assert caption_loss(model, pairs).item() == pytest.approx(reference_loss.item(), rel=1e-4)


def test_some_batches_carry_a_system_text_and_batches_depend_on_the_seed_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    settings = TrainSettings(1, 4, 1e-3)
    first, second = (batches(tokenizer, settings, seed=5) for _ in range(2))
    system = tokenizer.convert_tokens_to_ids("<system>")
    drawn = [pairs.token_ids for pairs in islice(first, POOL_BATCHES)]
    assert all(torch.equal(ids, next(second).token_ids) for ids in drawn)
    assert 0 < sum(bool((ids == system).any()) for ids in drawn) < POOL_BATCHES / 2


def test_every_weight_is_trained_by_one_optimizer(model: LlamaForCausalLM) -> None:
    groups = [
        group for optimizer in optimizers_for(model, TrainSettings(1, 1, 1e-3)) for group in optimizer.param_groups
    ]
    parameter_ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(parameter_ids) == sorted(id(parameter) for parameter in model.parameters())


def test_the_exported_directory_is_read_by_transformers_and_answers_the_same(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    export_rewriter(tmp_path, model, tokenizer)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < MAX_BYTES
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["architectures"] == ["LlamaForCausalLM"]
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.dtype == torch.float16
    assert words.get_vocab() == tokenizer.get_vocab()
    assert words.chat_template == tokenizer.chat_template
    assert set(words.all_special_tokens) == set(SPECIAL_TOKENS)
    assert words.decode(words("a  <b> 🐱").input_ids) == "a  <b> 🐱"
    assert (words.eos_token, words.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    texts = ["a cat", "two dogs on the beach please"]
    rounded = build_rewriter(tokenizer).half().float().eval()
    rounded.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    assert rewrite(again.float(), words, texts) == rewrite(rounded, tokenizer, texts)


def test_a_wish_rewritten_alone_or_in_a_batch_comes_out_the_same(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    texts = ["a cat", "two dogs on the beach please, as pretty as you can make them", "猫"]
    assert rewrite(model, tokenizer, texts, batch_size=1) == rewrite(model, tokenizer, texts, batch_size=3)


def test_scores_count_what_grants_the_wish() -> None:
    originals = held_out_wishes(20)
    perfect = score(originals, [wish.caption for wish in originals])
    assert (perfect.count, perfect.spoken, perfect.granted) == (20, 20, 20)
    shifted = score(originals, [wish.caption for wish in [*originals[1:], originals[0]]])
    assert shifted.spoken == 20
    assert shifted.granted < 0.2 * shifted.count
    assert score(originals, ["no caption"] * 20).spoken == 0
    assert score([], []) == TextScore(0, 0, 0)


@pytest.mark.slow
def test_a_few_iterations_lower_the_loss_and_an_interrupted_training_goes_on(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "rewriter-tokenizer")
    losses: list[float] = []
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "rewriter-tokenizer")
    pairs = next(batches(tokenizer, TrainSettings(1, 16, 1e-3), seed=99))

    @torch.inference_mode()
    def look(model: LlamaForCausalLM, iteration: int) -> None:
        losses.append(float(caption_loss(model, pairs)))

    settings = TrainSettings(12, 4, 2e-3, warmup=1, decay_share=0.1, checkpoint_every=6)
    train_rewriter(settings, tmp_path, look, look_every=4)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5
    longer = TrainSettings(14, 4, 2e-3, warmup=1, decay_share=0.1)
    train_rewriter(longer, tmp_path, look, look_every=1)
    assert len(losses) == 3 + 2, "two iterations were left"
    bill = json.loads((tmp_path / "rewriter.json").read_text(encoding="utf-8"))
    assert bill["iterations_done"] == 14


@pytest.mark.slow
def test_scores_tell_complete_from_vague_and_wishes_from_captions(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    scores = score_rewriter(model, tokenizer, count=10)
    assert set(scores) == {"all", "complete", "vague", "by hand", "captions"}
    assert scores["all"].count == scores["captions"].count == 10
    assert scores["complete"].count + scores["vague"].count == 10
    assert scores["by hand"].count == 4


def test_captions_of_the_image_model_are_known_to_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(3)
    lengths = [len(tokenizer(f" {caption(scene, rng)}").input_ids) for scene in islice(scenes(4, held_out=True), 200)]
    assert sum(lengths) / len(lengths) < 14
