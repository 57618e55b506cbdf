"""One compiled call as it is used: loaded from its file within moments, made with the network's weights or its own.

On a CPU by way of the C functions that a package offers (AOTInductor, ``aoti_runtime/interface.h``): torch's own loader
keeps Python to itself while a call computes, so that nobody answers meanwhile, and no two calls run side by side.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any, Final
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from diffserve.runtime.threads import pool_of_threads

CODE: Final = "*.wrapper.so"
NODES: Final = "*.wrapper.json"
"""Beside the code where some operations have no C function: torch's own loader is needed for these."""

Pointer = ctypes.c_void_p


class Constant(ctypes.Structure):
    """``AOTInductorConstantMapEntry``."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", Pointer))


class Package:
    """One compiled call. Its tensors must have the shapes that it was compiled for; nobody checks.

    One of ``DAMAGE`` (see ``compiled``) where the file at ``path`` is damaged, RuntimeError where it does not load,
    OSError where there is no room to unpack it. num_streams: so many calls may run beside each other on a CPU.
    """

    def __init__(self, path: Path, device: torch.device, num_streams: int = 1) -> None:
        if device.type != "cpu":
            self._model: CModel | TorchModel = TorchModel(str(path), device.index or 0, is_single_threaded=True)
            return
        with TemporaryDirectory(prefix="diffserve-") as folder, ZipFile(path) as package:
            package.extractall(folder)  # every byte of it is checked, which no loader does
            code, nodes = (next(Path(folder).rglob(name), None) for name in (CODE, NODES))
            if code is None or nodes is not None:
                self._model = TorchModel(folder, -1)
            else:  # mapped from now on, so that nothing stays behind, however this process ends
                self._model = CModel(code, num_streams)

    def use_weights(self, network: nn.Module) -> None:
        """Compute with the weights of ``network``, where they are."""
        held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        held |= {name: part for whole, tensor in held.items() for name, part in _parts(whole, tensor)}
        self._model.use({name: held[name.removeprefix("network.")].data for name in self._model.names})

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """(R, C, h, w) in the network's dtype, of a call's ``tensors`` in their order."""
        return self._model.run([tensor.contiguous() for tensor in tensors])


class TorchModel:
    """A package by torch's own loader.

    names  of the constants that it computes with, as ``torch.export`` calls them
    """

    def __init__(self, path: str, device_index: int, *, is_single_threaded: bool = False) -> None:
        """Load the package at ``path``, a file or a folder.

        Args:
            device_index: The CUDA device, or -1 for the CPU.
            is_single_threaded: Calls come from one thread at a time, as all calls of an engine do. Otherwise each call
                records a CUDA event and waits until the previous call of this package is done on the device
                (``AOTInductorModelContainer::run`` in ``model_container.h``), which blocks the host and which a CUDA
                graph cannot capture.
        """
        from torch._C._aoti import AOTIModelPackageLoader  # past torch._inductor, whose import takes seconds

        self._loader = AOTIModelPackageLoader(path, "model", is_single_threaded, 1, device_index)
        self.names: list[str] = self._loader.get_constant_fqns()

    def use(self, constants: dict[str, Tensor]) -> None:
        """Compute with ``constants``, by name, where they are."""
        self._loader.load_constants(constants, False, True, True)

    def run(self, tensors: list[Tensor]) -> Tensor:
        """The call's only output."""
        output: Tensor = self._loader.boxed_run(tensors)[0]
        return output


