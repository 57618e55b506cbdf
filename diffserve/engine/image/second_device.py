"""The unconditional rows of guided pictures on a second device, while the first one runs all others.

A process of its own (``second_process``) holds the same UNet there. It is told a call's latents and timesteps each
time, its texts once, and answers with what its UNet gives. The guided step is made here: nothing else moves out.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from diffserve.config import EngineConfig
from diffserve.errors import ConfigError, DeviceLost, ModelLoadError
from diffserve.runtime import DiffusionModel
from diffserve.runtime.exchange import DevicePair, Sent, TensorHead, pack
from diffserve.runtime.precision import choose_device, hardware_name
from diffserve.runtime.unet.call import UNetArguments
from diffserve.runtime.unet.cross_attention import Contexts, KeysValues, Pair
from diffserve.types import ModelProfile

PROCESS: Final = "diffserve.engine.image.second_process"
PATIENCE_S: Final = 600.0
"""For an answer; a second device that is gone is known at once."""

END_GRACE_S: Final = 5.0

logger = logging.getLogger(__name__)


class SecondOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the second process is to load, and where both meet: ``file``, which is new."""

    profile: ModelProfile
    dtype: str
    device: str
    offload: str
    cache_dir: str
    memory_format: str
    file: str


class SecondReady(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded there, or why nothing was: ``error``."""

    digest: str = ""
    hardware: str = ""
    error: str = ""


class RowsCall(msgspec.Struct, frozen=True, kw_only=True):
    """A UNet call for the second process. Its tensors: sample and timesteps, those of ``added`` by diffusers' names,
    and, where ``is_new``, the texts.

    told       number of what its rows are told, which is kept until it is among the ``forgotten`` of a later call
    """

    heads: tuple[TensorHead, ...]
    added: tuple[str, ...]
    told: int
    is_new: bool
    forgotten: tuple[int, ...]
    num_threads: int


def tensors_of(contexts: Contexts) -> list[Tensor]:
    """The tensors of ``contexts``, for :func:`contexts_of`."""
    if isinstance(contexts, Tensor):
        return [contexts]
    return [*itertools.chain(*contexts.layers), *([] if contexts.mask is None else [contexts.mask])]


def contexts_of(tensors: Sequence[Tensor]) -> Contexts:
    """From one tensor embeddings; from several every layer's keys and values, and a mask where one is left over."""
    if len(tensors) == 1:
        return tensors[0]
    layers = tuple(Pair(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=False))
    return KeysValues(layers, tensors[-1] if len(tensors) % 2 else None)


class AwayCall:
    """A call that the second device makes."""

    def __init__(self, second: SecondDevice, sent: Sent, awaited: Sent, shape: tuple[int, ...]) -> None:
        self._second = second
        self._sent = sent
        self._awaited = awaited
        self._shape = shape

    def result(self) -> Tensor | None:
        """(R, C, h, w) float32 in main memory; ``None`` where it failed there, which was logged. Waits for it.

        Raises DeviceLost where the second device is gone.
        """
        try:
            self._sent.wait()
            self._awaited.wait()
        except RuntimeError as error:
            raise self._second.lost() from error
        [answer] = self._awaited.memory
        return answer[1:].view(self._shape) if answer[0] else None


class SecondDevice:
    """A UNet like that of ``model`` on ``config.split_guidance``.

    sent_bytes  texts among them, since it began

    Raises ModelLoadError where it cannot be loaded there, ConfigError where ``is_exact``, bytes are promised, and the
    devices are of two kinds, or
    where there is no such device.
    """

    def __init__(self, model: DiffusionModel, config: EngineConfig, *, is_exact: bool) -> None:
        self.device = config.split_guidance
        try:
            choose_device(self.device)
        except ConfigError as error:
            raise ConfigError(f"split_guidance is {self.device!r}: {error.message}", param="split_guidance") from None
        self.sent_bytes = 0
        self._unet = model.unet
        self._numbers = WeakIdKeyDictionary()  # of contexts that are known there
        self._forgotten: list[int] = []
        self._counter = itertools.count(1)
        with tempfile.TemporaryDirectory(prefix="diffserve-") as folder:
            order = SecondOrder(
                profile=replace(model.profile, probe=False, refiner="", scorer=""),
                dtype=model.choice.dtype,
                device=self.device,
                offload=config.offload,
                cache_dir=config.cache_dir,
                memory_format=model.unet.memory_format,
                file=str(Path(folder) / "meeting"),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._end = weakref.finalize(self, end, self._process)
            try:
                self._meet(order, model, is_exact=is_exact)
            except BaseException:
                self._end()
                raise
        logger.info("unconditional rows of guided pictures are painted on %s", self.device)

    def _meet(self, order: SecondOrder, model: DiffusionModel, *, is_exact: bool) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(order) + b"\n")
        stdin.flush()  # and stays open: its end tells the other side that we are gone
        line = stdout.readline()
        ready = msgspec.json.decode(line, type=SecondReady) if line else SecondReady(error="its process ended")
        if not ready.error and ready.digest != model.digest:
            ready = SecondReady(error="its files are not what they were a moment ago")
        if ready.error:
            raise ModelLoadError(f"the UNet could not be loaded onto {self.device!r} (split_guidance): {ready.error}")
        ours = hardware_name(model.device)
        if is_exact and ready.hardware != ours:
            raise ConfigError(
                f"split_guidance is {self.device!r}, a {ready.hardware}, and the first device is a {ours}, which round "
                "differently: give two of one kind, or set engine.deterministic to false.",
                param="split_guidance",
            )
        try:
            self._pair = DevicePair(order.file, 0, PATIENCE_S)
        except RuntimeError as error:
            raise ModelLoadError(f"{self.device!r} (split_guidance) cannot be reached: {error}") from error

    def begin(self, call: UNetArguments, num_threads: int) -> AwayCall:
        """Have ``call`` made there, on ``num_threads`` of the processor where it is one, and go on meanwhile.

        Raises DeviceLost where the second device is gone.
        """
        contexts, added = call.contexts, call.added or {}
        is_new = contexts not in self._numbers
        tensors = [call.sample, call.timesteps, *added.values(), *(tensors_of(contexts) if is_new else ())]
        packed = pack(tensors)
        if is_new:
            number = self._numbers[contexts] = next(self._counter)
            weakref.finalize(contexts, self._forgotten.append, number)
        forgotten = tuple(self._forgotten)
        del self._forgotten[: len(forgotten)]
        header = RowsCall(
            heads=tuple(map(TensorHead.of, tensors)),
            added=tuple(added),
            told=self._numbers[contexts],
            is_new=is_new,
            forgotten=forgotten,
            num_threads=num_threads,
        )
        self.sent_bytes += packed.numel()
        num_rows, _, height, width = call.sample.shape
        shape = (num_rows, self._unet.latent_channels, height, width)
        try:
            sent = self._pair.send(header, packed)
            # the first number says whether it went well
            awaited = self._pair.await_answer(torch.empty(1 + torch.Size(shape).numel()))
        except RuntimeError as error:
            raise self.lost() from error
        return AwayCall(self, sent, awaited, shape)

    def lost(self) -> DeviceLost:
        """What is raised when the other side does not answer any more; its process is ended."""
        self._end()
        how = self._process.returncode
        return DeviceLost(f"{self.device!r}, which paints the unconditional rows, is gone (exit code {how})")

    def close(self) -> None:
        """End the process."""
        self._end()


def end(process: subprocess.Popen[bytes]) -> None:
    """End ``process``, which leaves when its standard input closes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
