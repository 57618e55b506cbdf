"""Fill empty networks tensor by tensor; all keys must be used and all shapes must match.

Each weight is quantized before the next one is read, so the peak is the finished model plus one tensor.
Offloaded weights are read when their layer runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diffserve.api.errors import ModelLoadError
from diffserve.runtime.accelerators import compute_capability
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.loading.placement import add_device_hooks, dispatch, make_device_map, place_of
from diffserve.runtime.memory import give_heap_back
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.quantization import quantize_layer, schemes
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.vae.vae import vae_dtype

#: Computed buffers in old checkpoints, and parts of a complete CLIP that prompts do not need.
IGNORED_KEYS = re.compile(r"(^|\.)(position_ids|logit_scale)$|^(vision_model|visual_projection|text_projection)\.")
CONDITIONS = re.compile(r"(add_embedding|class_embedding|encoder_hid_proj|time_embed_act|controlnet_)\w*\.")
"""Tensors of a UNet's further conditions, which exist if its configuration names them."""

MAX_NAMED_KEYS = 5
HEAP_BYTES = 1 << 27
"""Bytes of weights to free before the heap is returned to the system."""

logger = logging.getLogger(__name__)

Read = Callable[[], torch.Tensor]
Made = TypeVar("Made")


class TensorSource:
    """Source of a module's parameters: name -> (key on disk, shape after conversion, reader)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.readers: dict[str, tuple[str, tuple[int, ...], Read]] = {}

    @classmethod
    def renamed(cls, checkpoint: Checkpoint, names: Mapping[str, str]) -> TensorSource:
        """Return a source in which parameter ``name`` is the unchanged tensor ``names[name]``."""
        source = cls(checkpoint)
        for name, key in names.items():
            source.add(name, key)
        return source

    def add(
        self,
        name: str,
        key: str,
        shape: tuple[int, ...] | None = None,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> str:
        """Add parameter ``name`` from tensor ``key``, which ``convert`` brings to ``shape``. Returns the key."""
        stored = self.checkpoint.entries[key].shape

        def read() -> torch.Tensor:
            tensor = self.checkpoint.read(key)
            return tensor if convert is None else convert(tensor)

        self.readers[name] = (key, shape or stored, read)
        return key

    def outline(self, name: str) -> torch.Tensor:
        """Return parameter ``name`` without its values: for floats only the header is read."""
        key, shape, read = self.readers[name]
        return torch.empty(shape, device="meta") if self.checkpoint.holds_floats(key) else read()


class WithoutInit(TorchFunctionMode):
    """Skips initialization on the meta device, and computes ``arange`` buffers on the CPU.

    Otherwise torch imports all of its compiler or sympy there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func is torch.arange and torch.device(kwargs.get("device") or "meta").type == "meta":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def build_on_meta(make: Callable[[], Made]) -> Made:
    """Run ``make`` with no memory behind its parameters."""
    # without buffers it would move each parameter, for which torch imports its compiler: one second
    with import_quietly("accelerate", "init_empty_weights")(include_buffers=True), WithoutInit():
        return make()


def fill(
    module: nn.Module,
    source: TensorSource,
    choice: DeviceChoice,
    *,
    quantize: str | None = None,
    channels_last: bool = False,
) -> None:
    """Load every parameter of the empty ``module`` in ``choice.compute_dtype`` to its place.

    Args:
        module: The network.
        source: The tensors.
        choice: Device, dtype and offloading.
        quantize: Quantized precision of the layers (``runtime.quantization``); ``None``: none.
        channels_last: Store convolutions channels last if ``is_channels_last``: the decoders, not the UNet.

    Raises:
        ModelLoadError: Keys are missing, unexpected or of the wrong shape.
    """
    set_tensor = import_quietly("accelerate.utils", "set_module_tensor_to_device")
    expected: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    check_keys(type(module).__name__, expected, source)
    parameters = dict(module.named_parameters())
    narrow = schemes(module, quantize) if quantize else {}
    device_map = make_device_map(module, choice)
    offloaded: dict[str, Read] = {}
    freed_bytes = 0  # of unquantized weights since the heap was last trimmed; gaps between quantized ones stay
    for name in expected:
        place = place_of(name, device_map) if name in parameters else choice.device
        make = partial(_read, source, name, "cpu" if place == "disk" else place, choice, channels_last=channels_last)
        if place == "disk":
            set_tensor(module, name, "meta", dtype=choice.compute_dtype)
            offloaded[name] = make
            continue
        tensor = make()
        set_tensor(module, name, tensor.device, tensor, tensor.dtype, clear_cache=False)
        if tensor.device.type != choice.device.type and not choice.rooms:
            offloaded[name] = partial(torch.Tensor.detach, tensor)
        owner, _, part = name.rpartition(".")
        if part == "weight" and owner in narrow:
            quantize_layer(module.get_submodule(owner), narrow[owner])
            freed_bytes += tensor.nbytes
            if freed_bytes > HEAP_BYTES and choice.device.type == "cpu":
                give_heap_back()
                freed_bytes = 0
    if freed_bytes and choice.device.type == "cpu":
        give_heap_back()
    _place_computed_buffers(module, choice.device)
    module.eval().requires_grad_(False)
    if choice.rooms:
        add_device_hooks(module, {name: torch.device(place) for name, place in device_map.items()}, choice.device)
    elif offloaded:
        dispatch(module, device_map, offloaded, str(choice.device))