class CModel:
    """A package by its C functions, of one output. ``names`` as ``TorchModel`` has them; ``use`` and ``run``, too."""

    def __init__(self, code: Path, num_streams: int) -> None:
        self._code = ctypes.CDLL(str(code))
        self._container = Pointer()
        self._do("CreateWithDevice", ctypes.byref(self._container), num_streams, b"cpu", None, is_new=True)
        weakref.finalize(self, self._code.AOTInductorModelContainerDelete, self._container)
        self._own_names = dict(self._constants())
        self.names = list(self._own_names)
        self._used: Any = None

    def use(self, constants: dict[str, Tensor]) -> None:
        handles = _handles(list(constants.values()))
        named = [Constant(self._own_names[name], handle) for name, handle in zip(constants, handles, strict=True)]
        pairs = (Constant * len(named))(*named)
        self._do("UpdateUserManagedConstantBufferPairs", pairs, len(named), False, True)
        self._used = pairs  # they stay its user's

    def run(self, tensors: list[Tensor]) -> Tensor:
        arguments, outputs = (Pointer * len(tensors))(*_handles(tensors)), (Pointer * 1)()
        self._do("Run", arguments, len(tensors), outputs, 1, None, None)
        return _tensors(list(outputs))[0]

    def _constants(self) -> Iterator[tuple[str, bytes]]:
        """The names of each constant: ``torch.export``'s, and its own."""
        count = ctypes.c_size_t()
        self._do("GetNumConstants", ctypes.byref(count))
        for number in range(count.value):
            called, own = ctypes.c_char_p(), ctypes.c_char_p()
            self._do("GetConstantOriginalFQN", number, ctypes.byref(called))
            self._do("GetConstantName", number, ctypes.byref(own))
            yield (called.value or b"").decode(), own.value or b""

    def _do(self, what: str, *arguments: Any, is_new: bool = False) -> None:
        """Call ``AOTInductorModelContainer<what>``. RuntimeError where that fails."""
        function = getattr(self._code, f"AOTInductorModelContainer{what}")
        sized = [ctypes.c_size_t(each) if type(each) is int else each for each in arguments]
        if function(*sized if is_new else (self._container, *sized)):
            raise RuntimeError(f"{what} of a package failed")


def _handles(tensors: list[Tensor]) -> list[int]:
    """A new handle on each tensor, to be taken by whoever gets it."""
    from torch._C._aoti import unsafe_alloc_void_ptrs_from_tensors

    return [_capsule_pointer(handle, None) for handle in unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _tensors(handles: Sequence[int | None]) -> list[Tensor]:
    """The tensors whose handles these are, which are taken."""
    from torch._C._aoti import alloc_tensors_by_stealing_from_void_ptrs

    return alloc_tensors_by_stealing_from_void_ptrs([_capsule_new(handle, None, None) for handle in handles])


_capsule_pointer: Final[Callable[[Any, None], int]] = ctypes.PYFUNCTYPE(Pointer, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_new: Final[Callable[[int | None, None, None], Any]] = ctypes.PYFUNCTYPE(
    ctypes.py_object, Pointer, ctypes.c_char_p, Pointer
)(("PyCapsule_New", ctypes.pythonapi))


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a quantized weight is made of (torchao), by the names that ``torch.export`` gives to it."""
    if hasattr(tensor, "__tensor_flatten__"):
        owner, _, leaf = name.rpartition(".")
        for number, part in enumerate(tensor.__tensor_flatten__()[0]):
            yield f"{owner}.parametrizations.{leaf}.original{number}", getattr(tensor, part)


Make = Callable[[Sequence[Tensor]], Tensor]
"""Makes a call of its tensors, each of as many rows. It must leave Python's lock to others while it computes."""


class Streams:
    """Threads that make calls, kept from call to call: the first one of a thread takes longer."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    @torch.inference_mode()
    def run(self, make: Make, tensors: Sequence[Tensor], num_streams: int) -> Tensor:
        """What ``make`` gives for all rows, in their order: it is called for as many equal shares side by side, which
        have torch's number of threads together. Raises what it raises, once all are done.
        """
        pool = self._pool(num_streams, torch.get_num_threads() // num_streams)
        shares = zip(*(tensor.chunk(num_streams) for tensor in tensors), strict=True)
        made = [pool.submit(_make, make, share) for share in shares]
        wait(made)
        return torch.cat([one.result() for one in made])

    def _pool(self, num_streams: int, num_threads: int) -> ThreadPoolExecutor:
        if (num_streams, num_threads) not in self._pools:
            together, started = torch.get_num_threads(), Barrier(num_streams)
            pool = pool_of_threads(num_streams, "call", num_threads)
            wait([pool.submit(started.wait) for _ in range(num_streams)])
            torch.set_num_threads(together)  # what a thread says holds for it, and for all that begin after it
            self._pools[num_streams, num_threads] = pool
        return self._pools[num_streams, num_threads]


@torch.inference_mode()
def _make(make: Make, share: Sequence[Tensor]) -> Tensor:
    return make(share)
