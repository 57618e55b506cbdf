"""ControlNets of a model's folder: checked and loaded on demand, and the preprocessors that make control maps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.api.types import Picture
from diffserve.media.canny import Pixels, edge_map
from diffserve.models.controlnets import (
    ALLOWED_CLASS,
    CANNY,
    PARAM,
    PASSED_THROUGH,
    Control,
    ControlNetFolder,
    read_controlnet,
)
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import build, load_component
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.runtime.loading.weight_loading import TensorSource, check_keys
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.threads import pool_of_threads
from diffserve.runtime.unet.controlnet import ControlNetRunner, check_fits
from diffserve.runtime.unet.layers import use_halved_gates, use_steady_layers
from diffserve.runtime.unet.memory_format import store_as


class ControlNetFiles(NamedTuple):
    """A ControlNet's configuration, and its opened checkpoint."""

    directory: Path
    config: dict[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def open(cls, directory: Path, dtype: str) -> ControlNetFiles:
        """Open the variant in ``directory`` that suits ``dtype``. Raises ModelLoadError."""
        config = read_controlnet(directory)
        return cls(directory, config, Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype=dtype)))

    def network(self, unet: Any, vae_factor: int) -> Any:
        """Build the empty network and check it. Raises ModelLoadError if it does not fit ``unet`` or its own files."""
        network = build(ALLOWED_CLASS, self.config, str(self.directory / "config.json"))
        check_fits(network, unet, vae_factor)
        names = {key: key for key in self.checkpoint.entries}
        check_keys(ALLOWED_CLASS, network.state_dict(), TensorSource.renamed(self.checkpoint, names))
        return network

    def load(self, unet: Any, vae_factor: int, choice: DeviceChoice) -> Any:
        """Load the network in ``choice.compute_dtype``, even if the UNet is quantized."""
        network = self.network(unet, vae_factor)
        if choice.device.type == "cpu":
            use_steady_layers(network, choice.compute_dtype)
        elif choice.device.type == "cuda":
            use_halved_gates(network)
        return load_component(network, self.checkpoint, choice)


LIBRARY: Final = "controlnet_aux"
RANDOM: Final = "shuffle"

logger = logging.getLogger(__name__)


def check_preprocessor(name: str) -> None:
    """Raise InvalidRequest if the preprocessor ``name`` is not available."""
    if name in (PASSED_THROUGH, CANNY):
        return
    names, trouble = _library()
    if name in names:
        return
    available = ", ".join((PASSED_THROUGH, CANNY, *names))
    hint = f"; others need the package {LIBRARY}, which {trouble}" if trouble else ""
    raise InvalidRequest(f"the preprocessor is {name!r}; use one of {available}{hint}.", param=PARAM)