def fill_renamed(
    network: nn.Module,
    checkpoint: Checkpoint,
    add: Callable[[TensorSource, str], str],
    choice: DeviceChoice,
    **settings: Any,
) -> set[str]:
    """Fill ``network``; ``add`` adds one parameter by name to the source and returns its key.

    ``settings`` are those of :func:`fill`. Returns the keys. Raises ModelLoadError.
    """
    source, used = TensorSource(checkpoint), set[str]()
    for name in network.state_dict():
        try:
            used.add(add(source, name))
        except KeyError as missing:
            raise ModelLoadError(
                f"{type(network).__name__}: tensor {missing.args[0]!r} (for {name}) is missing from "
                f"{checkpoint.where()}."
            ) from missing
    fill(network, source, choice, **settings)
    return used


def _read(source: TensorSource, name: str, device: Any, choice: DeviceChoice, *, channels_last: bool) -> torch.Tensor:
    """Return a copy of parameter ``name`` on ``device``; on the meta device its values are not read."""
    key, _, read = source.readers[name]
    tensor = source.outline(name) if choice.device.type == "meta" else read()
    if not tensor.is_floating_point():
        raise ModelLoadError(f"tensor {key!r} of {source.checkpoint.where(key)} holds {tensor.dtype}, not floats.")
    tensor = tensor.to(device, choice.compute_dtype, copy=True)
    is_last = tensor.ndim == 4 and channels_last and is_channels_last(choice)
    return tensor.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def is_channels_last(choice: DeviceChoice) -> bool:
    """Return whether the convolutions of a decoder are faster with ``channels_last`` weights.

    On a CPU they take 0.6 (bfloat16) to 0.75 (float32) of the time. On CUDA they take longer, because group norms work
    on contiguous tensors: decoding 1024x1024 pixels in bfloat16 on an H200 takes 129 ms, and 85 ms with contiguous
    weights. A UNet gains nothing on a CPU (-10 to +15 % of the time); on a GPU it is measured
    (``runtime.unet.memory_format``).
    """
    return choice.device.type == "cpu"


def check_keys(owner: str, expected: Mapping[str, torch.Tensor], source: TensorSource) -> None:
    """Compare the tensors of ``source`` with the parameters ``expected`` of a network of the class ``owner``.

    Tensors that belong to none of its parts are left out with a warning, as diffusers does.

    Raises:
        ModelLoadError: a tensor is missing or has another shape, or one more belongs to a part of the network or is a
            condition that its configuration does not name, so that the configuration is not that of the tensors.
    """
    where = source.checkpoint.where()
    missing = [name for name in expected if name not in source.readers]
    if missing:
        raise ModelLoadError(f"{owner}: {_name(missing)} missing from {where}.")
    unexpected = [key for name, (key, _, _) in source.readers.items() if name not in expected]
    unexpected = [key for key in unexpected if not IGNORED_KEYS.search(key)]
    parts = {name.partition(".")[0] for name in expected}
    if foreign := [key for key in unexpected if key.partition(".")[0] in parts or CONDITIONS.match(key)]:
        raise ModelLoadError(f"{owner}: {_name(foreign)} in {where} but not in the configured network.")
    if unexpected:
        logger.warning("%s: %s in %s and in no part of the network; left out", owner, _name(unexpected), where)
    for name, parameter in expected.items():
        key, shape, _ = source.readers[name]
        if tuple(parameter.shape) != shape:
            raise ModelLoadError(
                f"{owner}: tensor {key!r} of {source.checkpoint.where(key)} has shape {list(shape)}; "
                f"the configured network expects {list(parameter.shape)}."
            )


def _name(keys: list[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:MAX_NAMED_KEYS])
    further = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
    return f"tensor {shown}{further} {'is' if len(keys) == 1 else 'are'}"


def _place_computed_buffers(module: nn.Module, device: torch.device) -> None:
    for path, part in module.named_modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is None:
                continue
            if buffer.is_meta and device.type != "meta":
                raise ModelLoadError(f"{type(module).__name__}: buffer {path}.{name} has no value on disk.")
            part._buffers[name] = buffer.to(device)


@dataclass(frozen=True)
class LoadedParts:
    """Networks, tokenizers and configurations, before runners are made of them.

    Attributes:
        unet: diffusers' UNet.
        vae: diffusers' VAE.
        encoders: Text encoders with their tokenizers.
        scheduler_config: Configuration of the noise schedule.
        zero_empty_negative: SDXL: an empty negative prompt is all zeros instead of an encoded "".
        vae_dtype: Compute dtype of the VAE.
        files: Weight files and files that determine their shapes (of a pruned UNet), for the digest.
        guess_prediction: The files do not say whether the UNet predicts noise or velocity, so it is tested.
    """

    unet: Any
    vae: Any
    encoders: tuple[TextEncoder, ...]
    scheduler_config: dict[str, Any]
    zero_empty_negative: bool
    vae_dtype: torch.dtype
    files: tuple[Path, ...]
    guess_prediction: bool = False


def vae_precision(choice: DeviceChoice, vae_config: Mapping[str, Any], *, is_sdxl: bool) -> DeviceChoice:
    """Return ``choice`` with the configured dtype of the VAE, or else with one in which this VAE does not overflow.

    SDXL's own VAE overflows in float16, unless its configuration has ``force_upcast: false`` (fixed ones do). The
    others do not, whatever their configuration has: diffusers writes ``true`` by default and never reads it for Stable
    Diffusion 1 and 2.
    """
    overflows = is_sdxl and bool(vae_config.get("force_upcast", True))
    automatic = vae_dtype(choice.compute_dtype, compute_capability(choice.device), overflows=overflows)
    dtype = choice.vae_dtype or automatic
    return choice if dtype == choice.compute_dtype else replace(choice, compute_dtype=dtype)
