"""Search for configuration and weight files of models, and below folders of adapters, without reading tensors.

Pickle files are refused by suffix, because reading one can run code.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, Final

from diffserve.api.bounds import check_chars, is_relative_name
from diffserve.api.errors import InvalidRequest, ModelLoadError

DIFFUSERS_STEM: Final = "diffusion_pytorch_model"
TRANSFORMERS_STEM: Final = "model"
PICKLE_SUFFIXES: Final = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
VARIANT_OF_DTYPE: Final = {"float16": "fp16", "bfloat16": "bf16"}
VARIANTS: Final = ("", "fp16", "bf16", "non_ema")
"""Variants of weights in order of preference; others come last."""

KNOWN_CONDITIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "addition_embed_type": (None, "text_time"),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None,),
    "addition_embed_type_num_heads": (64, None),
    "class_embeddings_concat": (False, None),
    "dual_cross_attention": (False, None),
}
"""Supported values of configuration keys for conditions other than text, of a UNet or ControlNet."""

CONVERT: Final = (
    "import sys, torch; from safetensors.torch import save_file; "
    "d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "d = next((d[k] for k in ('state_dict', 'params_ema', 'params') if k in d), d); "
    "save_file({k: v.clone().contiguous() for k, v in d.items() if isinstance(v, torch.Tensor)}, sys.argv[2])"
)
"""Python program that converts a pickle file of weights to safetensors without running code in the file."""

logger = logging.getLogger(__name__)


def model_path(name: str | Path) -> Path:
    """Return the folder or file of the model ``name``.

    ``~`` is expanded. A folder in the cache of the hub (``models--owner--name``) is replaced by its snapshot: the one
    that ``refs/main`` names, or else the newest.
    """
    path = Path(name).expanduser()
    snapshots = path / "snapshots"
    if (path / "model_index.json").is_file() or not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
    folders = [folder for folder in snapshots.iterdir() if folder.is_dir()]
    return next((folder for folder in folders if folder.name == commit), max(folders, key=_modified_s, default=path))


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime


def refuse_pickle(file: Path) -> None:
    """Refuse a pickle file, because reading it can run code.

    Raises:
        ModelLoadError: ``file`` has the suffix of a pickle file. The message contains a command that converts it.
    """
    if file.suffix in PICKLE_SUFFIXES:
        converted = file.with_name("model" if file.stem == "pytorch_model" else file.stem).with_suffix(".safetensors")
        raise ModelLoadError(
            f"{file} is a pickle file, which can run code when it is read; diffserve loads safetensors only. "
            "Get the model's .safetensors files, or convert this one on a machine that you can lose: "
            f"{pickle_command(file, name=converted.name)}"
        )


def pickle_command(file: Path, program: str = CONVERT, name: str = "") -> str:
    """Return the shell command that converts the pickle ``file`` to safetensors.

    Args:
        file: The file, of which the command has the name only.
        program: Python program that takes both names.
        name: Name of the new file; "": that of ``file`` with another suffix.
    """
    return f'python -c "{program}" {quote(file.name)} {quote(name or file.with_suffix(".safetensors").name)}'


def find_weights(directory: Path, stem: str, *, dtype: str) -> list[Path]:
    """Find the safetensors files of a component, which may be a variant (fp16, bf16, non_ema, ...) and sharded.

    The variant of ``dtype`` is preferred, then the file without variant. A choice between several files is logged.

    Raises:
        ModelLoadError: There is no safetensors file, or only a pickle file.
    """
    files, choice = choose_weights(directory, stem, dtype=dtype)
    if choice:
        logger.info("%s", choice)
    return files


def choose_weights(directory: Path, stem: str, *, dtype: str) -> tuple[list[Path], str]:
    """Find weights as :func:`find_weights` does, without logging.

    Returns:
        The files, and a sentence about the choice between several variants, "" if there was none.
    """
    variants = _variants(directory, stem)
    if not variants:
        for suffix in PICKLE_SUFFIXES:
            for pickle in sorted(directory.glob(f"*{suffix}")):
                refuse_pickle(pickle)
        plain = directory / f"{stem}.safetensors"
        raise ModelLoadError(f"{plain} is missing; a diffusers directory holds {stem}.safetensors there.")
    order = dict.fromkeys([VARIANT_OF_DTYPE.get(dtype, ""), *VARIANTS])
    choice = next((name for name in order if name in variants), min(variants))
    file = variants[choice]
    unused = ", ".join(variants[name].name for name in sorted(variants) if name != choice)
    sentence = f"of {directory} {file.name} is read" + (f", and not {unused}" if unused else "")
    files = _shards(file) if file.suffix == ".json" else [file]
    return files, "" if set(variants) == {""} else sentence


def _variants(directory: Path, stem: str) -> dict[str, Path]:
    """Return the file or shard index of each variant ("" for none), in the naming of any release of diffusers."""
    word = r"(?:\.(\w+))?"
    weights = re.compile(rf"{re.escape(stem)}{word}\.safetensors")
    index = re.compile(rf"{re.escape(stem)}{word}\.safetensors{word}\.index{word}\.json")
    variants: dict[str, Path] = {}
    for pattern in (index, weights):  # a single file takes precedence over shards
        for file in sorted(directory.glob(f"{stem}*")):
            match = pattern.fullmatch(file.name)
            if match and file.is_file():
                variants["".join(filter(None, match.groups()))] = file
    return variants


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{index} has no weight_map from tensor names to file names.")
    files = []
    for name in dict.fromkeys(names.values()):
        file = index.parent / name
        if Path(name).name != name:
            raise ModelLoadError(f"{index} points at {name!r}; shards lie in the directory of their index.")
        refuse_pickle(file)
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing; {index.name} names it.")
        files.append(file)
    return files


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in ``file``.

    Raises:
        ModelLoadError: The file is missing, cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelLoadError(f"{file} is missing or cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} should hold a JSON object, not {type(content).__name__}.")
    return content


MAX_DEPTH: Final = 8
MAX_NAME_CHARS: Final = 200
MAX_NAMES_IN_ERROR: Final = 12
"""Maximum number of names that an error lists."""


def find_below(folder: Path, is_match: Callable[[Path], bool]) -> dict[str, Path]:
    """Find matching files and directories in ``folder`` and its subfolders, including symbolic links.

    Hidden and unreadable entries are skipped, and pipes and devices, since opening one may wait without end.
    Matching directories are not searched.

    Returns:
        The path of each match by its relative path below ``folder``, with slashes, sorted.
    """
    matches: dict[str, Path] = {}
    _search(folder, "", is_match, set(), matches)
    return dict(sorted(matches.items()))


def _search(
    folder: Path, prefix: str, is_match: Callable[[Path], bool], visited: set[tuple[int, int]], matches: dict[str, Path]
) -> None:
    try:
        status = folder.stat()
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return
    if (status.st_dev, status.st_ino) in visited or prefix.count("/") > MAX_DEPTH:
        return
    visited.add((status.st_dev, status.st_ino))
    for name in names:
        path = folder / name
        if path.exists() and not (path.is_file() or path.is_dir()):
            continue
        if is_match(path):
            matches[f"{prefix}{name}"] = path
        elif os.path.isdir(path):
            _search(path, f"{prefix}{name}/", is_match, visited, matches)


def names_for(name: str, names: Iterable[str]) -> list[str]:
    """Return ``name`` if it is one of ``names``, else all of ``names`` whose last part is ``name``."""
    candidates = list(names)
    return [name] if name in candidates else [path for path in candidates if path.rpartition("/")[2] == name]


def resolve_name(
    name: str, usable: Sequence[str], names: Iterable[str], what: str, kind: str = "", field: str = ""
) -> str:
    """Return the full name of the adapter that a request calls ``name``.

    Args:
        name: A full name, or its last part.
        usable: Names of the adapters that can be used; they take precedence.
        names: Names of all adapters.
        what: Kind of the adapter: "LoRA", "ControlNet", "IP-Adapter" or "upscaler".
        kind: Its name in options and codes; "": ``what`` in small letters.
        field: Field of the request; "": the plural of ``kind``.

    Raises:
        InvalidRequest: There is no such adapter, or there are several.
    """
    matches = names_for(name, usable) or names_for(name, names)
    if len(matches) == 1:
        return matches[0]
    kind = kind or what.lower()
    if matches:
        listed = ", ".join(matches[:MAX_NAMES_IN_ERROR])
        message = f"there are several {what}s called {name!r}: {listed}; give one of these names."
    else:
        available = ", ".join(usable[:MAX_NAMES_IN_ERROR]) + ", ..." * (len(usable) > MAX_NAMES_IN_ERROR)
        hint = f"the known ones are {available}." if usable else f"the server has none: start it with --{kind}-dir DIR."
        message = f"there is no {what} {name!r}; {hint}"
    raise InvalidRequest(message, param=field or f"{kind}s", code=f"unknown_{kind}")


def other_family(width: int, text_width: int) -> str:
    """Return why an adapter is for models of another family, as the end of a sentence about it; "" if it may fit.

    Args:
        width: Numbers of a prompt token that the adapter reads; 0: unknown.
        text_width: Numbers of a prompt token of the model; 0: unknown.
    """
    if width == text_width or not width or not text_width:
        return ""
    return f"is for models whose prompt tokens have {width} numbers; those of this model have {text_width}"


def is_valid_name(name: str) -> bool:
    """Return whether a request can contain the name of an adapter."""
    with suppress(InvalidRequest):
        check_chars(name, MAX_NAME_CHARS, "name")
        return is_relative_name(name)
    return False
