"""The tensors behind the slots."""

from __future__ import annotations

import torch

from diffserve.engine.image.batch import LatentPool
from schedulers import HISTORY
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request

SHAPE = (4, 8, 8)


def test_a_slot_opened_again_holds_its_new_start_and_no_history() -> None:
    pool = LatentPool(torch.device("cpu"))
    pool.open(0, torch.ones(SHAPE))
    slots = torch.tensor([0])
    pool.scatter(slots, torch.full((1, *SHAPE), torch.nan), torch.full((1, HISTORY, *SHAPE), torch.nan))
    pool.open(0, 2.0 * torch.ones(SHAPE))
    latents, history = pool.gather(SHAPE, slots)
    assert latents.eq(2.0).all()
    assert history.eq(0.0).all()


def num_bytes(pool: LatentPool) -> int:
    """Bytes held now."""
    return sum(buffer.nbytes for buffer in (*pool._latents.values(), *pool._history.values()))


def test_a_growing_pool_keeps_what_it_holds() -> None:
    pool = LatentPool(torch.device("cpu"))
    pool.open(1, torch.ones(SHAPE))
    small = num_bytes(pool)
    pool.open(40, 3.0 * torch.ones(SHAPE))
    assert num_bytes(pool) == 8 * small
    assert pool.latent(SHAPE, 1).eq(1.0).all()
    assert pool.latent(SHAPE, 40).eq(3.0).all()


def test_a_warm_engine_has_room_for_all_slots_of_its_native_size(make_engine: MakeEngine) -> None:
    engine = make_engine(max_lanes=24)
    engine.warm_up()
    pool = engine.runners.pool
    before = num_bytes(pool)
    engine.generate([image_request("sd15", "ddim", seed=seed, num_steps=1, guidance_scale=1.0) for seed in range(24)])
    assert num_bytes(pool) == before > 0


def test_storage_of_shapes_nobody_paints_is_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=2)
    pool = engine.runners.pool
    for cells in range(2, 13):
        engine.generate(image_request("sd15", "ddim", seed=1, num_steps=1, width_px=8 * cells, guidance_scale=1.0))
    assert pool.num_shapes <= 8
