"""UNet calls compiled ahead of time: one package per number of rows, canvas and text length, stored on disk.

Small networks on a CPU have their weights in the package, packed by OpenVINO if it is installed, else by AOTInductor.
Other AOTInductor packages use the weights of the loaded network, so models of one architecture share packages. LoRA
factors are arguments, zero for unchanged layers. Nothing compiles while images are generated: without a package a call
runs eagerly.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from diffserve.api.errors import ConfigError
from diffserve.disk_cache import DiskCache
from diffserve.runtime.device_health import raise_if_sticky
from diffserve.runtime.low_rank import Factors, RowLoRAs, adapting, of_pictures
from diffserve.runtime.precision import (
    INT8,
    INT8_DYNAMIC,
    TORCH_DTYPES,
    cpu_bf16_unit,
    hardware_name,
    tensor_bytes,
)
from diffserve.runtime.unet.call import Kind, UNetArguments, conditions
from diffserve.runtime.unet.cross_attention import KeysValues, Pair
from diffserve.runtime.unet.inductor import WEIGHTS_AT_LOAD, WEIGHTS_IN_PACKAGE, compile_package, missing_tools
from diffserve.runtime.unet.openvino_package import (
    BF16_UNITS,
    SUFFIX,
    OpenVINOCompiler,
    OpenVINOPackage,
    openvino_version,
)
from diffserve.runtime.unet.package import Package, Streams
from diffserve.runtime.unet.pruning import widths_of
from diffserve.settings.config import num_cores

if TYPE_CHECKING:
    from diffserve.runtime.model import DiffusionModel

FOLDER: Final = "compiled"
FORMAT: Final = 4
INDUCTORS: Final = ".pt2"
SUFFIXES: Final = (SUFFIX, INDUCTORS)
MOST_PACKAGES: Final = 256
"""Limit for all models together; the least recently used packages are deleted first."""

COMPILED_DTYPES: Final = (*TORCH_DTYPES, INT8, INT8_DYNAMIC)

MOST_BAKED_BYTES: Final = 1 << 27
"""Largest network whose weights are stored in packages: each package has a copy on disk and up to three in memory."""

LONGEST_COMPILE_S: Final = 6 * 3600.0
"""Working folders of compilers older than this were left by a crash."""

DAMAGE: Final = (BadZipFile, EOFError, ValueError, KeyError, NotImplementedError, zlib.error)
"""Exceptions that reading a damaged file can raise."""

logger = logging.getLogger(__name__)


class FlatUNet(nn.Module):
    """Wrapper of ``network`` that takes a flat list of tensors, in the order of the arguments of ``call``."""

    def __init__(self, network: Any, call: UNetArguments) -> None:
        super().__init__()
        self.network = network
        self._added = tuple(call.added or ())
        self._is_paged = isinstance(call.contexts, KeysValues)
        self._layers = of_pictures(network, has_keys_values=self._is_paged) if call.factors else ()

    def forward(self, sample: Tensor, timesteps: Tensor, *tensors: Tensor) -> Tensor:
        """Return (R, C, h, w) in the network's dtype."""
        added = dict(zip(self._added, tensors, strict=False))
        end = len(tensors) - 2 * len(self._layers)
        texts, numbers = tensors[len(self._added) : end], tensors[end:]
        pairs = tuple(Pair(*texts[at : at + 2]) for at in range(0, len(texts), 2)) if self._is_paged else ()
        factors = (Factors(*numbers[at : at + 2]) for at in range(0, len(numbers), 2))
        changed = dict(zip(self._layers, factors, strict=True))
        with adapting(RowLoRAs.of_factors(changed) if changed else None):
            output: Tensor = self.network(
                sample,
                timesteps,
                encoder_hidden_states=KeysValues(pairs) if self._is_paged else texts[0],
                **conditions(added),
                return_dict=False,
            )[0]
        return output


