"""Text encodings that a process with text encoders sends to one without.

Both sides split a prompt into the same windows and use the same names, so encodings travel as a table of tensors by
name: the encoders' hidden states of every window, and the pooled outputs. The process with the UNet computes keys and
values from them.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diffserve.api.errors import EngineUnavailable
from diffserve.api.tensor_values import TensorValue
from diffserve.runtime.precision import TORCH_DTYPES

EncodingTable = dict[bytes, Tensor]
NO_ENCODINGS: Final[EncodingTable] = {}

NAME_BYTES: Final = 16


def window_name(salt: bytes, token_ids: tuple[int, ...]) -> bytes:
    """Return the table key of the hidden states (tokens, dim) of a window."""
    return _name(b"window", salt, token_ids)


def pooled_name(salt: bytes, token_ids: tuple[int, ...]) -> bytes:
    """Return the table key of the pooled vector (P,) of a window, by its tokens up to the end mark."""
    return _name(b"pooled", salt, token_ids)


def text_name(part: bytes, text: str, way: bytes) -> bytes:
    """Return the table key of one ``part`` of a text read with ``way``."""
    return _name(part, way + b"\0" + text.encode("utf-8", "surrogatepass"), ())


def find_encoding(table: EncodingTable, name: bytes) -> Tensor:
    """Return the tensor ``name``. Raises EngineUnavailable if it is missing, as the other model differs then."""
    if name not in table:
        raise EngineUnavailable("the texts were encoded by another model, or another version of it; please try again.")
    return table[name]


def to_value(tensor: Tensor) -> TensorValue:
    """Serialize ``tensor`` of any device."""
    host_tensor = tensor.detach().cpu().contiguous()
    return TensorValue(
        str(host_tensor.dtype).removeprefix("torch."),
        tuple(host_tensor.shape),
        host_tensor.view(torch.uint8).numpy().tobytes(),
    )


def to_tensor(value: TensorValue, device: torch.device) -> Tensor:
    """``value`` on ``device``."""
    tensor = torch.from_numpy(np.frombuffer(value.data, dtype=np.uint8).copy()).view(TORCH_DTYPES[value.dtype])
    return tensor.view(value.shape).to(device)


def _name(kind: bytes, salt: bytes, token_ids: tuple[int, ...]) -> bytes:
    ids = array("Q", [part for token in token_ids for part in divmod(token, 1 << 62)])
    parts = (kind, salt, ids.tobytes())
    return hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()[:NAME_BYTES]
