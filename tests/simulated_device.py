"""A torch device named ``simulated``, for ``pytest --device simulated`` on a machine without a GPU.

Its tensors report that device, and the CPU computes their operations. As on CUDA, an operation on tensors of two
devices fails, and so does a conversion to NumPy without a copy to the CPU. It finds such mistakes, not wrong kernels.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME: Final = "simulated"
INDEXING: Final = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations that take indices on the CPU for a tensor on the device."""

_registered: list[torch.library.Library] = []


class SimulatedTensor(Tensor):
    """A tensor on the simulated device. ``host`` is the CPU tensor with its values; views share its storage."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> SimulatedTensor:
        """Wrap ``host``."""
        with torch.inference_mode(False):  # a view of a normal tensor has to be a normal tensor
            tensor: SimulatedTensor = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device(NAME, 0),
            )
        tensor.host = host
        return tensor

    @property
    def data(self) -> Tensor:
        """Return the tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the values of ``value``, as ``Module.to`` does with parameters."""
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = _host(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values and the device."""
        return f"{self.host!r} on {NAME}"

    def tolist(self) -> Any:
        """Return the values as nested lists, which torch refuses for subclasses."""
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError as CUDA tensors do."""
        if force:
            return self.host.numpy(force=True)
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raise TypeError as CUDA tensors do."""
        return self.numpy()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation ``func`` on the CPU."""
        return run_on_host(func, args, kwargs or {})


def register() -> None:
    """Add the device to torch, and to the names that ``load_model`` takes."""
    from diffserve.runtime import precision

    if _registered:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")  # for calls without a tensor of the device
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    library.impl("_copy_from", lambda source, target, _=False: _copy(source, target))
    library.impl("_local_scalar_dense", lambda tensor: _host(tensor).item())
    _registered.append(library)
    choose_given = precision._given_device
    precision._given_device = lambda device: (
        torch.device(NAME, 0) if device.partition(":")[0] == NAME else choose_given(device)
    )


def run_on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the operation ``func`` on the CPU. Raises RuntimeError where its tensors are on two devices."""
    name = func._schema.name
    if name == "aten::_has_compatible_shallow_copy_type":
        return all(isinstance(tensor, SimulatedTensor) for tensor in args)
    if name == "aten::copy_":
        return _copy(args[1], args[0])
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name not in ("aten::_to_copy", "aten::to"):
        _check_devices(name, args, tensors)
    targets = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)] or [NAME]
    results = func(*tree_map(_host, args), **tree_map(_host, kwargs))
    tensors_by_host = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)}

    def wrap(result: Any) -> Any:
        if not isinstance(result, Tensor) or targets != [NAME]:
            return result
        return tensors_by_host[id(result)] if id(result) in tensors_by_host else SimulatedTensor(result)

    return tree_map(wrap, results)


def _check_devices(name: str, args: Any, tensors: list[Tensor]) -> None:
    checked = tensors
    if name in INDEXING and isinstance(args[0], SimulatedTensor):
        checked = [value for value in args[2:] if isinstance(value, Tensor)]
    devices = [tensor.device for tensor in checked if not isinstance(tensor, SimulatedTensor) and tensor.dim()]
    if devices:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} found {NAME}:0 and {devices[0]}!"
        )


def _host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.host if isinstance(value, SimulatedTensor) else value


def _copy(source: Tensor, target: Tensor) -> Tensor:
    _host(target).copy_(_host(source))
    return target


def _empty(size: Any, dtype: Any = None, *_: Any, memory_format: Any = None, **__: Any) -> Tensor:
    return SimulatedTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype))
