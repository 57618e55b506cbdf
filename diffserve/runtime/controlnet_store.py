"""ControlNets on disk: diffusers' directories, checked against the UNet before any weight is read."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
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
    """A ControlNet's configuration and its tensors, opened and not read."""

    directory: Path
    config: dict[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def open(cls, directory: Path, dtype: str) -> ControlNetFiles:
        """Of ``directory``, the variant that suits ``dtype``. Raises ModelLoadError."""
        config = read_controlnet(directory)
        return cls(directory, config, Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype=dtype)))

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(entry.shape) for entry in self.checkpoint.entries.values())

    def network(self, unet: Any, vae_factor: int) -> Any:
        """The network, empty, every tensor accounted for. Raises ModelLoadError where it does not fit ``unet``, or its
        files do not fit its configuration.
        """
        network = build(ALLOWED_CLASS, self.config, str(self.directory / "config.json"))
        check_fits(network, unet, vae_factor)
        check_keys(ALLOWED_CLASS, network.state_dict(), TensorSource.renamed(self.checkpoint, self._names))
        return network

    def load(self, unet: Any, vae_factor: int, choice: DeviceChoice) -> Any:
        """The network with its weights in ``choice.compute_dtype``, whatever the UNet's are quantized to."""
        network = self.network(unet, vae_factor)
        if choice.device.type == "cpu":
            use_steady_layers(network, choice.compute_dtype)
        elif choice.device.type == "cuda":
            use_halved_gates(network)
        return load_component(network, self.checkpoint, choice)

    @property
    def _names(self) -> dict[str, str]:
        return {key: key for key in self.checkpoint.entries}


LIBRARY: Final = "controlnet_aux"
RANDOM: Final = "shuffle"

logger = logging.getLogger(__name__)


