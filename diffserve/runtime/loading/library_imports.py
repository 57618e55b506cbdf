"""Start sooner: diffusers and transformers without what painting never asks of them. About half the time of a start.

Importing one UNet class brings in torch's compiler, its distributed tensors, torchao and scipy, only so that decorators
and optional branches have something to refer to. While the two libraries are imported, these are said to be absent or
are stood in for; afterwards everything is as it was, and whoever asks for the real ones gets them.

What the libraries found absent they keep for absent: so this is for the processes of our own commands, never for a
program that imports diffserve beside other users of them.

And without the noise they make about kernels and formats nobody asked for: diffusers imports torchao when it is
installed; torchao then reports GPU kernels that it could not load, and registers two enums in a way that torch calls
deprecated. None of it concerns int8 weights. Only these loggers are turned down, and only while the import runs: their
later messages are heard.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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
"""Packages whose ``__init__`` imports dozens of networks; of these only the modules that are used are imported."""

WANTED: Final = (
    ("transformers", "CLIPTextModel"),
    ("transformers", "CLIPTextModelWithProjection"),
    ("diffusers", "UNet2DConditionModel"),
    ("diffusers", "AutoencoderKL"),
)
COMPILER: Final = "torch._dynamo"
TRACING: Final = f"{COMPILER}._trace_wrapped_higher_order_op"

REPORTING: Final = "openvino.tools.ovc"
"""It converts models, and tells Google Analytics of every import and use (seen in 2026.4)."""

STRUCTURE: Final = "import_structure"
"""The kind of cache entry that holds which module of transformers has which classes."""

log = logging.getLogger(__name__)

_was_lean = False


@contextmanager
def hushed(*names: str) -> Iterator[None]:
    """Let the loggers called ``names`` say errors only, until the block ends."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def import_quietly(module: str, name: str) -> Any:
    """Attribute ``name`` of ``module``, imported now if it has not been."""
    if name in (there := vars(sys.modules.get(module) or object)):
        return there[name]
    with hushed(*NOISY_LOGGERS):  # which has every logger of the process ask anew what it may say
        return getattr(import_module(module), name)


def import_openvino() -> Any:
    """The library, without the part of it that reports each import to its makers. ImportError where it is not there."""
    if "openvino" not in sys.modules:
        sys.modules[REPORTING] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if sys.modules.get(REPORTING, ...) is None:
            del sys.modules[REPORTING]


def import_lean(cache: DiskCache | None = None) -> bool:
    """Import what image generation needs of both libraries, and return whether that was done leanly.

    Nothing is done where one of them is there already. Where that fails, they are imported whole, later.

    Args:
        cache: Keeps which module of transformers has which classes; the user's cache folder where it is left out.
    """
    if any(name in sys.modules for name in (*LIBRARIES, COMPILER)):
        return False
    with _uncollected():
        return _import_lean(cache or DiskCache.at(AUTO))


def _import_lean(cache: DiskCache) -> bool:
    import torch  # noqa: F401  # it comes whole

    before = set(sys.modules)
    try:
        with _standing_in(), one_scan(cache):
            import transformers.models  # noqa: F401

            with lazy_distributions():
                import diffusers  # noqa: F401
            with partly(*PARTLY):
                for module, name in WANTED:
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
    """What is made in the block stays for good: it is not looked through for garbage, neither meanwhile nor later."""
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
    """Have transformers find its classes without reading its 3 300 files twice, or at all where ``cache`` has them.

    Transformers does so while it is imported, and again while its processors are, so the module that reads the files is
    imported first, on its own.
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
    found = _structure_in(cache.read(STRUCTURE, key))

    def find(module_path: Any, prefix: str | None = None) -> Any:
        nonlocal found
        path = Path(module_path)
        if path not in (models, models / "__init__.py"):
            return scan(module_path, prefix)
        if found is None:
            found = scan(models, prefix=None)
            cache.write(STRUCTURE, key, [[sorted(backends), _listed(names)] for backends, names in found.items()])
        start = f"{prefix}." if prefix else ""
        return {
            backends: {f"{start}{module}": set(names) for module, names in modules.items()}
            for backends, modules in found.items()
        }

    import_utils.define_import_structure = find
    try:
        yield
    finally:
        import_utils.define_import_structure = scan
    vars(sys.modules["transformers"])["utils"] = sys.modules["transformers.utils"]


def _listed(modules: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    return {module: sorted(names) for module, names in modules.items()}


def _structure_in(entry: Any) -> dict[frozenset[str], Mapping[str, Iterable[str]]] | None:
    """Return what the cache has of transformers' classes; ``None`` where it has nothing."""
    return None if entry is None else {frozenset(backends): modules for backends, modules in entry}


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
    """Have a library that asks for the distributions of all packages look up those that it uses."""
    whole = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions()
    try:
        yield
    finally:
        metadata.packages_distributions = whole


@contextmanager
def partly(*packages: str) -> Iterator[None]:
    """Have the modules of ``packages`` be imported without the ``__init__`` of these, which runs when it is needed."""
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
    """For the length of the block torch's compiler is stood in for, where the imports were lean and it is not there.

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
    """torch's context manager of this name, fetched when somebody enters it."""

    def __new__(cls) -> Any:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        return TransformGetItemToIndex()


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that does nothing."""
    return _unchanged if function is None else function


def _compiler() -> ModuleType:
    compiler = ModuleType(COMPILER)
    for name in ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address"):
        setattr(compiler, name, _unchanged)
    compiler.__path__ = []
    return compiler


@contextmanager
def _standing_in() -> Iterator[None]:
    """``HIDDEN`` cannot be found, the compiler is a stand-in, and torch has no distributed part, until the end."""
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
