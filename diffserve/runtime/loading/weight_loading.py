"""Build a network empty and fill it tensor by tensor: every key accounted for, every shape compared.

A weight that is to hold fewer bits is quantized as soon as it has been read and before the next one is, so the most
that is ever held is the finished model plus one tensor. Weights that rest elsewhere (``offload``) come when their layer
runs.
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
from diffserve.runtime.loading.placement import dispatch, make_device_map, place_of, straddle
from diffserve.runtime.memory import give_heap_back
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.quantization import quantize_layer, schemes
from diffserve.runtime.text.encoding import TextEncoder
from diffserve.runtime.vae.plan import vae_dtype

#: Buffers that old checkpoints carry and that are computed, not learned; and of a whole CLIP what no prompt needs.
IGNORED_KEYS = re.compile(r"(^|\.)(position_ids|logit_scale)$|^(vision_model|visual_projection|text_projection)\.")
CONDITIONS = re.compile(r"(add_embedding|class_embedding|encoder_hid_proj|time_embed_act|controlnet_)\w*\.")
"""Tensors of a UNet's further conditions, which exist where its configuration names them."""

MAX_NAMED_KEYS = 5
HEAP_BYTES = 1 << 27
"""Of weights that may have been let go of before the heap is given back."""

logger = logging.getLogger(__name__)

Read = Callable[[], torch.Tensor]
Made = TypeVar("Made")


class TensorSource:
    """What a module is filled from: its own parameter name -> (key on disk, shape after conversion, reader)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.readers: dict[str, tuple[str, tuple[int, ...], Read]] = {}

    @classmethod
    def renamed(cls, checkpoint: Checkpoint, names: Mapping[str, str]) -> TensorSource:
        """A source in which parameter ``name`` is the tensor ``names[name]`` as it stands."""
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
        """Give parameter ``name`` from tensor ``key``, passed through ``convert`` which makes it ``shape``; the key."""
        stored = self.checkpoint.entries[key].shape

        def read() -> torch.Tensor:
            tensor = self.checkpoint.read(key)
            return tensor if convert is None else convert(tensor)

        self.readers[name] = (key, shape or stored, read)
        return key

    def outline(self, name: str) -> torch.Tensor:
        """Parameter ``name`` without its numbers: of a file of floats only the header is read."""
        key, shape, read = self.readers[name]
        return torch.empty(shape, device="meta") if self.checkpoint.holds_floats(key) else read()


class WithoutInit(TorchFunctionMode):
    """Leaves parameters on the meta device as they are, and gives counted buffers their values at once.

    There is nothing to initialise there, and trying it, or counting there, would have torch import all of its compiler
    or sympy first.
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
    # without buffers it would move each parameter by itself, for which torch imports its compiler: a second
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
    """Give every parameter of the empty ``module`` its tensor, in ``choice.compute_dtype``, where it is to rest.

    quantize       what layers are to hold (``runtime.quantization``); None: ``choice.compute_dtype``
    channels_last  store convolutions channels last where ``is_channels_last``: the decoders, not the UNet

    Raises ModelLoadError naming the keys that are missing, unexpected or of the wrong shape, with file and both shapes.
    """
    set_tensor = import_quietly("accelerate.utils", "set_module_tensor_to_device")
    expected: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    check_keys(type(module).__name__, expected, source)
    parameters = dict(module.named_parameters())
    narrow = schemes(module, quantize) if quantize else {}
    device_map = make_device_map(module, choice)
    resting: dict[str, Read] = {}
    let_go_bytes = 0  # of full weights, since the heap was last given back: what lies between narrow ones stays there
    for name in expected:
        place = place_of(name, device_map) if name in parameters else choice.device
        make = partial(_read, source, name, "cpu" if place == "disk" else place, choice, channels_last=channels_last)
        if place == "disk":
            set_tensor(module, name, "meta", dtype=choice.compute_dtype)
            resting[name] = make
            continue
        tensor = make()
        set_tensor(module, name, tensor.device, tensor, tensor.dtype, clear_cache=False)
        if tensor.device.type != choice.device.type and not choice.rooms:
            resting[name] = partial(torch.Tensor.detach, tensor)
        owner, _, part = name.rpartition(".")
        if part == "weight" and owner in narrow:
            quantize_layer(module.get_submodule(owner), narrow[owner])
            let_go_bytes += tensor.nbytes
            if let_go_bytes > HEAP_BYTES and choice.device.type == "cpu":
                give_heap_back()
                let_go_bytes = 0
    if let_go_bytes and choice.device.type == "cpu":
        give_heap_back()
    _place_computed_buffers(module, choice.device)
    module.eval().requires_grad_(False)
    if choice.rooms:
        straddle(module, {name: torch.device(place) for name, place in device_map.items()}, choice.device)
    elif resting:
        dispatch(module, device_map, resting, str(choice.device))


def fill_renamed(
    network: nn.Module,
    checkpoint: Checkpoint,
    add: Callable[[TensorSource, str], str],
    choice: DeviceChoice,
    **settings: Any,
) -> set[str]:
    """Fill ``network``; ``add`` gives the source one parameter by name and returns the key that it comes from.

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
    """Parameter ``name`` on ``device``, a copy of what the file holds; on the meta device nothing of it is read."""
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
    more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
    return f"tensor {shown}{more} {'is' if len(keys) == 1 else 'are'}"


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

    files                the weight files and what tells their shapes (a pruned UNet's), for the digest
    zero_empty_negative  SDXL: an empty negative prompt is all zeros instead of an encoded ""
    guess_prediction     nothing on disk says whether the UNet predicts noise or velocity: ask the UNet
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
