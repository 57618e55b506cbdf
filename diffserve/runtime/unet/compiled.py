"""UNet calls compiled ahead of time, one package for each shape: kept on disk, loaded within moments.

A package is code for one number of rows, canvas and text length. Where the weights are small they are baked into it,
packed for the processor: by OpenVINO where it is installed, else by AOTInductor. Otherwise AOTInductor's
code uses those of the loaded network, so that all packages of a model share one copy, and all models of one
architecture share the packages. Adapters are told layer by layer, with zeros for
the layers that they leave alone: a package serves all of one padded rank. Nothing is traced, guarded or compiled while
pictures are painted: a shape without a package goes the eager way.
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
from tempfile import mkdtemp
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
"""Of all models together; the longest unused go first."""

COMPILED_DTYPES: Final = (*TORCH_DTYPES, INT8, INT8_DYNAMIC)

MOST_BAKED_BYTES: Final = 1 << 27
"""Of a network: every package of it holds its weights once more on disk, and up to three times in memory."""

LONGEST_COMPILE_S: Final = 6 * 3600.0
"""A folder of work that is older was left behind."""

DAMAGE: Final = (BadZipFile, EOFError, ValueError, KeyError, NotImplementedError, zlib.error)
"""What is said of a file in which some bytes are others."""

logger = logging.getLogger(__name__)


class FlatUNet(nn.Module):
    """``network`` with tensors for arguments: those of ``call`` by number and order, their values aside."""

    def __init__(self, network: Any, call: UNetArguments) -> None:
        super().__init__()
        self.network = network
        self._added = tuple(call.added or ())
        self._is_paged = isinstance(call.contexts, KeysValues)
        self._layers = of_pictures(network, has_keys_values=self._is_paged) if call.factors else ()

    def forward(self, sample: Tensor, timesteps: Tensor, *rest: Tensor) -> Tensor:
        """(R, C, h, w) in the network's dtype."""
        added = dict(zip(self._added, rest, strict=False))
        end = len(rest) - 2 * len(self._layers)
        texts, numbers = rest[len(self._added) : end], rest[end:]
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
    """The packages of ``model``'s UNet on this machine, under ``cache``.

    reason    why there can be none, ``None`` where there can
    is_baked  whether a package holds the weights; never those in int8, which would be held as floats
    compiler  who makes them, its version and that of how it is told
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
        self._name = "" if self.reason else f"{self.compiler} {_circumstances(model, self.is_baked)}"
        self._converted: tuple[Kind, OpenVINOCompiler] | None = None

    @cached_property
    def missing_tools(self) -> str | None:
        """A clause that names what compiling needs and is not installed; without it packages can still be loaded."""
        return None if self.is_by_openvino else missing_tools(self.device)

    @property
    def identity(self) -> str:
        """All that a package depends on except its shape; empty where there can be none."""
        return self._name

    @property
    def compiler_name(self) -> str:
        """The compiler and its version, for people."""
        return f"OpenVINO {openvino_version()}" if self.is_by_openvino else f"AOTInductor {torch.__version__}"

    def remove(self, kind: Kind | None, sizes: Sequence[int]) -> None:
        """Delete the packages of ``kind`` that serve calls of ``sizes`` rows."""
        for num_rows in sizes:
            path = self.path(kind, num_rows // self.num_streams(num_rows))
            if path is not None:
                path.unlink(missing_ok=True)

    @property
    def is_empty(self) -> bool:
        """Whether there is none, of any model."""
        return bool(self.reason) or self._folder is None or not self._folder.is_dir()

    def num_streams(self, num_rows: int) -> int:
        """Equal shares that OpenVINO computes side by side of a call of ``num_rows``, on as many threads each: the
        package of a share's rows makes it.
        """
        return math.gcd(self._num_threads, num_rows) if self.is_by_openvino else 1

    def path(self, kind: Kind | None, num_rows: int) -> Path | None:
        """Where the package of ``num_rows`` rows lies or would lie; ``None`` where there can be none."""
        if self.reason or self._folder is None or kind is None:
            return None
        key = f"{self._name} {kind} {num_rows}"
        suffix = SUFFIX if self.is_by_openvino else INDUCTORS
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}{suffix}"

    def sizes_with_files(self, kind: Kind | None, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``sizes`` whose package is a file; whether it loads is not known."""
        paths = {num_rows: self.path(kind, num_rows // self.num_streams(num_rows)) for num_rows in sizes}
        return tuple(num_rows for num_rows, path in paths.items() if path is not None and path.is_file())

    def compile(self, call: UNetArguments) -> Path:
        """Compile for calls like ``call`` unless that is done: OpenVINO takes half a minute for the first of a kind and
        a second for each further number of rows, AOTInductor a minute for each, and needs a C++ compiler.

        In a folder of its own that is gone afterwards, for a compiler that was killed leaves halves of files behind,
        and torch takes what lies in its shared one as whole.

        Raises what the compilers raise, ConfigError where there can be no package, and OSError of a full disk.
        """
        path = self.path(call.kind, len(call.sample))
        if path is None or self._folder is None:
            raise ConfigError(f"{self.reason or 'texts of different lengths share this call'}.", param="compile")
        if path.is_file():
            return path
        if self.missing_tools:
            raise ConfigError(f"AOTInductor cannot compile: {self.missing_tools}.", param="compile")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = Path(mkdtemp(dir=self._folder, prefix=".")) / f"part{path.suffix}"
        try:
            if self.is_by_openvino:
                self._convert(call).compile(len(call.sample), part)
            else:
                self._compile_by_inductor(call, part)
                if self.device.type == "cuda":
                    self._call_once(part, call)
            os.replace(part, path)
        finally:
            shutil.rmtree(part.parent, ignore_errors=True)
        _forget_oldest(self._folder)
        return path

    def finish(self) -> None:
        """Nothing more of the last kind is compiled: what was converted for it takes memory."""
        self._converted = None

    def _convert(self, call: UNetArguments) -> OpenVINOCompiler:
        """For calls of the kind of ``call``. The last one is kept: a kind is compiled for one size after the other."""
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
        """Make ``call`` by the package at ``path``: what crashes the process does so here, and not in an engine.

        On CUDA packages are compiled in a process of their own. On the first card that was tried every package of
        torch 2.11 ended the process that loaded it by a segmentation fault.
        """
        package = Package(path, self.device)
        package.use_weights(self._network)
        package(call.tensors)
        torch.cuda.synchronize(self.device)

    def load(self, path: Path, num_rows: int) -> Package | OpenVINOPackage:
        """The package at ``path``, ready to be called with ``num_rows`` rows. One of ``DAMAGE`` where it is damaged,
        RuntimeError where it does not load, ConfigError where its library does not, OSError where there is no room to
        unpack it.
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
        os.utime(path)  # used: it is among the last to go
        return package


class CompiledUNet:
    """The packages in use."""

    def __init__(self, packages: Packages) -> None:
        self.packages = packages
        self._loaded: dict[tuple[Kind, int], Package | OpenVINOPackage] = {}
        self._paths: set[Path] = set()
        self._company: dict[tuple[Kind, int], frozenset[tuple[Kind, int]]] = {}
        """Those that were there when one was loaded: what a call is made of never changes, for it is proven once."""
        self._streams = Streams()
        self._failed: set[tuple[Kind, int]] = set()

    def load(self, kind: Kind | None, sizes: Sequence[int]) -> tuple[int, ...]:
        """Take the packages for ``kind`` into use; those of ``sizes`` for which there is one."""
        found = []
        for num_rows in sizes:
            path = self.packages.path(kind, num_rows // self.packages.num_streams(num_rows))
            if kind is None or path is None:
                break
            if (kind, num_rows) not in self._loaded and path.is_file():
                try:
                    self._loaded[kind, num_rows] = self.packages.load(path, num_rows)
                except DAMAGE as error:  # made anew when it is wanted again
                    self._distrust(error)
                    if path not in self._paths:  # or it is whole, for calls of fewer rows are made of it
                        path.unlink(missing_ok=True)
                except (ConfigError, OSError, RuntimeError) as error:
                    self._distrust(error)
            if (kind, num_rows) in self._loaded:
                self._paths.add(path)
                found.append(num_rows)
        for key in self._loaded:
            self._company.setdefault(key, frozenset(self._loaded))
        return tuple(found)

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
            self._distrust(error)
            del self._loaded[key]
            return None
        self._failed.discard(key)
        return output

    def _num_streams(self, kind: Kind, num_rows: int) -> int:
        """Calls side by side that make up one of ``num_rows``, where a network is so small that its weights may be
        read by each: as many as there are threads, of those numbers of rows for which there are packages. OpenVINO's
        packages share rows out by themselves.
        """
        if not self.packages.is_baked or self.packages.is_by_openvino:
            return 1
        numbers = range(min(torch.get_num_threads(), num_rows), 1, -1)
        parts = ((one, (kind, num_rows // one)) for one in numbers if num_rows % one == 0)
        return next((one for one, part in parts if part in self._company[kind, num_rows] & self._loaded.keys()), 1)

    def _distrust(self, error: Exception) -> None:
        logger.warning("a compiled call failed, so it is made without: %s", str(error).partition("\n")[0])


def _reason(model: DiffusionModel, folder: Path | None) -> str | None:
    if folder is None:
        return "packages are kept in the cache folder, and engine.cache_dir is empty"
    if model.choice.dtype not in COMPILED_DTYPES:
        return f"weights of {model.choice.dtype} are not compiled; choose one of {', '.join(COMPILED_DTYPES)}"
    if not model.choice.is_unet_whole:
        return f"weights that are elsewhere (by offload {model.choice.offload}, or a device_map) are not compiled"
    if model.device.type not in ("cpu", "cuda"):
        return f"nothing is compiled for {model.device.type}"
    return None


def _circumstances(model: DiffusionModel, is_baked: bool) -> str:
    """All that a package depends on, but the shapes."""
    import diffusers  # of which a process may want a part: it says so first

    network = model.unet.network
    config = json.dumps({key: value for key, value in network.config.items() if key[0] != "_"}, default=str)
    widths = widths_of(network)  # of a pruned one others than its configuration says
    weights = model.digest if is_baked else ""
    kinds = {type(module) for module in network.modules()}
    made_of = sorted({getattr(kind, "compiled_name", kind.__name__) for kind in kinds})
    machine = f"{hardware_name(model.device)} torch {torch.__version__} cuda {torch.version.cuda}"
    machine += f" diffusers {diffusers.__version__}"
    machine += f" {model.unet.memory_format}" * (model.unet.memory_format != "contiguous")  # strides are compiled in
    return f"{weights} {model.choice.dtype} {config} {widths} {made_of} {machine}"


def _forget_oldest(folder: Path) -> None:
    """Keep the ``MOST_PACKAGES`` last used, and nothing of a compiler that was killed; what another process removes
    meanwhile is gone all the same.
    """
    entries = list(os.scandir(folder))
    for entry in entries:
        if entry.name.startswith(".") and entry.stat().st_mtime < time.time() - LONGEST_COMPILE_S:
            shutil.rmtree(entry.path, ignore_errors=True)
    found = [entry for entry in entries if entry.name.endswith(SUFFIXES)]
    for entry in sorted(found, key=lambda entry: entry.stat().st_mtime)[: max(0, len(found) - MOST_PACKAGES)]:
        Path(entry.path).unlink(missing_ok=True)
