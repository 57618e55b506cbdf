"""The other half of split guidance: ``python -m diffserve.engine.image.second_process``.

Standard input says in one line what to load; standard output says that it is there. Then calls are answered as they
come, until standard input closes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Final

import msgspec
import torch
from torch import Tensor

from diffserve.child_signals import leave_stopping_to_parent
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.second_device import RowsCall, SecondOrder, SecondReady, contexts_of
from diffserve.logs import MACHINE, json_logs
from diffserve.runtime import load_model
from diffserve.runtime.device_health import is_sticky
from diffserve.runtime.exchange import DevicePair, unpack
from diffserve.runtime.loading.library_imports import import_lean
from diffserve.runtime.memory import give_memory_back, without_frames
from diffserve.runtime.precision import hardware_name
from diffserve.runtime.unet.call import UNetArguments
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues
from diffserve.runtime.unet.memory_format import set_memory_format
from diffserve.runtime.unet.unet import UNetRunner

IDLE_S: Final = 1e8
"""Nobody may ask for anything for years: standard input tells when nobody will."""

logger = logging.getLogger(__name__)


class UNetServer:
    """A UNet and the texts that its callers may speak of by their numbers."""

    def __init__(self, unet: UNetRunner) -> None:
        self.unet = unet
        self._told: dict[int, Contexts] = {}

    @torch.inference_mode()
    def answer(self, header: RowsCall, body: Tensor) -> Tensor:
        """(R, C, h, w) float32 in main memory. Raises what the UNet raises; texts that came are kept in any case."""
        device = self.unet.device
        for number in header.forgotten:
            self._told.pop(number, None)
        sample, timesteps, *rest = (tensor.to(device) for tensor in unpack(header.heads, body))
        if header.is_new:
            self._told[header.told] = contexts_of(rest[len(header.added) :])
        contexts = self._told[header.told]
        if isinstance(contexts, KeysValues):
            self.unet.cross_attention  # noqa: B018  # whose layers take keys and values from now on
        added = dict(zip(header.added, rest, strict=False)) or None
        if torch.get_num_threads() != header.num_threads:
            torch.set_num_threads(header.num_threads)
        return self.unet.plain(UNetArguments(sample, timesteps, contexts, added)).float().cpu()

    def serve(self, pair: DevicePair) -> None:
        """Answer for ever. RuntimeError where the other side is gone, and where the device is."""
        while True:
            header, body = pair.receive(RowsCall)
            num_rows, _, height, width = header.heads[0].shape
            answer = torch.zeros(1 + num_rows * self.unet.latent_channels * height * width)
            try:
                answer[1:] = self.answer(header, body).flatten()
                answer[0] = 1.0
            except Exception as error:
                if is_sticky(error):
                    raise
                without_frames(error)
                give_memory_back(self.unet.device)
                logger.warning("a call is left to the first device: %s", type(error).__name__, exc_info=error)
            pair.answer(answer)


def load(order: SecondOrder) -> tuple[UNetRunner, SecondReady]:
    """The UNet of the model that ``order`` names; the rest of it is let go of. Raises what ``load_model`` does."""
    profile, cache = order.profile, DiskCache.at(order.cache_dir)
    dtype, device, offload = order.dtype, order.device, order.offload
    model = load_model(profile.path, dtype=dtype, device=device, offload=offload, profile=profile, cache=cache)
    set_memory_format(model, order.memory_format, cache)
    return model.unet, SecondReady(digest=model.digest, hardware=hardware_name(model.device))


def main() -> int:
    """Load, say so, and answer. 1 where nothing can be loaded or nobody is there to answer any more."""
    leave_stopping_to_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as reports, json_logs("info", trusted=MACHINE):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints belongs into the log
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=SecondOrder)
        threading.Thread(target=_leave_with_input, daemon=True).start()
        import_lean()  # the process is its own
        try:
            unet, ready = load(order)
        except Exception as error:
            unet, ready = None, SecondReady(error=f"{type(error).__name__}: {error}")
        reports.write(msgspec.json.encode(ready) + b"\n")
        reports.flush()
        if unet is None:
            return 1
        give_memory_back(unet.device)
        try:
            UNetServer(unet).serve(DevicePair(order.file, 1, IDLE_S))
        except RuntimeError as error:
            logger.warning("no further rows are painted: %s", error)
        os._exit(1)


def _leave_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