def preprocess(control: Control, picture: Pixels) -> Pixels:
    """Return the control map (height, width, 3) of ``picture`` (height, width, 3). Raises InvalidRequest."""
    name = control.preprocessor
    if name == PASSED_THROUGH:
        return picture
    if name == CANNY:
        return edge_map(picture, *control.thresholds, control.resolution)
    check_preprocessor(name)
    height, width = picture.shape[:2]
    try:
        control_map = import_quietly(f"{LIBRARY}.processor", "Processor")(name)(Image.fromarray(picture), to_pil=True)
    except Exception as error:  # for example its weights are missing, and nothing is downloaded
        message = f"the preprocessor {name!r} of {LIBRARY} cannot be used ({type(error).__name__}); give a control map."
        raise InvalidRequest(message, param=PARAM) from error
    return np.asarray(control_map.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def _library() -> tuple[tuple[str, ...], str]:
    """Return the deterministic preprocessors of the library, and why there are none."""
    if find_spec(LIBRARY) is None:
        return (), "is not installed"
    try:
        models: dict[str, Any] = import_quietly(f"{LIBRARY}.processor", "MODELS")
    except Exception as error:  # one of its many dependencies
        logger.warning("%s cannot be imported: %s", LIBRARY, error)
        return (), f"cannot be imported here ({error})"
    return tuple(sorted({*models} - {CANNY, PASSED_THROUGH, RANDOM})), ""


MAX_CHECKED: Final = 256


class ReadControl(NamedTuple):
    """A loaded ControlNet of one image, and its control map (H, W, 3)."""

    network: ControlNetRunner
    pixels: NDArray[np.uint8]


class ControlNetStore:
    """The ControlNets of ``model``'s folder. Those in use are kept, and of others up to ``max_bytes``.

    They use the UNet's device and dtype, but are not quantized.
    """

    def __init__(self, model: DiffusionModel, max_bytes: int) -> None:
        self.folder = ControlNetFolder(model.profile.controlnet_dir, model.choice.dtype, model.text_width)
        self.model = model
        self.max_bytes = max_bytes
        self._checked: LRUCache[str, None] = LRUCache(MAX_CHECKED)
        self._alive: WeakValueDictionary[str, ControlNetRunner] = WeakValueDictionary()
        self._kept: LRUCache[str, ControlNetRunner] = LRUCache(max_bytes, lambda network: network.num_bytes)

    def check(self, controls: Sequence[Control]) -> bytes:
        """Return a digest of the ControlNets that ``controls`` name, for cache keys.

        Raises InvalidRequest for one that does not exist, does not fit the model or has damaged headers, and for an
        unavailable preprocessor.
        """
        digests = []
        for control in controls:
            check_preprocessor(control.preprocessor)
            directory, digest = self._stamped(control.name)
            if digest not in self._checked:
                try:
                    self._opened(directory).network(self.model.unet.network, self.model.vae.factor)
                except ModelLoadError as error:
                    raise self._refused(control.name, directory, error) from None
                self._checked[digest] = None
            digests.append(digest)
        return hashlib.sha256("\n".join(digests).encode()).digest()

    def begin(self, controls: Sequence[Control], pictures: Sequence[Picture]) -> Future[list[ReadControl]]:
        """Load ``controls`` and compute the control maps of ``pictures`` in a background thread, one by one."""
        return self._reader.submit(
            lambda: [
                ReadControl(self._find(control.name), preprocess(control, picture.array))
                for control, picture in zip(controls, pictures, strict=True)
            ]
        )

    def take(self, name: str) -> ControlNetRunner:
        """Return the ControlNet ``name``, loading it if needed. Raises InvalidRequest."""
        network = self._find(name)
        self.keep(network)
        return network

    def keep(self, network: ControlNetRunner) -> None:
        """Mark ``network`` as the most recently used one."""
        if network.num_bytes <= self.max_bytes:
            self._kept[network.digest] = network

    def of_digest(self, digest: str) -> ControlNetRunner:
        """Return the ControlNet of ``digest``. Raises KeyError if it is no longer in memory."""
        return self._alive[digest]

    @property
    def planned_bytes(self) -> int:
        """Memory to reserve for weights: those of all ControlNets of the folder, at most ``max_bytes``."""
        total = 0
        for directory in self.folder.usable().values():
            try:
                total += self._bytes(self._opened(directory))
            except ModelLoadError:
                continue  # requests for it are rejected
        return min(total, self.max_bytes)

    @cached_property
    def _reader(self) -> ThreadPoolExecutor:
        return pool_of_threads(1, "controlnets")

    def _find(self, name: str) -> ControlNetRunner:
        directory, digest = self._stamped(name)
        network = self._alive.get(digest)
        if network is None:
            network = self._alive[digest] = self._read(name, directory, digest)
        return network

    def _read(self, name: str, directory: Path, digest: str) -> ControlNetRunner:
        choice = self.model.choice
        try:
            files = self._opened(directory)
            need, free = self._bytes(files), free_bytes(self.model.device)
            if free is not None and need > free and choice.offload == "none":
                problem = f"it needs {need >> 20} MiB of memory, and {free >> 20} MiB are free"
                raise ModelLoadError(problem)
            network = files.load(self.model.unet.network, self.model.vae.factor, choice)
            store_as(network, self.model.unet.memory_format)
        except ModelLoadError as error:
            raise self._refused(name, directory, error) from None
        return ControlNetRunner(name, digest, network, device=choice.device, dtype=self.model.dtype)

    def _stamped(self, name: str) -> tuple[Path, str]:
        """Return the directory, and a digest of the names, sizes and times of its files."""
        directory = self.folder.find(name)
        try:
            stats = [(file.name, file.stat()) for file in sorted(directory.iterdir()) if file.is_file()]
        except OSError:
            raise InvalidRequest(f"the ControlNet {name!r} has just been removed; leave it out.", param=PARAM) from None
        words = [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in stats]
        return directory, hashlib.sha256("\n".join((name, *words)).encode()).hexdigest()

    def _opened(self, directory: Path) -> ControlNetFiles:
        return ControlNetFiles.open(directory, self.model.choice.dtype)

    def _bytes(self, files: ControlNetFiles) -> int:
        return files.checkpoint.num_parameters * self.model.dtype.itemsize

    def _refused(self, name: str, directory: Path, error: ModelLoadError) -> InvalidRequest:
        """Return ``error`` as an error of the request, without the path of the folder."""
        problem = error.message.replace(f"{directory}/", "").replace(str(directory), directory.name).rstrip(".")
        return InvalidRequest(f"ControlNet {name!r} cannot be used with {self.model.model_id}: {problem}.", param=PARAM)
