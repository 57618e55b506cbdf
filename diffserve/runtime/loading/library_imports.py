"""Faster imports of diffusers and transformers, and imports without log noise; saves about half of the start time.

Importing a UNet class imports torch's compiler, its distributed tensors, torchao and scipy, which inference does not
need. During the import these are hidden or replaced by stand-ins. The libraries remember what was absent, so this is
only for diffserve's own processes, never for programs that import diffserve as a library.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from diffserve.disk_cache import AUTO, DiskCache

NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")
HIDDEN: Final = ("torchao", "scipy", "sklearn", "torchvision", "peft")
LIBRARIES: Final = ("diffusers", "transformers")
PARTLY: Final = ("diffusers.models.transformers", "diffusers.models.autoencoders", "diffusers.models.unets")
"""Packages whose ``__init__`` imports dozens of networks; only the used modules are imported."""

IMPORTED_CLASSES: Final = (
    ("transformers", "CLIPTextModel"),
    ("transformers", "CLIPTextModelWithProjection"),
    ("diffusers", "UNet2DConditionModel"),
    ("diffusers", "AutoencoderKL"),
)
COMPILER: Final = "torch._dynamo"
TRACING: Final = f"{COMPILER}._trace_wrapped_higher_order_op"

REPORTING: Final = "openvino.tools.ovc"
"""OpenVINO's model converter, which reports every import and use to Google Analytics (2026.4)."""

STRUCTURE: Final = "import_structure"
"""Kind of the cache entry that maps modules of transformers to their classes."""

log = logging.getLogger(__name__)

_was_lean = False


@contextmanager
def hushed(*names: str) -> Iterator[None]:
    """Silence all but errors of the loggers called ``names`` until the block ends."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def hushed_loading() -> Iterator[None]:
    """Hide the progress bars and all but errors of transformers' ``from_pretrained`` until the block ends."""
    control = import_quietly("transformers.utils", "logging")
    was_shown = control.is_progress_bar_enabled()
    control.disable_progress_bar()
    try:
        with hushed("transformers", "accelerate.big_modeling"):
            yield
    finally:
        if was_shown:
            control.enable_progress_bar()


def import_quietly(module: str, name: str) -> Any:
    """Return attribute ``name`` of ``module``, importing it if needed."""
    if name in (there := vars(sys.modules.get(module) or object)):
        return there[name]
    with hushed(*NOISY_LOGGERS):  # setting levels clears the caches of all loggers
        return getattr(import_module(module), name)


def import_openvino() -> Any:
    """Import OpenVINO without the part that reports each import. Raises ImportError if it is not installed."""
    if "openvino" not in sys.modules:
        sys.modules[REPORTING] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if sys.modules.get(REPORTING, ...) is None:
            del sys.modules[REPORTING]


def import_lean(cache: DiskCache | None = None) -> bool:
    """Import what image generation needs of both libraries, and return whether the lean import succeeded.

    Nothing happens if one of them is imported already. After a failure they are imported completely, later.

    Args:
        cache: Stores which module of transformers has which classes; by default the user's cache folder.
    """
    if any(name in sys.modules for name in (*LIBRARIES, COMPILER)):
        return False
    with _uncollected():
        return _import_lean(cache or DiskCache.at(AUTO))


