"""IP-Adapters and image encoders of a model's folder: checked, loaded on demand, and applied to reference images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from cachetools import LRUCache
from msgspec.structs import replace
from torch import Tensor

from diffserve.api.errors import InvalidRequest, ModelLoadError
from diffserve.api.types import Picture
from diffserve.models.references import PARAM, WHAT, ImageEncoder, Reference, ReferenceFolder
from diffserve.runtime.ip_adapter import IPAdapter, LoadedEncoder, encoder_checkpoint, match_layers
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.memory import free_bytes
from diffserve.runtime.model import DiffusionModel
from diffserve.runtime.threads import pool_of_threads

MAX_CHECKED: Final = 256
TOKENS_KEPT: Final = 256
"""Images whose tokens are kept: 0.13 MB each for 16 tokens of 2048 numbers in float32."""


class ReadReference(NamedTuple):
    """A loaded adapter with the tokens (tokens, dim) of one image, and those of unconditional rows.

    Attributes:
        keys: Cache keys of the two.
    """

    adapter: IPAdapter
    cond: Tensor
    uncond: Tensor
    keys: tuple[bytes, bytes]


class CheckedReferences(NamedTuple):
    """References with the full names of their adapters, and a digest of these adapters for cache keys."""

    references: tuple[Reference, ...]
    digest: bytes


class Files(NamedTuple):
    """Files of an adapter and its encoder, with digests of their names, sizes and times."""

    adapter: Path
    encoder: ImageEncoder
    digest: str
    encoder_digest: str


class ReferenceStore:
    """The IP-Adapters of ``model``'s folder with their image encoders; up to ``max_bytes`` are kept.

    They use the UNet's device and dtype, but are not quantized.

    Args:
        model: The model.
        max_bytes: Memory of adapters and encoders that are kept.
        is_paged: Whether keys and values of prompts are kept in pages, which references need.
    """

    def __init__(self, model: DiffusionModel, max_bytes: int, *, is_paged: bool) -> None:
        self.folder = ReferenceFolder(model.profile.reference_dir, model.choice.dtype, model.text_width)
        self.model = model
        self.max_bytes = max_bytes
        self._is_paged = is_paged
        self._checked: LRUCache[str, None] = LRUCache(MAX_CHECKED)
        self._alive: WeakValueDictionary[str, IPAdapter | LoadedEncoder] = WeakValueDictionary()
        self._kept: LRUCache[str, IPAdapter | LoadedEncoder] = LRUCache(max_bytes, lambda part: part.num_bytes)
        self._tokens: LRUCache[bytes, Tensor] = LRUCache(TOKENS_KEPT)
        self._file_digests: LRUCache[str, str] = LRUCache(MAX_CHECKED)
        self._reader = pool_of_threads(1, "references")  # on the number of now; tokens round differently on another

    def check(self, references: Sequence[Reference]) -> CheckedReferences:
        """Check ``references`` by the headers of their files, and return them with full names.

        Raises InvalidRequest for an adapter that does not exist or does not fit the model.
        """
        if not self._is_paged:
            reason = self.model.unet.unpaged_reason or "engine.cross_attention is plain: set it to paged"
            message = f"references cannot be used with {self.model.model_id}: {reason.rstrip('.')}."
            raise InvalidRequest(message, param=PARAM)
        resolved = tuple(
            replace(reference, name=self.folder.full_name(reference.name) if reference.name else self._only_name())
            for reference in references
        )
        digests = [self._check(reference.name).digest for reference in resolved]
        return CheckedReferences(resolved, hashlib.sha256("\n".join(digests).encode()).digest())

    def _check(self, name: str) -> Files:
        files = self._stamped(name)
        if files.digest not in self._checked:
            try:
                match_layers(Checkpoint.open([files.adapter]), self.model.unet.network)
            except ModelLoadError as error:
                raise self._refused(name, files, error) from None
            self._checked[files.digest] = None
        return files

    def _only_name(self) -> str:
        """Return the name of the only adapter that fits the model. Raises InvalidRequest."""
        fitting = []
        for name in self.folder.names():
            try:
                self._check(name)
            except InvalidRequest:
                continue
            fitting.append(name)
        if len(fitting) == 1:
            return fitting[0]
        if not self.folder.path:
            message = "the server has no IP-Adapters for references: start it with --reference-dir DIR."
        elif fitting:
            message = f"a reference names no IP-Adapter, and there are several: {', '.join(fitting[:12])}; name one."
        else:
            message = f"there is no IP-Adapter for {self.model.model_id} in the folder of --reference-dir."
        raise InvalidRequest(message, param=PARAM, code="unknown_reference")

    def begin(self, references: Sequence[Reference], pictures: Sequence[Picture]) -> Future[list[ReadReference]]:
        """Load the adapters of ``references`` and encode ``pictures`` in a background thread, one by one."""
        return self._reader.submit(
            lambda: [self._read(*each) for each in zip(references, pictures, strict=True)]  # one image a call
        )

    def digests(self, references: Iterable[Reference]) -> dict[str, str]:
        """Return the SHA-256 of the files of loaded adapters by name."""
        names = dict.fromkeys(reference.name for reference in references)
        return {name: self._file_digests[name] for name in names if name in self._file_digests}

    @property
    def planned_bytes(self) -> int:
        """Memory to reserve for weights: those of the folder's adapters and their encoders, at most ``max_bytes``."""
        sizes = dict[str, int]()
        for name in self.folder.names():
            try:
                files = self._check(name)
                opened = {
                    files.digest: Checkpoint.open([files.adapter]),
                    files.encoder_digest: encoder_checkpoint(files.encoder, self.model.choice.dtype),
                }
            except (InvalidRequest, ModelLoadError):
                continue  # requests for it are rejected
            sizes |= {digest: checkpoint.num_parameters for digest, checkpoint in opened.items()}
        return min(self.model.dtype.itemsize * sum(sizes.values()), self.max_bytes)

    def _read(self, reference: Reference, picture: Picture) -> ReadReference:
        """Return the loaded adapter and its tokens of ``picture``."""
        files = self._check(reference.name)
        try:
            adapter = self._loaded_adapter(reference.name, files)
            image = hashlib.sha256(b"%dx%d " % (picture.width_px, picture.height_px) + picture.data).digest()
            self._keep(adapter)
            keys = files.digest.encode() + image, files.digest.encode()
            if any(key not in self._tokens for key in keys):
                encoder = self._loaded_encoder(files)
                self._tokens[keys[0]] = encoder.tokens(adapter, picture.array)
                if keys[1] not in self._tokens:
                    self._tokens[keys[1]] = encoder.unconditional(adapter)
                self._keep(encoder)
            return ReadReference(adapter, self._tokens[keys[0]], self._tokens[keys[1]], keys)
        except ModelLoadError as error:
            raise self._refused(reference.name, files, error) from None

    def _loaded_adapter(self, name: str, files: Files) -> IPAdapter:
        adapter = self._alive.get(files.digest)
        if not isinstance(adapter, IPAdapter):
            self._check_free(Checkpoint.open([files.adapter]).num_parameters)
            with files.adapter.open("rb") as file:
                self._file_digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
            adapter = IPAdapter.load(name, files.digest, files.adapter, self.model.unet.network, self.model.choice)
            self._alive[files.digest] = adapter
        return adapter

    def _loaded_encoder(self, files: Files) -> LoadedEncoder:
        encoder = self._alive.get(files.encoder_digest)
        if not isinstance(encoder, LoadedEncoder):
            self._check_free(encoder_checkpoint(files.encoder, self.model.choice.dtype).num_parameters)
            encoder = LoadedEncoder.load(files.encoder_digest, files.encoder, self.model.choice)
            self._alive[files.encoder_digest] = encoder
        return encoder

    def _keep(self, part: IPAdapter | LoadedEncoder) -> None:
        if part.num_bytes <= self.max_bytes:
            self._kept[part.digest] = part

    def _check_free(self, num_parameters: int) -> None:
        """Raise ModelLoadError if weights of ``num_parameters`` do not fit into the free memory."""
        need, free = num_parameters * self.model.dtype.itemsize, free_bytes(self.model.device)
        if free is not None and need > free and self.model.choice.offload == "none":
            raise ModelLoadError(f"it needs {need >> 20} MiB of memory, and {free >> 20} MiB are free")

    def _stamped(self, name: str) -> Files:
        """Return the files of an adapter. Raises InvalidRequest."""
        file, encoder = self.folder.find(name)
        try:
            of_encoder = _digest(path for path in encoder.directory.iterdir() if path.is_file())
            return Files(file, encoder, _digest([file], name, of_encoder), of_encoder)
        except OSError:
            message = f"the {WHAT} {name!r} has just been removed; leave it out."
            raise InvalidRequest(message, param=PARAM) from None

    def _refused(self, name: str, files: Files, error: ModelLoadError) -> InvalidRequest:
        """Return ``error`` as an error of the request, without the path of the folder."""
        problem = error.message.rstrip(".")
        for path in (files.encoder.directory, files.adapter):
            problem = problem.replace(f"{path}/", "").replace(str(path), path.name)
        return InvalidRequest(f"{WHAT} {name!r} cannot be used with {self.model.model_id}: {problem}.", param=PARAM)


def _digest(files: Iterable[Path], *further: str) -> str:
    """Return a digest of the paths, sizes and times of ``files``. Raises OSError."""
    stats = [(file, file.stat()) for file in sorted(files)]
    words = [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in stats]
    return hashlib.sha256("\n".join((*further, *words)).encode()).hexdigest()
