"""Tensors from one process to another: a msgpack header that says what they are, then their bytes.

Two processes are a group of torch.distributed, by gloo, which listens on the loopback interface alone; nothing is
pickled. Tensors of a device go by way of main memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo

LOOPBACK: Final = "127.0.0.1"
LENGTHS_TAG, BODY_TAG, ANSWER_TAG = 0, 1, 2

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
}

Header = TypeVar("Header", bound=msgspec.Struct)


class TensorHead(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of one tensor are: its dtype as torch calls it, less ``torch.``, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHead:
        """Of ``tensor``."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Length of its bytes. ValueError for a dtype or a shape that no tensor of ours has."""
        if self.dtype not in _DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.dtype} {list(self.shape)} is no tensor that travels")
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """(N,) uint8 in main memory: the bytes of ``tensors``, one after the other."""
    # a copy, for what is called contiguous may have any stride where there is one number
    parts = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(part.view(-1).view(torch.uint8) for part in parts)])


def unpack(heads: Sequence[TensorHead], body: Tensor) -> list[Tensor]:
    """The tensors that ``heads`` describe, copies out of ``body`` (N,) uint8. ValueError where its length differs."""
    lengths = [head.num_bytes for head in heads]
    if sum(lengths) != body.numel():
        raise ValueError(f"{body.numel()} bytes came for tensors of {sum(lengths)}")
    parts = body.split(lengths) if lengths else ()
    # a copy begins where numbers of any size may
    return [part.clone().view(_DTYPES[head.dtype]).view(head.shape) for head, part in zip(heads, parts, strict=True)]


class Sent(NamedTuple):
    """What is on its way, with the memory that it is read from; ``wait`` returns when all of it has gone."""

    works: tuple[Any, ...]
    memory: tuple[Tensor, ...]

    def wait(self) -> None:
        """RuntimeError where the other side is gone."""
        for work in self.works:
            work.wait()


class DevicePair:
    """One end of a group of two processes; ``rank`` 0 or 1. Both open it with the path of one file, which is new.

    patience_s  how long this end waits for the other, when they meet and later

    Raises RuntimeError where the other side does not come, or is gone, as all its methods do.
    """

    def __init__(self, file: str, rank: int, patience_s: float) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=patience_s)
        self._other = 1 - rank
        self._group = ProcessGroupGloo(FileStore(file, 2), rank, 2, options)
        here, there = torch.ones(1), self.await_answer(torch.zeros(1))
        self.answer(here)  # until both are through, who made the file must keep it
        there.wait()

    def send(self, header: msgspec.Struct, packed: Tensor) -> Sent:
        """Begin to send a message: ``header``, and tensors that it describes, as ``pack`` gives them."""
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
        body = torch.cat([encoded, packed])
        lengths = torch.tensor([encoded.numel(), body.numel()])
        sent = self._group.send([lengths], self._other, LENGTHS_TAG), self._group.send([body], self._other, BODY_TAG)
        return Sent(sent, (lengths, body))

    def receive(self, kind: type[Header]) -> tuple[Header, Tensor]:
        """The next message: its header, and the bytes of its tensors (N,) uint8. Waits for it."""
        lengths = torch.zeros(2, dtype=torch.int64)
        self._group.recv([lengths], self._other, LENGTHS_TAG).wait()
        num_header_bytes, num_bytes = lengths.tolist()
        body = torch.empty(num_bytes, dtype=torch.uint8)
        self._group.recv([body], self._other, BODY_TAG).wait()
        header = msgspec.msgpack.decode(body[:num_header_bytes].numpy().tobytes(), type=kind)
        return header, body[num_header_bytes:]

    def answer(self, tensor: Tensor) -> None:
        """Send ``tensor``, whose shape the other side knows; returns when it is there."""
        self._group.send([tensor], self._other, ANSWER_TAG).wait()

    def await_answer(self, into: Tensor) -> Sent:
        """Have the next answer written ``into`` a tensor of main memory; it is there when the wait is over."""
        return Sent((self._group.recv([into], self._other, ANSWER_TAG),), (into,))