class Packages:
    """The packages of ``model``'s UNet on this machine, in a folder of ``cache``.

    Attributes:
        reason: Why there can be no packages; ``None`` if there can.
        is_baked: Whether packages contain the weights. Int8 weights never are, because they would become floats.
        compiler: Name and version of the compiler, and version of its settings.
    """

    def __init__(self, model: DiffusionModel, cache: DiskCache) -> None:
        self._network = model.unet.network
        self._num_threads = min(torch.get_num_threads(), num_cores())  # OpenVINO takes no more
        self.device = model.device
        self._folder = None if cache.folder is None else cache.folder / FOLDER
        self.reason = _reason(model, self._folder)
        num_bytes = sum(map(tensor_bytes, self._network.parameters()))
        is_small = num_bytes <= MOST_BAKED_BYTES
        self.is_baked = model.device.type == "cpu" and is_small and model.choice.dtype in TORCH_DTYPES
        is_known = model.dtype == torch.float32 or (model.dtype == torch.bfloat16 and cpu_bf16_unit() in BF16_UNITS)
        openvino = openvino_version() if self.is_baked and is_known else None
        self._dtype = model.dtype
        self.compiler = f"{f'openvino {openvino}' if openvino else f'inductor {torch.__version__}'} {FORMAT}"
        self.is_by_openvino = openvino is not None
        self.identity = "" if self.reason else f"{self.compiler} {_package_identity(model, self.is_baked)}"
        self._converted: tuple[Kind, OpenVINOCompiler] | None = None

    @cached_property
    def missing_tools(self) -> str | None:
        """A clause that names what compiling needs and is not installed; packages can be loaded without it."""
        return None if self.is_by_openvino else missing_tools(self.device)

    @property
    def compiler_name(self) -> str:
        """The compiler and its version, for display."""
        return f"OpenVINO {openvino_version()}" if self.is_by_openvino else f"AOTInductor {torch.__version__}"

    def remove(self, kind: Kind | None, sizes: Sequence[int]) -> None:
        """Delete the packages of ``kind`` that serve calls of ``sizes`` rows."""
        for num_rows in sizes:
            path = self.path(kind, num_rows // self.num_streams(num_rows))
            if path is not None:
                path.unlink(missing_ok=True)

    @property
    def is_empty(self) -> bool:
        """Whether no package of any model exists."""
        return bool(self.reason) or self._folder is None or not self._folder.is_dir()

    def num_streams(self, num_rows: int) -> int:
        """Return into how many equal shares OpenVINO splits the rows; the package is for the rows of one share."""
        return math.gcd(self._num_threads, num_rows) if self.is_by_openvino else 1

    def path(self, kind: Kind | None, num_rows: int) -> Path | None:
        """Return the path of the package for ``num_rows`` rows, which may not exist; ``None`` if there can be none."""
        if self.reason or self._folder is None or kind is None:
            return None
        key = f"{self.identity} {kind} {num_rows}"
        suffix = SUFFIX if self.is_by_openvino else INDUCTORS
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{suffix}"

    def sizes_with_files(self, kind: Kind | None, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``sizes`` whose package is a file; whether it loads is not known."""
        paths = {num_rows: self.path(kind, num_rows // self.num_streams(num_rows)) for num_rows in sizes}
        return tuple(num_rows for num_rows, path in paths.items() if path is not None and path.is_file())

    def compile(self, call: UNetArguments) -> Path:
        """Compile a package for calls like ``call`` unless it exists.

        OpenVINO takes half a minute for the first call of a kind and a second for each further number of rows.
        AOTInductor takes a minute for each and needs a C++ compiler. Each compile has its own folder, which is deleted
        afterwards: a killed compiler leaves partial files, and torch trusts the files in its shared cache.

        Raises:
            ConfigError: There can be no package.
            OSError: The disk is full.
            Exception: What the compilers raise.
        """
        path = self.path(call.kind, len(call.sample))
        if path is None or self._folder is None:
            raise ConfigError(f"{self.reason or 'texts of different lengths share this call'}.", param="compile")
        if path.is_file():
            return path
        if self.missing_tools:
            raise ConfigError(f"AOTInductor cannot compile: {self.missing_tools}.", param="compile")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with TemporaryDirectory(dir=self._folder, prefix=".", ignore_cleanup_errors=True) as folder:
            part = Path(folder) / f"part{path.suffix}"
            if self.is_by_openvino:
                self._convert(call).compile(len(call.sample), part)
            else:
                self._compile_by_inductor(call, part)
                if self.device.type == "cuda":
                    self._call_once(part, call)
            os.replace(part, path)
        _remove_oldest(self._folder)
        return path

    def finish(self) -> None:
        """Free the memory of the last converted model; call it after the last compile of a kind."""
        self._converted = None

    def _convert(self, call: UNetArguments) -> OpenVINOCompiler:
        """Return the compiler for the kind of ``call``; the last is kept, as a kind is compiled for several sizes."""
        assert call.kind is not None
        if self._converted is None or self._converted[0] != call.kind:
            self._converted = None
            flat = FlatUNet(self._network, call).eval()
            self._converted = call.kind, OpenVINOCompiler(flat, self._network, call.tensors)
        return self._converted[1]

    def _compile_by_inductor(self, call: UNetArguments, part: Path) -> None:
        with torch.no_grad():
            tensors = [tensor.contiguous() for tensor in call.tensors]
        options = WEIGHTS_IN_PACKAGE if self.is_baked else WEIGHTS_AT_LOAD
        compile_package(FlatUNet(self._network, call), tensors, part, options)

    def _call_once(self, path: Path, call: UNetArguments) -> None:
        """Run ``call`` by the package at ``path``, so that a package that crashes does so here and not in an engine.

        On CUDA packages are compiled in a separate process. On the first card tested every package of torch 2.11 ended
        the process that loaded it by a segmentation fault.
        """
        package = Package(path, self.device)
        package.use_weights(self._network)
        package(call.tensors)
        torch.cuda.synchronize(self.device)

    def load(self, path: Path, num_rows: int) -> Package | OpenVINOPackage:
        """Load the package at ``path`` for calls with ``num_rows`` rows.

        Raises:
            Exception: One of ``DAMAGE``: the file is damaged.
            RuntimeError: The package cannot be loaded.
            ConfigError: Its library cannot be loaded.
            OSError: There is no disk space to unpack it.
        """
        package: Package | OpenVINOPackage
        if self.is_by_openvino:
            streams = self.num_streams(num_rows)
            threads = {"num_threads": self._num_threads, "num_streams": streams}
            package = OpenVINOPackage(path, self._network, self._dtype, **threads)
        else:
            package = Package(path, self.device, self._num_threads if self.is_baked else 1)
            if not self.is_baked:
                package.use_weights(self._network)
        os.utime(path)  # the least recently used packages are deleted first
        return package


class CompiledUNet:
    """The loaded packages of a UNet, and calls by them."""

    def __init__(self, packages: Packages) -> None:
        self.packages = packages
        self._loaded: dict[tuple[Kind, int], Package | OpenVINOPackage] = {}
        self._paths: set[Path] = set()
        self._loaded_with: dict[tuple[Kind, int], frozenset[tuple[Kind, int]]] = {}
        """For each package those loaded at the same time: the way a call is split must not change after it was checked.
        """
        self._streams = Streams()
        self._failed: set[tuple[Kind, int]] = set()

    def load(self, kind: Kind | None, sizes: Sequence[int]) -> tuple[int, ...]:
        """Load the packages for ``kind``; return those of ``sizes`` that have one."""
        loaded_sizes = []
        for num_rows in sizes:
            path = self.packages.path(kind, num_rows // self.packages.num_streams(num_rows))
            if kind is None or path is None:
                break
            if (kind, num_rows) not in self._loaded and path.is_file():
                try:
                    self._loaded[kind, num_rows] = self.packages.load(path, num_rows)
                except DAMAGE as error:  # it is compiled again when needed
                    self._log_failure(error)
                    if path not in self._paths:  # a path in use is valid: calls of fewer rows use it
                        path.unlink(missing_ok=True)
                except (ConfigError, OSError, RuntimeError) as error:
                    self._log_failure(error)
            if (kind, num_rows) in self._loaded:
                self._paths.add(path)
                loaded_sizes.append(num_rows)
        for key in self._loaded:
            self._loaded_with.setdefault(key, frozenset(self._loaded))
        return tuple(loaded_sizes)

    def run(self, call: UNetArguments) -> Tensor | None:
        """Make ``call`` by its package.

        Returns:
            The output (R, C, h, w) in the network's dtype; ``None`` where there is no package, or it fails. A package
            that failed is not used again.

        Raises:
            torch.OutOfMemoryError: A package on CUDA failed for the first time in a row. Its error does not say
                whether memory ran out, so the caller can free some and call again.
        """
        num_rows = len(call.sample)
        if not self._loaded or (kind := call.kind) is None or (kind, num_rows) not in self._loaded:
            return None
        num_streams = self._num_streams(kind, num_rows)
        key = (kind, num_rows // num_streams)
        package = self._loaded[key]
        try:
            tensors = call.tensors
            output = self._streams.run(package, tensors, num_streams) if num_streams > 1 else package(tensors)
        except RuntimeError as error:
            raise_if_sticky(error)
            if self.packages.device.type == "cuda" and key not in self._failed:
                self._failed.add(key)
                raise torch.OutOfMemoryError(f"a compiled call failed, perhaps for lack of memory: {error}") from error
            self._log_failure(error)
            del self._loaded[key]
            return None
        self._failed.discard(key)
        return output

    def _num_streams(self, kind: Kind, num_rows: int) -> int:
        """Return into how many parallel calls one of ``num_rows`` is split.

        Only small networks are split, because each call reads the weights. The result is the largest divisor up to the
        number of threads that has a package. OpenVINO's packages split rows themselves.
        """
        if not self.packages.is_baked or self.packages.is_by_openvino:
            return 1
        numbers = range(min(torch.get_num_threads(), num_rows), 1, -1)
        parts = ((count, (kind, num_rows // count)) for count in numbers if num_rows % count == 0)
        return next(
            (count for count, part in parts if part in self._loaded_with[kind, num_rows] & self._loaded.keys()), 1
        )

    def _log_failure(self, error: Exception) -> None:
        logger.warning(
            "a compiled call failed, so the call is repeated without compilation: %s", str(error).partition("\n")[0]
        )


def _reason(model: DiffusionModel, folder: Path | None) -> str | None:
    if folder is None:
        return "packages are kept in the cache folder, and engine.cache_dir is empty"
    if model.choice.dtype not in COMPILED_DTYPES:
        return f"weights of {model.choice.dtype} are not compiled; choose one of {', '.join(COMPILED_DTYPES)}"
    if not model.choice.is_unet_whole:
        return f"weights that are not on the device (offload {model.choice.offload}, or a device_map) are not compiled"
    if model.device.type not in ("cpu", "cuda"):
        return f"compilation is not supported on {model.device.type}"
    return None


def _package_identity(model: DiffusionModel, is_baked: bool) -> str:
    """Return all that a package depends on except the shapes."""
    import diffusers  # late: a process may first select which parts to import

    network = model.unet.network
    config = json.dumps({key: value for key, value in network.config.items() if key[0] != "_"}, default=str)
    widths = widths_of(network)  # a pruned network differs from its configuration
    weights = model.digest if is_baked else ""
    kinds = {type(module) for module in network.modules()}
    made_of = sorted({getattr(kind, "compiled_name", kind.__name__) for kind in kinds})
    machine = f"{hardware_name(model.device)} torch {torch.__version__} cuda {torch.version.cuda}"
    machine += f" diffusers {diffusers.__version__}"
    machine += f" {model.unet.memory_format}" * (model.unet.memory_format != "contiguous")  # strides are compiled in
    return f"{weights} {model.choice.dtype} {config} {widths} {made_of} {machine}"


def _remove_oldest(folder: Path) -> None:
    """Delete all but the ``MOST_PACKAGES`` last used packages, and folders of killed compilers.

    Other processes may delete files at the same time.
    """
    entries = list(os.scandir(folder))
    for entry in entries:
        if entry.name.startswith(".") and entry.stat().st_mtime < time.time() - LONGEST_COMPILE_S:
            shutil.rmtree(entry.path, ignore_errors=True)
    packages = [entry for entry in entries if entry.name.endswith(SUFFIXES)]
    for entry in sorted(packages, key=lambda entry: entry.stat().st_mtime)[: max(0, len(packages) - MOST_PACKAGES)]:
        Path(entry.path).unlink(missing_ok=True)
