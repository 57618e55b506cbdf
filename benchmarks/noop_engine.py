"""Engine that computes nothing: it sends all events of an engine immediately, with the same gray image.

    python benchmarks/noop_engine.py serve --model embedded --port 8000

With ``serve`` it is diffserve's own server over such engines; with ``--fd`` such an engine, as that server starts it.
The time of a request is then the server's overhead.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats, ImageStats, ShareStats
from diffserve.api.types import (
    Accepted,
    Finished,
    GenerationRequest,
    ImageFinished,
    ImageResult,
    ModelInfo,
    ModelProfile,
    Picture,
    Progress,
    ServedModel,
    Timings,
)

MODULE = "benchmarks.noop_engine"
NOTHING = ImageStats(num_running=0, num_waiting=0, num_steps=0, num_rows=0, num_painted=0, num_failed=0, busy_s=0.0)
STATS = EngineStats(num_live=0, num_wishes=0, images=NOTHING, share=ShareStats(share=0.5, image_s=0.0, text_s=0.0))


def info_of(profile: ModelProfile) -> ModelInfo:
    """Describe an empty model with the name, the sizes and the defaults of ``profile``."""
    return ModelInfo(
        model_id=profile.model_id, family="sd15", digest="0" * 12, prediction_type="epsilon", vae_factor=8,
        latent_channels=4, size_multiple_px=8, good_sizes=profile.good_sizes, max_side_px=profile.max_side_px,
        train_timesteps=1000, is_inpainting=False, default_sampler=profile.sampler,
        default_num_steps=profile.num_steps, default_guidance_scale=profile.guidance_scale, default_spacing="trailing",
        device="cpu", dtype="float32", choice_reason="nothing is computed", num_parameters=1, weights_bytes=1,
    )  # fmt: skip


def picture_of(width_px: int, height_px: int) -> Picture:
    """Return a gray image with a little noise, whose PNG is about as large as the embedded model's images."""
    noise = np.random.default_rng(0).integers(120, 128, (height_px, width_px, 3), dtype=np.uint8)
    return Picture.from_array(noise)


def answer(end: ipc.EngineEnd, request: GenerationRequest) -> None:
    """Return all events of ``request``, with its number of steps."""
    params, name, seed = request.diffusion, request.request_id, request.seed or 0
    num_steps, width_px, height_px = params.num_steps or 20, request.width_px or 128, request.height_px or 128
    end.send(Accepted(request_id=name, seed=seed, num_images=request.num_images, queue_position=0))
    picture = picture_of(width_px, height_px)
    for index in range(request.num_images):
        for step in range(1, num_steps + 1):
            end.send(Progress(request_id=name, image_index=index, step_index=step, num_steps=num_steps))
        result = ImageResult(
            request_id=name, image_index=index, seed=seed + index, picture=picture, prompt=request.prompt,
            timings=Timings(queue_s=0.0, encode_s=0.0, denoise_s=0.0, decode_s=0.0, step_s=0.0),
            negative_prompt=request.negative_prompt, num_evaluations=0, model=request.model or "nothing",
            model_digest="0" * 12, sampler="euler", sigma_schedule=None, spacing="trailing", num_steps=num_steps,
            guidance_scale=1.0, eta=0.0,
        )  # fmt: skip
        end.send(ImageFinished(request_id=name, result=result))
    end.send(Finished(request_id=name, num_painted=request.num_images, num_failed=0))


def run(fd: int) -> None:
    """Run as an engine until the connection closes."""
    with socket.socket(fileno=fd) as connection:
        end = ipc.EngineEnd(connection)
        for command in end.commands():
            match command:
                case ipc.Load(model=profile):
                    info = info_of(profile)
                    served = ServedModel(name=profile.model_id, info=info, is_loaded=True)
                    end.send(ipc.Ready(info=info, models=(served,)))
                case GenerationRequest():
                    answer(end, command)
                case ipc.Ping(number=number):
                    end.send(ipc.Pong(number=number, num_requests=0, num_ticks=0, tick_s=0.0, patience_s=60.0))
                case ipc.ReadStats(number=number):
                    end.send(ipc.Stats(number=number, stats=STATS))
                case ipc.ReadTrace(number=number):
                    end.send(ipc.Trace(number=number, unet_calls=[]))
                case _:
                    pass


def main(arguments: list[str]) -> Any:
    """Run a server over such engines, or one such engine."""
    if arguments[:1] == ["--fd"]:
        return run(int(arguments[1]))
    from diffserve.cli import main as command
    from diffserve.service.engine import connection

    connection.ENGINE_MODULE = MODULE
    return command(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
