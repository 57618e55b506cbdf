"""Loaded AOTInductor packages, and threads that run calls of a package in parallel.

On a CPU packages are called by their C functions (``aoti_runtime/interface.h``), because torch's own loader holds the
GIL during a call, which blocks other threads and prevents calls in parallel.
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
"""Present next to the code if some operations have no C function; then torch's own loader is needed."""

Pointer = ctypes.c_void_p


class Constant(ctypes.Structure):
    """``AOTInductorConstantMapEntry``."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", Pointer))


class Package:
    """One compiled call. The shapes of its tensors must be those that it was compiled for; they are not checked.

    Args:
        path: The package file.
        device: Where it runs.
        num_streams: How many calls may run in parallel on a CPU.

    Raises:
        Exception: One of ``DAMAGE`` (see ``compiled``): the file is damaged.
        RuntimeError: The package cannot be loaded.
        OSError: There is no disk space to unpack it.
    """

    def __init__(self, path: Path, device: torch.device, num_streams: int = 1) -> None:
        if device.type != "cpu":
            self._model: CModel | TorchModel = TorchModel(str(path), device.index or 0, is_single_threaded=True)
            return
        with TemporaryDirectory(prefix="diffserve-") as folder, ZipFile(path) as package:
            package.extractall(folder)  # checks the CRC of every file, which no loader does
            code, nodes = (next(Path(folder).rglob(name), None) for name in (CODE, NODES))
            if code is None or nodes is not None:
                self._model = TorchModel(folder, -1)
            else:  # the code is mapped, so the folder can be deleted
                self._model = CModel(code, num_streams)

    def use_weights(self, network: nn.Module) -> None:
        """Compute with the weights of ``network``, without copying them."""
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        tensors |= {part_name: part for name, tensor in tensors.items() for part_name, part in _parts(name, tensor)}
        self._model.use({name: tensors[name.removeprefix("network.")].data for name in self._model.names})

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (R, C, h, w) in the network's dtype for a call's ``tensors`` in their order."""
        return self._model.run([tensor.contiguous() for tensor in tensors])


class TorchModel:
    """A package in torch's own loader.

    Attributes:
        names: Names of the constants that it computes with, as ``torch.export`` writes them.
    """

    def __init__(self, path: str, device_index: int, *, is_single_threaded: bool = False) -> None:
        """Load the package at ``path``.

        Args:
            path: A file or an unpacked folder.
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
        """Compute with ``constants``, by name, without copying them."""
        self._loader.load_constants(constants, False, True, True)

    def run(self, tensors: list[Tensor]) -> Tensor:
        """Return the only output of the call."""
        output: Tensor = self._loader.boxed_run(tensors)[0]
        return output


class CModel:
    """A package called by its C functions; the interface is that of ``TorchModel``."""

    def __init__(self, code: Path, num_streams: int) -> None:
        self._code = ctypes.CDLL(str(code))
        self._container = Pointer()
        self._do("CreateWithDevice", ctypes.byref(self._container), num_streams, b"cpu", None, is_new=True)
        weakref.finalize(self, self._code.AOTInductorModelContainerDelete, self._container)
        self._own_names = dict(self._constants())
        self.names = list(self._own_names)
        self._used: Any = None

    def use(self, constants: dict[str, Tensor]) -> None:
        """Compute with ``constants``, by name, without copying them."""
        handles = _handles(list(constants.values()))
        entries = [Constant(self._own_names[name], handle) for name, handle in zip(constants, handles, strict=True)]
        pairs = (Constant * len(entries))(*entries)
        self._do("UpdateUserManagedConstantBufferPairs", pairs, len(entries), False, True)
        self._used = pairs  # the container does not own them

    def run(self, tensors: list[Tensor]) -> Tensor:
        """Return the only output of the call."""
        arguments, outputs = (Pointer * len(tensors))(*_handles(tensors)), (Pointer * 1)()
        self._do("Run", arguments, len(tensors), outputs, 1, None, None)
        return _tensors(list(outputs))[0]

    def _constants(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name of each constant in ``torch.export`` and in the package."""
        count = ctypes.c_size_t()
        self._do("GetNumConstants", ctypes.byref(count))
        for number in range(count.value):
            exported, internal = ctypes.c_char_p(), ctypes.c_char_p()
            self._do("GetConstantOriginalFQN", number, ctypes.byref(exported))
            self._do("GetConstantName", number, ctypes.byref(internal))
            yield (exported.value or b"").decode(), internal.value or b""

    def _do(self, what: str, *arguments: Any, is_new: bool = False) -> None:
        """Call ``AOTInductorModelContainer<what>``. Raises RuntimeError if it fails."""
        function = getattr(self._code, f"AOTInductorModelContainer{what}")
        sized = [ctypes.c_size_t(each) if type(each) is int else each for each in arguments]
        if function(*sized if is_new else (self._container, *sized)):
            raise RuntimeError(f"{what} of a package failed")


