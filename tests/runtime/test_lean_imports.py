"""Commands import their libraries leanly, paint the same bytes, and leave everything as it was for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffserve.runtime.loading import library_imports

UNUSED = (
    *("torch._dynamo", "torch.distributed.tensor", "torchao", "scipy", "peft", "httpx"),
    *("diffusers.models.unets.unet_1d", "diffusers.models.transformers.transformer_flux"),
)
PAINT = f"""
import sys
def paint(*arguments):
    command = ["generate", "a fox", "--model", "embedded-turbo", "--steps", "1", "--seed", "1", "-o", *arguments]
    sys.argv = ["diffserve", *command]
    from diffserve.cli import main
    try:
        main() if is_own else main(command)
    except SystemExit as stop:
        assert stop.code == 0, stop.code
    print("unused:", [name for name in {UNUSED} if name in sys.modules])
"""
LEAN = """
is_own, (lean, int8) = True, sys.argv[1:]
paint(lean)
paint(int8, "--dtype", "int8")
import torch, torchao
assert torch._dynamo.__file__ and torch.distributed.is_available()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
from transformers import models
from transformers.utils import import_utils
scanned = import_utils._LazyModule("again", models.__file__, import_utils.define_import_structure(models.__file__))
assert scanned._class_to_module == models._class_to_module
classes = [{name: sorted(names) for name, names in each._import_structure.items()} for each in (scanned, models)]
assert classes[0] == classes[1]
assert len(models._class_to_module) > 1000
import diffusers
assert diffusers.FluxTransformer2DModel and diffusers.UNet1DModel and diffusers.AutoencoderTiny
from diffusers.models.unets import UNet2DConditionModel
assert UNet2DConditionModel is diffusers.UNet2DConditionModel
assert sys.modules["diffusers.models.unets"].__file__
"""
STRUCTURE_IS_KEPT = """
from diffserve.runtime.loading import library_imports
assert library_imports.import_lean()
from transformers.utils import import_utils
assert import_utils.create_import_structure_from_path.cache_info().misses < 10, "but for the folders of a few models"
from transformers import CLIPTextModel, LlamaForCausalLM, T5EncoderModel
"""
WHOLE = """
from diffserve.runtime.loading import library_imports
wanted = library_imports.IMPORTED_CLASSES
library_imports.IMPORTED_CLASSES = (*wanted[:1], ("transformers", "NoSuchModel"))
assert not library_imports.import_lean()
assert not [name for name in sys.modules if name.partition(".")[0] in library_imports.LIBRARIES]
library_imports.IMPORTED_CLASSES = wanted
is_own = False
paint(sys.argv[1])
import torch
from transformers import CLIPTextModel
print(CLIPTextModel.__name__, torch._dynamo.__name__, torch.distributed.is_available())
"""


def output_of(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def unused(output: str) -> list[str]:
    """Return the modules of ``UNUSED`` that were loaded after each image."""
    return [line.removeprefix("unused: ") for line in output.splitlines() if line.startswith("unused: ")]


@pytest.mark.slow
def test_command_imports_nothing_unused_and_paints_the_same_bytes(tmp_path: Path) -> None:
    """A lean process can still import the hidden modules, and all classes of transformers keep their place.

    Processes other than the command's, and libraries that do not support it, are left unchanged.
    """
    lean, full_path = tmp_path / "lean.png", tmp_path / "whole.png"
    assert unused(output_of(PAINT + LEAN, lean, tmp_path / "int8.png")) == ["[]", "[]"]
    output = output_of(PAINT + WHOLE, full_path)
    assert "torch._dynamo" in unused(output)[0]
    assert output.splitlines()[-1] == "CLIPTextModel torch._dynamo True"
    assert lean.read_bytes() == full_path.read_bytes()


def test_a_second_start_does_not_read_all_files_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output_of("from diffserve.runtime.loading import library_imports as lean; assert lean.import_lean()")
    output_of(STRUCTURE_IS_KEPT)


TORCHVISION = """
import importlib.util, sys
from diffserve.runtime.loading import library_imports
assert importlib.util.find_spec("torchvision")
assert library_imports.import_lean()
assert "torchvision" not in sys.modules and "torch._dynamo" not in sys.modules
import torchvision
"""


def test_libraries_are_imported_leanly_where_torchvision_is_installed(tmp_path: Path) -> None:
    """The real torchvision imports torch's compiler, for which a stand-in is in place while the libraries load."""
    package, metadata = tmp_path / "torchvision", tmp_path / "torchvision-0.26.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("from torch._dynamo.utils import is_compile_supported\n")
    (package / "io.py").write_text("ImageReadMode = decode_image = None\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.26.0\n")
    output_of(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TORCHVISION}")


def test_process_with_the_libraries_in_it_is_left_alone() -> None:
    import diffusers

    before = dict(sys.modules)
    assert diffusers.__name__ in before
    assert not library_imports.import_lean()
    assert all(sys.modules.get(name) is before[name] for name in (*UNUSED, "diffusers") if name in before)