def _import_lean(cache: DiskCache) -> bool:
    import torch  # noqa: F401  # before the stand-ins

    before = set(sys.modules)
    try:
        with _standing_in(), one_scan(cache):
            import transformers.models  # noqa: F401

            with lazy_distributions():
                import diffusers  # noqa: F401
            with partly(*PARTLY):
                for module, name in IMPORTED_CLASSES:
                    getattr(__import__(module), name)
    except Exception as error:
        for module in set(sys.modules) - before:
            if module.partition(".")[0] in LIBRARIES:
                del sys.modules[module]
        log.info("the libraries are imported whole: %s: %s", type(error).__name__, error)
        return False
    global _was_lean
    _was_lean = True
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Exclude the objects created in the block from garbage collection, now and later."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def one_scan(cache: DiskCache | None = None) -> Iterator[None]:
    """Make transformers find its classes with one scan of its 3,300 files, or none if ``cache`` has the result.

    Transformers scans while it is imported, and again for its processors, so the module that does it is imported first.
    """
    cache = cache or DiskCache(None)
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    package = sys.modules["transformers"] = ModuleType("transformers")
    package.__path__, package.__version__ = [str(root)], metadata.version("transformers")  # type: ignore[attr-defined]
    try:
        import_utils: Any = import_module("transformers.utils.import_utils")
    finally:
        del sys.modules["transformers"]
    scan, models = import_utils.define_import_structure, root / "models"
    key = f"transformers {package.__version__} {models} {models.stat().st_mtime_ns}"
    stored = cache.read(STRUCTURE, key)
    structure = None if stored is None else {frozenset(backends): modules for backends, modules in stored}

    def find(module_path: Any, prefix: str | None = None) -> Any:
        nonlocal structure
        path = Path(module_path)
        if path not in (models, models / "__init__.py"):
            return scan(module_path, prefix)
        if structure is None:
            structure = scan(models, prefix=None)
            listed = [
                [sorted(backends), {module: sorted(names) for module, names in modules.items()}]
                for backends, modules in structure.items()
            ]
            cache.write(STRUCTURE, key, listed)
        start = f"{prefix}." if prefix else ""
        return {
            backends: {f"{start}{module}": set(names) for module, names in modules.items()}
            for backends, modules in structure.items()
        }

    import_utils.define_import_structure = find
    try:
        yield
    finally:
        import_utils.define_import_structure = scan
    vars(sys.modules["transformers"])["utils"] = sys.modules["transformers.utils"]


class _Distributions(Mapping[str, list[str]]):
    """``importlib.metadata.packages_distributions()``, which reads the files of all distributions, only where needed.

    Most packages are distributed under their own name.
    """

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return metadata.packages_distributions()

    def __getitem__(self, package: str) -> list[str]:
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            return self._all[package]
        return [package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        return True


@contextmanager
def lazy_distributions() -> Iterator[None]:
    """Replace ``packages_distributions``, which reads all distributions, by a mapping that looks up single packages."""
    original = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions()
    try:
        yield
    finally:
        metadata.packages_distributions = original


@contextmanager
def partly(*packages: str) -> Iterator[None]:
    """Import modules of ``packages`` in the block without running the ``__init__`` of these packages."""
    stand_ins = {}
    for name in packages:
        spec = find_spec(name)
        if spec is not None and name not in sys.modules:
            stand_ins[name] = package = ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, package in stand_ins.items():
            parent, _, attribute = name.rpartition(".")
            if sys.modules.get(name) is package:
                del sys.modules[name]
            if vars(sys.modules.get(parent) or object).get(attribute) is package:
                delattr(sys.modules[parent], attribute)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replace torch's compiler by a stand-in during the block, if the imports were lean and it is not loaded.

    A model that is built on the meta device runs torch's reference functions, and the first of them imports it.
    """
    import torch

    if not _was_lean or COMPILER in sys.modules:
        yield
        return
    compiler = _compiler()
    sys.modules[COMPILER] = torch._dynamo = compiler
    try:
        yield
    finally:
        if sys.modules.get(COMPILER) is compiler:
            del sys.modules[COMPILER], torch._dynamo


class _TransformGetItemToIndex:
    """torch's context manager of this name, imported on first use."""

    def __new__(cls) -> Any:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        return TransformGetItemToIndex()


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return ``function``: a decorator, with or without arguments, that does nothing."""
    return _unchanged if function is None else function


def _compiler() -> ModuleType:
    compiler = ModuleType(COMPILER)
    for name in ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address"):
        setattr(compiler, name, _unchanged)
    compiler.__path__ = []
    return compiler


@contextmanager
def _standing_in() -> Iterator[None]:
    """Hide ``HIDDEN``, the compiler and torch's distributed part in the block."""
    import torch

    compiler, tracing = _compiler(), ModuleType(TRACING)
    tracing.TransformGetItemToIndex = _TransformGetItemToIndex  # type: ignore[attr-defined]
    stand_ins: dict[str, Any] = {COMPILER: compiler, TRACING: tracing}
    stand_ins |= {name: None for name in HIDDEN if name not in sys.modules}
    disable, is_available = torch.compiler.disable, torch.distributed.is_available
    sys.modules.update(stand_ins)
    torch._dynamo = compiler
    torch.compiler.disable = _unchanged  # type: ignore[assignment]
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.compiler.disable, torch.distributed.is_available = disable, is_available
        del torch._dynamo
        for name in stand_ins:
            if sys.modules.get(name) is stand_ins[name]:
                del sys.modules[name]
