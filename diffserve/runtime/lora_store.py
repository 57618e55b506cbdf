"""LoRA adapters of a model's folders: checked and read on demand, least recently used ones are dropped."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from cachetools import LRUCache
from torch import Tensor, nn

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.models.lora_layers import UNET, WHOLE, LayerChange
from diffserve.models.loras import CheckedLoras, Lora, LoraFolders, lora_problem
from diffserve.runtime.loading.lora import Deltas, LoRAFile
from diffserve.runtime.low_rank import (
    KEYS_VALUES,
    RANKS,
    Factors,
    LoRASet,
    WholeChange,
    adaptable,
    joined,
    norms,
    padded_rank,
    shape_of,
)
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.quantized_layers import weight_in_float32
from diffserve.runtime.threads import pool_of_threads

MAX_CHECKED: Final = 1024
NUM_READERS: Final = 2
"""Number of files read in parallel."""

Stamp = tuple[str, int, int]
"""Version of a file: path, bytes, time of its last change."""


class Header(NamedTuple):
    """Facts from a file's header: the largest rank or ``WHOLE``, trigger words, and words of bundled embeddings."""

    rank: int
    words: str
    bundled_words: tuple[str, ...]


class LoRAStore:
    """Adapters of ``model``'s folders. Used ones stay loaded, and others up to ``max_bytes``."""

    def __init__(self, model: DiffusionModel, max_bytes: int) -> None:
        self.folder = LoraFolders(model.lora_dirs, model.text_width)
        self.model = model
        self.max_bytes = max_bytes
        self._headers: LRUCache[Stamp, Header] = LRUCache(MAX_CHECKED)
        self._alive: WeakValueDictionary[bytes, LoRASet] = WeakValueDictionary()
        self._kept: LRUCache[bytes, LoRASet] = LRUCache(max_bytes, lambda lora_set: lora_set.num_bytes)
        self._file_digests: LRUCache[Stamp, str] = LRUCache(MAX_CHECKED)
        self._digests: LRUCache[bytes, dict[str, str]] = LRUCache(MAX_CHECKED)

    @property
    def num_kept(self) -> int:
        """Number of sets of adapters that are kept, in use or not."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Size of the loaded adapters in bytes."""
        return int(self._kept.currsize)

    def check(self, loras: Sequence[Lora]) -> CheckedLoras:
        """Check ``loras``, at least one, by the headers of their files.

        Raises InvalidRequest for one that does not exist, was made for another model, or has an unsupported form.
        """
        stamped = [(lora, *self._stamped(lora.name)) for lora in loras]
        ranks = []
        for lora, path, stamp in stamped:
            if stamp not in self._headers:
                file = self._opened(lora.name, path)
                self._matched(lora.name, path, file)
                content = file.content
                self._headers[stamp] = Header(content.rank, content.words, content.bundled_words)
            ranks.append(self._headers[stamp].rank)
        padded = WHOLE if WHOLE in ranks else padded_rank(sum(ranks))
        if padded is None:
            message = (
                f"the ranks of these LoRAs are {sum(ranks)} together; at most {RANKS[-1]} are allowed: leave some out."
            )
            raise InvalidRequest(message, param="loras")
        digest = hashlib.sha256("\n".join(f"{stamp} {lora.scales!r}" for lora, _, stamp in stamped).encode()).digest()
        headers = [(lora.name, self._headers[stamp]) for lora, _, stamp in stamped]
        warnings = [self._bundle_warning(name, header) for name, header in headers]
        words = tuple(header.words for _, header in headers)
        return CheckedLoras(padded, digest, words, tuple(filter(None, warnings)))

    def _bundle_warning(self, name: str, header: Header) -> str:
        """Name the embeddings that a LoRA file holds and the model has not; "" without any."""
        words = [word for word in header.bundled_words if word.lower() not in self.model.text.learnt_words]
        if not words:
            return ""
        names = ", ".join(repr(word[:40]) for word in words[:4])
        return (
            f"the LoRA {name!r} contains embeddings ({names}), which are not loaded with it; save them as files in the "
            "folder of --embeddings-dir."
        )

    def ranks(self) -> tuple[int, ...]:
        """Return the padded ranks of the usable adapters of the folders, each alone."""
        padded_ranks = set[int]()
        for name in self.folder.names():
            with suppress(InvalidRequest):
                padded_ranks.add(self.check((Lora(name),)).rank)
        return tuple(sorted(padded_ranks - {WHOLE}))

    def begin(self, loras: Sequence[Lora], digest: bytes) -> Future[LoRASet]:
        """Read ``loras``, checked and of this ``digest``, in a background thread."""
        future: Future[LoRASet] = Future()
        lora_set = self._alive.get(digest)
        if lora_set is not None:
            future.set_result(lora_set)
            return future
        try:
            return self._readers.submit(self._read, loras, self.check(loras))
        except InvalidRequest as error:  # the file was removed after the check
            future.set_exception(error)
            return future

    def take(self, loras: Sequence[Lora], reading: Future[LoRASet] | None = None) -> LoRASet:
        """Return the set of ``loras``, from memory, from the future ``reading``, or read now.

        Raises InvalidRequest as ``check`` does.
        """
        checked = self.check(loras)
        lora_set = self._alive.get(checked.digest)
        if lora_set is None:
            lora_set = reading.result() if reading is not None else self._read(loras, checked)
            self._alive[checked.digest] = lora_set
        if lora_set.num_bytes <= self.max_bytes:
            self._kept[checked.digest] = lora_set
        return lora_set

    def digests(self, digest: bytes) -> dict[str, str]:
        """Return the digests by name of the adapters of the set ``digest``.

        They are the SHA-256 of the files without the header, which some tools change later.
        """
        return self._digests.get(digest, {})

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return pool_of_threads(NUM_READERS, "loras")

    @cached_property
    def _networks(self) -> dict[str, dict[str, nn.Module]]:
        """Layers that adapters may change, by component."""
        encoders = [encoder.network for encoder in self.model.text.encoders]
        networks = dict(zip(("text_encoder", "text_encoder_2"), encoders, strict=False))
        networks[UNET] = self.model.unet.network
        return {component: adaptable(network) | norms(network) for component, network in networks.items()}

    def _stamped(self, name: str) -> tuple[Path, Stamp]:
        path = self.folder.find(name)
        try:
            status = path.stat()
        except OSError:
            raise _unusable(name, path) from None
        return path, (str(path), status.st_size, status.st_mtime_ns)

    def _opened(self, name: str, path: Path) -> LoRAFile:
        if lora_problem(path):
            raise _unusable(name, path)
        try:
            return LoRAFile.open([path])
        except ModelLoadError as error:
            raise _refused(name, path, error) from None

    def _matched(self, name: str, path: Path, file: LoRAFile) -> dict[str, dict[str, LayerChange]]:
        """Return the changes of ``file`` by component and layer."""
        changes = {}
        for component in file.layers:
            if component not in self._networks:
                message = (
                    f"the LoRA {name!r} changes a {component}, which {self.model.model_id} does not have: leave it out."
                )
                raise InvalidRequest(message, param="loras")
            layers = self._networks[component]
            shapes = {name: shape_of(layer) for name, layer in layers.items()}
            biases = {name for name, layer in layers.items() if layer._parameters.get("bias") is not None}
            try:
                changes[component] = file.matched(component, shapes, biases, self.model.model_id)
            except ModelLoadError as error:
                raise _refused(name, path, error) from None
        return changes

    def _read(self, loras: Sequence[Lora], checked: CheckedLoras) -> LoRASet:
        parts = defaultdict[nn.Module, list[_Part]](list)
        of_texts, digests = [], dict[str, str]()
        for lora in loras:
            path, stamp = self._stamped(lora.name)
            digests[lora.name] = self._file_digest(path, stamp)
            file = self._opened(lora.name, path)
            for component, matched in self._matched(lora.name, path, file).items():
                if component != UNET or any(layer.endswith(KEYS_VALUES) for layer in matched):
                    of_texts.append(f"{stamp} {lora.scales!r}")
                scale = lora.scales[component == UNET]
                for name, change in matched.items():
                    parts[self._networks[component][name]].append(_Part(lora.name, path, file, name, change, scale))
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        layers, whole_changes = dict[nn.Module, Factors](), dict[nn.Module, WholeChange]()
        for layer, changes in parts.items():
            if checked.rank == WHOLE:
                whole_changes[layer] = _summed([part.deltas(layer) for part in changes], like)
            else:
                layers[layer] = joined(layer, [part.factors(layer) for part in changes], checked.rank, like)
        self._digests[checked.digest] = digests
        digest = hashlib.sha256("\n".join(of_texts).encode()).digest() if of_texts else b""
        return LoRASet(checked.rank, layers, digest, whole_changes)

    def _file_digest(self, path: Path, stamp: Stamp) -> str:
        if stamp not in self._file_digests:
            with path.open("rb") as file:
                file.seek(8 + int.from_bytes(file.read(8), "little"))
                self._file_digests[stamp] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._file_digests[stamp]


