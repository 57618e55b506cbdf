"""The ControlNets of a folder in memory: read when they are asked for, the longest unused forgotten."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.api.types import Picture
from diffserve.models.controlnets import PARAM, Control, ControlNetFolder
from diffserve.runtime.loading.controlnet import ControlNetFiles
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.preprocessors import check_preprocessor, preprocess
from diffserve.runtime.threads import pool_of_threads
from diffserve.runtime.unet.controlnet import ControlNetRunner
from diffserve.runtime.unet.memory_format import store_as

CHECKED_KEPT: Final = 256


class ReadControl(NamedTuple):
    """A ControlNet of one picture in memory, and the control map (H, W, 3) that it reads."""

    network: ControlNetRunner
    pixels: NDArray[np.uint8]


class ControlNetShelf:
    """The ControlNets of ``model``'s folder. Those whose pictures are being painted are kept; of others, ``max_bytes``.

    They stand where the UNet stands and compute as it does; quantised they are not.
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
