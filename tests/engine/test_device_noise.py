"""Noise generated on the device: the numbers of a CUDA generator, computed for a full batch at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import DiffusionParams
from diffserve.runtime.philox import Draw, normals
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request
from tests.engine.test_dry_tick import STEPS, open_engine, submit, ticks

CUDA_SEED_0 = [
    -0.92466259, -0.42534415, -2.6438457, 0.14518388, -0.12086647,
    -0.57972564, -0.62285122, -0.32838709, -1.07454231, -0.36314407,
]  # fmt: skip
"""``torch.randn(10, device="cuda")`` after ``torch.manual_seed(0)``, as A1111's ``rng_philox.py`` quotes it."""

CPU = torch.device("cpu")


def test_the_numbers_are_those_of_cuda_and_of_no_neighbour() -> None:
    torch.testing.assert_close(normals([Draw(0, 0)], 10, CPU)[0], torch.tensor(CUDA_SEED_0), rtol=0, atol=3e-7)
    draws = [Draw(seed, number) for seed in (0, 7, 2**32 - 1) for number in (0, 1, 19)]
    together = normals(draws, 4 * 9 * 7, CPU)
    assert all(torch.equal(row, normals([draw], 4 * 9 * 7, CPU)[0]) for draw, row in zip(draws, together, strict=True))
    assert len({row.numpy().tobytes() for row in together}) == len(draws)
    many = normals([Draw(5, 3)], 100_000, CPU)
    assert abs(many.mean()) < 0.015
    assert abs(many.std() - 1.0) < 0.015


def test_a_picture_of_device_noise_does_not_depend_on_its_neighbours(make_engine: MakeEngine) -> None:
    sources = ("device", "cpu", None, "cpu")
    requests = [
        image_request("sd15", "euler_a", seed=seed, num_steps=3, noise_source=source)
        for seed, source in enumerate(sources)
    ]
    together = make_engine(noise_source="device").generate(
        [*requests, image_request("sd15", "ddim", seed=9, num_steps=3)]
    )
    assert [result.noise_source for result in together] == ["device", "cpu", "device", "cpu", "device"]
    otherwise = make_engine()  # whose own is "cpu"
    alone = [
        otherwise.generate(replace(request, diffusion=replace(request.diffusion, noise_source=result.noise_source)))[0]
        for request, result in zip(requests, together, strict=False)
    ]
    assert [result.picture.data for result in together[:4]] == [result.picture.data for result in alone]
    [other] = otherwise.generate(requests[2])
    assert other.picture.data != alone[2].picture.data


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="noise_source is 'gpu'; give cpu or device, or leave it out"):
        DiffusionParams(noise_source="gpu")  # type: ignore[arg-type]


@pytest.mark.slow
def test_noise_of_all_rows_takes_the_launches_and_the_transfer_of_one(tmp_path: Path) -> None:
    engine = open_engine("tiny-random", tmp_path, noise_source="device")
    results = []
    for sampler in ("ddim", "euler_a"):
        for seed in range(4):
            submit(engine, sampler, seed, guidance_scale=1.0)
        ticks(engine, 2)
        [work] = ticks(engine, 1)
        results.append((work.copies, len(work.kernels)))
        ticks(engine, STEPS)
    assert not engine.has_work
    (copies, kernels), (noisy_copies, noisy_kernels) = results
    assert noisy_copies - copies == 1
    assert 0 < noisy_kernels - kernels < 200
