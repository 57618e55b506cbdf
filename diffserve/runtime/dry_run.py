"""Dry runs: computations on meta tensors that count kernels, copies, operations and memory as on a GPU.

``HostSyncError`` is raised where the CPU would wait for the GPU, ``MixedDevicesError`` where one kernel would get
tensors of both devices. ``GPU.seconds`` estimates the least time of the counted work from the roofline of a GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffserve.api.errors import ConfigError
from diffserve.runtime.loading.library_imports import import_quietly

META: Final = torch.device("meta")
ATEN: Final = torch.ops.aten
ATTENTION: Final = ATEN.scaled_dot_product_attention.default
COPIES: Final = (ATEN.to, ATEN._to_copy, ATEN.copy_)
TRANSFERRED: Final = ATEN.detach_  # what ``torch.tensor(..., device=...)`` ends with
NOT_DECOMPOSED: Final = (*COPIES, TRANSFERRED, ATEN.linear)
NO_KERNEL: Final = (ATEN.empty, ATEN.empty_strided, ATEN.empty_like, ATEN.new_empty, ATEN.lift_fresh)
SYNCS: Final = (ATEN._local_scalar_dense, ATEN.item, ATEN.nonzero, ATEN.is_nonzero, ATEN.equal, ATEN.masked_select)


class HostSyncError(RuntimeError):
    """The CPU would have to wait for a number from the GPU."""


class MixedDevicesError(RuntimeError):
    """A kernel would get a tensor of main memory together with the GPU's."""


@dataclass(frozen=True)
class Kernel:
    """One launch: its operator, floating-point operations (a multiply-add is two), and bytes read and written."""

    name: str
    flops: float
    moved_bytes: int


@dataclass
class Work:
    """Counted work of the device.

    Attributes:
        kernels: Launches in order; views and allocations launch nothing.
        copies: Transfers from main memory to the device.
        fetches: Transfers to main memory without waiting.
        held_bytes: Bytes of tensors made during the run that still live.
        peak_bytes: Maximum of ``held_bytes``.
    """

    kernels: list[Kernel] = field(default_factory=list)
    copies: int = 0
    fetches: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written by all kernels, each operand once."""
        return sum(kernel.moved_bytes for kernel in self.kernels)


class DryRun(TorchDispatchMode):
    """Counts the operations on meta tensors into ``work``. Use under ``inference_mode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()
        registry: dict[Any, Callable[..., int]] = import_quietly("torch.utils.flop_counter", "flop_registry")
        self._flops = {**registry, ATEN._int_mm: registry[ATEN.mm]}  # it has no integer product
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, or the operators it consists of, and count it."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _check(func, inputs, args, kwargs)
        if func is ATTENTION:
            return self._attend(*args, **kwargs)
        if packet not in NOT_DECOMPOSED and packet not in self._flops:
            with self, torch._C.DisableTorchFunction():
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        if packet is ATEN.copy_ and not args[0].is_meta and inputs[1].is_meta:
            self.work.fetches += 1
            return args[0]
        output = func(*args, **kwargs)
        self._count(func, packet, inputs, output, args, kwargs)
        return output

    def _count(self, func: Any, packet: Any, inputs: list[Tensor], output: Any, args: Any, kwargs: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_meta]
        if not outputs or _is_view(func, inputs, outputs):
            return
        self._hold(outputs)
        is_copy = packet in COPIES and any(not tensor.is_meta for tensor in inputs)
        if is_copy or packet is TRANSFERRED:
            self.work.copies += 1
        elif packet not in NO_KERNEL:
            flops = 0.0
            if packet is ATEN.linear:
                flops = 2.0 * outputs[0].numel() * inputs[0].shape[-1]
            elif packet in self._flops:
                flops = float(self._flops[packet](*args, **kwargs, out_val=output))
            self._launch(str(packet), flops, (*inputs, *outputs))

    def _launch(self, name: str, flops: float, touched: Iterable[Tensor]) -> None:
        self.work.kernels.append(Kernel(name.removeprefix("aten."), flops, sum(map(_own_bytes, touched))))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
        """Count one fused kernel that stores no scores, as on current GPUs."""
        output = query.new_empty((*query.shape[:-1], values.shape[-1]))
        self._hold([output])
        flops = 2.0 * math.prod(query.shape[:-1]) * keys.shape[-2] * (query.shape[-1] + values.shape[-1])
        self._launch("scaled_dot_product_attention", flops, (query, keys, values, output))
        return output

    def _hold(self, outputs: Iterable[Tensor]) -> None:
        """Count the memory of ``outputs`` until it is freed."""
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                self._storages.add(key)
                self.work.held_bytes += storage.nbytes()
                weakref.finalize(storage, self._release, key, storage.nbytes())
        self.work.peak_bytes = max(self.work.peak_bytes, self.work.held_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.work.held_bytes -= num_bytes


class ListIndices(TorchFunctionMode):
    """Counts the copies of list indices, such as ``tensor[[0, 2]]``, which the dispatcher does not see."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            self._work.copies += sum(isinstance(place, list) for place in places)
        return func(*args, **(kwargs or {}))


def _check(func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> None:
    """Raise for operations that would wait for the GPU or mix devices."""
    packet = func.overloadpacket
    if not any(tensor.is_meta for tensor in inputs):
        return
    if packet in SYNCS or _leaves(packet, args, kwargs):
        raise HostSyncError(f"{func} waits for the device.")
    strangers = [tensor for tensor in inputs if not tensor.is_meta and tensor.ndim]
    if strangers and packet not in COPIES:
        raise MixedDevicesError(f"{func} mixes the device's tensors with one of {strangers[0].device}.")


def _leaves(packet: Any, args: Any, kwargs: Any) -> bool:
    """Return whether data goes to main memory while the CPU waits."""
    if packet is ATEN.copy_ and not args[0].is_meta:
        return not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    places = [place for place in (*args, *kwargs.values()) if isinstance(place, torch.device)]
    return packet in COPIES and any(place.type == "cpu" for place in places) and args[0].is_meta


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether nothing is computed: outputs share memory with inputs, and the operator writes nothing."""
    if func._schema.is_mutable:
        return False
    places = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.is_meta}
    return all(tensor.untyped_storage()._cdata in places for tensor in outputs)