def _handles(tensors: list[Tensor]) -> list[int]:
    """Return a new handle on each tensor; the receiver owns it."""
    from torch._C._aoti import unsafe_alloc_void_ptrs_from_tensors

    return [_capsule_pointer(handle, None) for handle in unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _tensors(handles: Sequence[int | None]) -> list[Tensor]:
    """Return the tensors of ``handles`` and take over the handles."""
    from torch._C._aoti import alloc_tensors_by_stealing_from_void_ptrs

    return alloc_tensors_by_stealing_from_void_ptrs([_capsule_new(handle, None, None) for handle in handles])


_capsule_pointer: Final[Callable[[Any, None], int]] = ctypes.PYFUNCTYPE(Pointer, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_new: Final[Callable[[int | None, None, None], Any]] = ctypes.PYFUNCTYPE(
    ctypes.py_object, Pointer, ctypes.c_char_p, Pointer
)(("PyCapsule_New", ctypes.pythonapi))


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a quantized weight (torchao) with the names that ``torch.export`` gives them."""
    if hasattr(tensor, "__tensor_flatten__"):
        owner, _, leaf = name.rpartition(".")
        for number, part in enumerate(tensor.__tensor_flatten__()[0]):
            yield f"{owner}.parametrizations.{leaf}.original{number}", getattr(tensor, part)


Make = Callable[[Sequence[Tensor]], Tensor]
"""Computes a call from its tensors, each of as many rows. It must release the GIL while it computes."""


class Streams:
    """Threads that run calls in parallel. They are reused, because the first call of a thread takes longer."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}

    @torch.inference_mode()
    def run(self, make: Make, tensors: Sequence[Tensor], num_streams: int) -> Tensor:
        """Split the rows into ``num_streams`` equal shares and run ``make`` on all of them in parallel.

        Args:
            make: Computes one share. What it raises is raised here once all shares are done.
            tensors: Arguments, rows first.
            num_streams: Number of shares. Together they use torch's number of threads.

        Returns:
            The outputs of all rows in order.
        """
        pool = self._pool(num_streams, torch.get_num_threads() // num_streams)
        shares = zip(*(tensor.chunk(num_streams) for tensor in tensors), strict=True)
        futures = [pool.submit(_make, make, share) for share in shares]
        wait(futures)
        return torch.cat([future.result() for future in futures])

    def _pool(self, num_streams: int, num_threads: int) -> ThreadPoolExecutor:
        if (num_streams, num_threads) not in self._pools:
            together, started = torch.get_num_threads(), Barrier(num_streams)
            pool = pool_of_threads(num_streams, "call", num_threads)
            wait([pool.submit(started.wait) for _ in range(num_streams)])
            torch.set_num_threads(together)  # a worker's set_num_threads also affects threads that start later
            self._pools[num_streams, num_threads] = pool
        return self._pools[num_streams, num_threads]


@torch.inference_mode()
def _make(make: Make, share: Sequence[Tensor]) -> Tensor:
    return make(share)
