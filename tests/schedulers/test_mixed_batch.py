"""Mixed batches: rows of different samplers and step counts have bitwise the same results as alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from schedulers import HISTORY, NUM_COLUMNS, SAMPLERS, NoiseSchedule, StepTable, compile_table
from schedulers.noise import make_betas
from schedulers.update import advance, guide, new_history, renoise, rows_of, scale_input

SD = NoiseSchedule.from_betas(make_betas("scaled_linear", 1000, 0.00085, 0.012))
SHAPE = (1, 4, 5, 7)


def network(scaled: Tensor) -> Tensor:
    """Apply an elementwise function, so that the network output cannot depend on the batch."""
    return torch.tanh(scaled) * 0.7 + scaled * 0.2


def make_tables() -> list[StepTable]:
    """Return one table per sampler, with different numbers of steps."""
    return [compile_table(name, SD, 4 + index, spacing="trailing") for index, name in enumerate(SAMPLERS)]


def noises(table: StepTable, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return the initial noise and, for each row, a draw or zeros, in the order of the image's generator."""
    generator = torch.Generator("cpu").manual_seed(seed)
    start = torch.randn(SHAPE, generator=generator)
    return start, [torch.randn(SHAPE, generator=generator) if draws else torch.zeros(SHAPE) for draws in table.draws]


def run_alone(table: StepTable, seed: int) -> list[Tensor]:
    """Return the latents after each row of a run without other images."""
    start, draws = noises(table, seed)
    x, rows, states = table.init_scale * start, rows_of(table), []
    history = new_history(x)
    for row in range(table.num_rows):
        at = rows[row : row + 1]
        x, _, history = advance(x, network(scale_input(x, at)), history, draws[row], at)
        states.append(x)
    return states


def test_mixed_batch_is_bitwise_equal_to_separate_runs() -> None:
    batch = make_tables()
    expected = [run_alone(table, seed) for seed, table in enumerate(batch)]
    starts, draws = zip(*(noises(table, seed) for seed, table in enumerate(batch)), strict=True)
    rows = [rows_of(table) for table in batch]
    lanes = [table.init_scale * start for table, start in zip(batch, starts, strict=True)]
    histories = [new_history(lane) for lane in lanes]
    for tick in range(max(table.num_rows for table in batch)):
        live = [k for k, table in enumerate(batch) if tick < table.num_rows]
        at = torch.stack([rows[k][tick] for k in live])
        x = torch.cat([lanes[k] for k in live])
        output = network(scale_input(x, at))
        noise = torch.cat([draws[k][tick] for k in live])
        x, denoised, history = advance(x, output, torch.cat([histories[k] for k in live]), noise, at)
        assert denoised.shape == x.shape
        for position, k in enumerate(live):
            lanes[k], histories[k] = x[position : position + 1], history[position : position + 1]
            assert torch.equal(lanes[k], expected[k][tick])


def test_update_matches_the_table_in_float64() -> None:
    table = compile_table("unipc", SD, 5)
    rows = rows_of(table).double()
    x, output, noise = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))
    history = torch.randn((1, HISTORY, *SHAPE[1:]), dtype=torch.float64)
    x_next, denoised, pushed = advance(x, output, history, noise, rows[2:3])
    c_skip, c_out, a = table.c_skip[2], table.c_out[2], table.a[2]
    expected = c_skip * x + c_out * output
    torch.testing.assert_close(denoised, expected, rtol=1e-6, atol=1e-6)
    by_hand = a * x + table.b[2, 0] * expected + table.n[2] * noise
    for back in range(HISTORY):
        by_hand = by_hand + table.b[2, back + 1] * history[:, back]
    torch.testing.assert_close(x_next, by_hand, rtol=1e-6, atol=1e-5)
    assert torch.equal(pushed[:, 1:], history[:, :-1])


def test_guidance_mixes_scales_by_row() -> None:
    uncond, cond = torch.randn((3, *SHAPE[1:])), torch.randn((3, *SHAPE[1:]))
    mixed = guide(uncond, cond, torch.tensor([0.0, 1.0, 7.5]))
    assert torch.equal(mixed[0], uncond[0])
    torch.testing.assert_close(mixed[1], cond[1])
    torch.testing.assert_close(mixed[2], uncond[2] + 7.5 * (cond[2] - uncond[2]))


def test_renoise_adds_noise_up_to_the_level_after_a_row() -> None:
    table = compile_table("euler", SD, 5)
    rows = rows_of(table)
    latents, noise = torch.randn((2, *SHAPE[1:])), torch.randn((2, *SHAPE[1:]))
    noisy = renoise(latents, noise, torch.stack([rows[1], rows[4]]))
    torch.testing.assert_close(noisy[0], latents[0] + float(table.sigma[2]) * noise[0])
    assert torch.equal(noisy[1], latents[1])


def test_rows_of_has_one_row_for_each_evaluation() -> None:
    assert rows_of(compile_table("heun", SD, 6)).shape == (11, NUM_COLUMNS)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_noise_free_image_does_not_change(sampler: str) -> None:
    table = compile_table(sampler, NoiseSchedule(SD.alphas_cumprod, "sample"), 9)
    image = torch.randn(SHAPE)
    x, history, rows = image.clone(), new_history(image), rows_of(table)
    for row in range(table.num_rows):
        x, _, history = advance(x, image, history, torch.zeros_like(x), rows[row : row + 1])
    np.testing.assert_allclose(x.numpy(), image.numpy(), atol=2e-4)