def _own_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory of ``tensor``; a dimension of stride 0 has none."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def dry_run(run: Callable[[], object]) -> Work:
    """Return the work of ``run``. Raises ``HostSyncError`` and ``MixedDevicesError``."""
    counted = DryRun()
    with torch.inference_mode(), counted, ListIndices(counted.work):
        result = run()
        del result
    return counted.work


@dataclass(frozen=True)
class GPU:
    """Data sheet of a GPU.

    Attributes:
        tflops_16: 10^12 operations per second in float16 or bfloat16 with float32 sums.
        tflops_32: 10^12 operations per second in float32.
    """

    name: str
    memory_gb: float
    gb_per_s: float
    tflops_16: float
    tflops_32: float

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """Return the least time in seconds that ``work`` in ``dtype`` takes on this GPU."""
        flops_per_s = 1e12 * (self.tflops_32 if dtype == torch.float32 else self.tflops_16)
        bytes_per_s = 1e9 * self.gb_per_s
        return sum(max(kernel.flops / flops_per_s, kernel.moved_bytes / bytes_per_s) for kernel in work.kernels)


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 141, 4800, 989, 67),
        GPU("h100", 80, 3350, 989, 67),
        GPU("h100-pcie", 80, 2000, 756, 51),
        GPU("a100", 80, 2039, 312, 19.5),
        GPU("l40s", 48, 864, 362, 91.6),
        GPU("a10", 24, 600, 125, 31.2),
        GPU("l4", 24, 300, 121, 30.3),
        GPU("v100", 32, 900, 125, 15.7),
        GPU("t4", 16, 320, 65, 8.1),
        GPU("rtx4090", 24, 1008, 165, 82.6),
        GPU("rtx3090", 24, 936, 71, 35.6),
        GPU("rtx3060", 12, 360, 25.5, 12.7),
    )
}


def find_gpu(name: str) -> GPU:
    """Return the GPU called ``name``. Raises ConfigError with the known names."""
    gpu = GPUS.get(name.lower().replace(" ", ""))
    if gpu is None:
        raise ConfigError(f"gpu is {name!r}; choose one of {', '.join(GPUS)}.", param="gpu")
    return gpu