class _Part(NamedTuple):
    """A file's change of the layer ``name``, and the scale at which it is applied."""

    lora: str
    path: Path
    file: LoRAFile
    name: str
    change: LayerChange
    scale: float

    def factors(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        """Return down and up times the scale, in float32. Raises InvalidRequest."""
        try:
            down, up = self.file.read(self.change, shape_of(layer))
        except ModelLoadError as error:
            raise _refused(self.lora, self.path, error) from None
        self._check_finite(down, up)
        return down, self.scale * up

    def deltas(self, layer: nn.Module) -> Deltas:
        """Return what is added to weight and bias, times the scale, in float32. Raises InvalidRequest.

        The magnitudes of a DoRA apply at full strength, and the scale to the difference that they make, as in LyCORIS,
        A1111's web UI and ComfyUI. So a scale of 0 changes nothing, and 1 is the trained network.
        """
        try:
            deltas = self.file.read_deltas(self.change, shape_of(layer), lambda: self._own_weight(layer))
        except ModelLoadError as error:
            raise _refused(self.lora, self.path, error) from None
        self._check_finite(*deltas)
        return Deltas(*(None if delta is None else self.scale * delta for delta in deltas))

    def _own_weight(self, layer: nn.Module) -> Tensor:
        weight = weight_in_float32(layer)
        if weight is None:
            message = (
                f"the LoRA {self.lora!r} is DoRA, which needs the weights of {self.name}, and these are offloaded or "
                "packed (int8_static): serve the model in another dtype or without offload, or merge it at load."
            )
            raise InvalidRequest(message, param="loras")
        return weight.cpu()

    def _check_finite(self, *tensors: Tensor | None) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None):
            message = f"the LoRA {self.lora!r} has non-finite numbers in {self.name}: leave it out."
            raise InvalidRequest(message, param="loras")


def _summed(deltas: Sequence[Deltas], like: Tensor) -> WholeChange:
    """Return the sum of several changes of one layer, with dtype and device of ``like``."""

    def total(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return sum(present[1:], present[0]).to(like.device, like.dtype) if present else None

    return WholeChange(total([delta.weight for delta in deltas]), total([delta.bias for delta in deltas]))


def _unusable(name: str, path: Path) -> InvalidRequest:
    return InvalidRequest(f"LoRA {name!r} cannot be used: {path.name} {lora_problem(path)}.", param="loras")


def _refused(name: str, path: Path, error: ModelLoadError) -> InvalidRequest:
    """Return ``error`` as an error of the request, without the path of the folder."""
    return InvalidRequest(f"LoRA {name!r} cannot be used: {error.message.replace(str(path), path.name)}", param="loras")