def check_preprocessor(name: str) -> None:
    """InvalidRequest for one that is not here."""
    if name in (PASSED_THROUGH, CANNY):
        return
    names, trouble = _library()
    if name in names:
        return
    known = ", ".join((PASSED_THROUGH, CANNY, *names))
    more = f"; others come with the package {LIBRARY}, which {trouble}" if trouble else ""
    raise InvalidRequest(f"the preprocessor is {name!r}; there are {known}{more}.", param=PARAM)


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
        found = import_quietly(f"{LIBRARY}.processor", "Processor")(name)(Image.fromarray(picture), to_pil=True)
    except Exception as error:  # its own weights are looked for on the network, which is not asked here
        said = f"the preprocessor {name!r} of {LIBRARY} cannot be used ({type(error).__name__}); give a control map."
        raise InvalidRequest(said, param=PARAM) from error
    return np.asarray(found.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def _library() -> tuple[tuple[str, ...], str]:
    """The names of the library, less what gives another map each time; and why there are none."""
    if find_spec(LIBRARY) is None:
        return (), "is not installed here"
    try:
        known: dict[str, Any] = import_quietly(f"{LIBRARY}.processor", "MODELS")
    except Exception as error:  # whatever one of the many libraries that it wants says
        logger.warning("%s cannot be imported: %s", LIBRARY, error)
        return (), f"cannot be imported here ({error})"
    return tuple(sorted({*known} - {CANNY, PASSED_THROUGH, RANDOM})), ""


CHECKED_KEPT: Final = 256


class ReadControl(NamedTuple):
    """A ControlNet of one picture in memory, and the control map (H, W, 3) that it reads."""

    network: ControlNetRunner
    pixels: NDArray[np.uint8]


class ControlNetShelf:
    """The ControlNets of ``model``'s folder. Those whose pictures are being painted are kept; of others, ``max_bytes``.

    They stand where the UNet stands and compute as it does; quantized they are not.
    """

    def __init__(self, model: DiffusionModel, max_bytes: int) -> None:
        self.folder = ControlNetFolder(model.profile.controlnet_dir, model.choice.dtype)
        self.model = model
        self.max_bytes = max_bytes
        self._checked: OrderedDict[str, None] = OrderedDict()
        self._alive: WeakValueDictionary[str, ControlNetRunner] = WeakValueDictionary()
        self._kept: OrderedDict[str, ControlNetRunner] = OrderedDict()

    def check(self, controls: Sequence[Control]) -> bytes:
        """A digest of the ControlNets that ``controls`` name, for whatever must not mix them up.

        Raises InvalidRequest for one that is not there, was made for another model or is not whole by its files'
        headers, and for a preprocessor that is not here.
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
                while len(self._checked) > CHECKED_KEPT:
                    self._checked.popitem(last=False)
            digests.append(digest)
        return hashlib.sha256("\n".join(digests).encode()).digest()

    def begin(self, controls: Sequence[Control], pictures: Sequence[Picture]) -> Future[list[ReadControl]]:
        """``controls``, checked, on their way into memory and their ``pictures`` on theirs to control maps, beside
        whatever else is done. One after the other, so that none is read twice.
        """
        return self._reader.submit(
            lambda: [
                ReadControl(self._found(control.name), preprocess(control, picture.array))
                for control, picture in zip(controls, pictures, strict=True)
            ]
        )

    def take(self, name: str) -> ControlNetRunner:
        """The ControlNet ``name``, read now unless it is in memory. Raises InvalidRequest."""
        found = self._found(name)
        self.keep(found)
        return found

    def keep(self, found: ControlNetRunner) -> None:
        """It is being used, so it is among the last to go."""
        self._kept[found.digest] = found
        self._kept.move_to_end(found.digest)
        num_bytes = sum(one.num_bytes for one in self._kept.values())
        while num_bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes

    def of_digest(self, digest: str) -> ControlNetRunner:
        """One that is in memory. Raises KeyError where it is not any more."""
        return self._alive[digest]

    @property
    def planned_bytes(self) -> int:
        """Memory that is to be left for weights: of all ControlNets of the folder, but not more than are kept."""
        total = 0
        for directory in self.folder.usable().values():
            try:
                total += self._bytes(self._opened(directory))
            except ModelLoadError:
                continue  # whoever asks for it is told
        return min(total, self.max_bytes)

    @cached_property
    def _reader(self) -> ThreadPoolExecutor:
        return pool_of_threads(1, "controlnets")

    def _found(self, name: str) -> ControlNetRunner:
        directory, digest = self._stamped(name)
        found = self._alive.get(digest)
        if found is None:
            found = self._alive[digest] = self._read(name, directory, digest)
        return found

    def _read(self, name: str, directory: Path, digest: str) -> ControlNetRunner:
        choice = self.model.choice
        try:
            files = self._opened(directory)
            need, free = self._bytes(files), free_bytes(self.model.device)
            if free is not None and need > free and choice.offload == "none":
                said = f"it takes {need >> 20} MiB of memory, there are {free >> 20}"
                raise ModelLoadError(said)
            network = files.load(self.model.unet.network, self.model.vae.factor, choice)
            store_as(network, self.model.unet.memory_format)
        except ModelLoadError as error:
            raise self._refused(name, directory, error) from None
        return ControlNetRunner(name, digest, network, device=choice.device, dtype=self.model.dtype)

    def _stamped(self, name: str) -> tuple[Path, str]:
        """Where it lies, and a digest of its files' names, sizes and times: of other files it is another."""
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
        return files.num_parameters * self.model.dtype.itemsize

    def _refused(self, name: str, directory: Path, error: ModelLoadError) -> InvalidRequest:
        """In the words of ``error``, without the place where the folder lies."""
        said = error.message.replace(f"{directory}/", "").replace(str(directory), directory.name).rstrip(".")
        return InvalidRequest(f"ControlNet {name!r} cannot be used with {self.model.model_id}: {said}.", param=PARAM)
