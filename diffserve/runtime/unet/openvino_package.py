"""One compiled call by OpenVINO: of a small network in float32 on a CPU, where it knows better kernels than a compiler.

A network is converted once for any number of rows, which takes seconds and no C++ compiler, and then compiled for each
number within one. Its threads take work from each other (oneTBB) where OpenMP's wait for whichever was interrupted: so
there is one number of threads, which is right beside busy neighbours, too.

OpenVINO's frontend is asked directly: ``openvino.convert_model`` tells its makers of each use, and asks nobody. So does
its import, but by ``import_openvino``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, nn

from diffserve.errors import ConfigError
from diffserve.runtime.loading.library_imports import hushed, import_openvino

SUFFIX: Final = ".openvino"
MEMBER: Final = "network.blob"
EXAMPLE_ROWS: Final = 2
MOST_ROWS: Final = 63
"""That are exported; from 64 on diffusers goes another way in its code, with the same numbers."""

EXACT: Final[dict[str, Any]] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": 1,
    "ENABLE_CPU_PINNING": False,  # others live on the machine
}


@lru_cache(maxsize=1)
def openvino_version() -> str | None:
    """Of the library; ``None`` where it is not installed."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return None


class OpenVINOCompiler:
    """Compiles calls of ``network`` for numbers of rows: a ``FlatUNet``, whose arguments are like ``tensors``."""

    def __init__(self, network: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Converts it. Raises what ``torch.export`` and the converter raise, ConfigError where there is no OpenVINO."""
        _core()
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

        rows = torch.export.Dim("rows", min=EXAMPLE_ROWS, max=MOST_ROWS)
        sample, timesteps, *rest = ({0: rows} for _ in tensors)
        shapes = {"sample": sample, "timesteps": timesteps, "rest": tuple(rest)}
        example = tuple(torch.cat([tensor] * EXAMPLE_ROWS)[:EXAMPLE_ROWS].contiguous() for tensor in tensors)
        with torch.no_grad(), warnings.catch_warnings(), hushed("root"):  # of names that torch has dropped since
            warnings.simplefilter("ignore")
            program = torch.export.export(network, example, dynamic_shapes=shapes)
            decoder = TorchFXPythonDecoder.from_exported_program(program)
            frontend = FrontEndManager().load_by_framework("pytorch")
            self._model: Any = frontend.convert(frontend.load(decoder))
        self._shapes = [list(tensor.shape[1:]) for tensor in tensors]
        if len(self._model.inputs) != len(tensors):
            raise RuntimeError("OpenVINO left out arguments of the network")

    def of_rows(self, num_rows: int) -> Any:
        """OpenVINO's model for ``num_rows`` rows, until it is asked for others."""
        ports = zip(self._model.inputs, self._shapes, strict=True)
        self._model.reshape({port: [num_rows, *shape] for port, shape in ports})
        return self._model

    def compile(self, num_rows: int, path: Path) -> None:
        """Write what is called with ``num_rows`` rows to ``path``. OSError of a full disk, RuntimeError."""
        settings = {**EXACT, "INFERENCE_NUM_THREADS": 1}
        made = _core().compile_model(self.of_rows(num_rows), "CPU", settings).export_model()
        with ZipFile(path, "w", ZIP_STORED) as package:
            package.writestr(MEMBER, bytes(made.getbuffer()))


class OpenVINOPackage:
    """One compiled call on ``num_threads`` threads, whose tensors must have the shapes that it was compiled for.

    It takes three times the memory of its weights. One of ``DAMAGE`` (see ``compiled``) where the file at ``path`` is
    damaged or of another machine's making, ConfigError where there is no OpenVINO.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        with ZipFile(BytesIO(path.read_bytes())) as package:
            content = package.read(MEMBER)  # every byte of it is checked
        settings = {**EXACT, "INFERENCE_NUM_THREADS": num_threads}
        try:
            self._network = _core().import_model(content, "CPU", settings)
        except RuntimeError as error:  # it tells nothing of what is wrong, and another is made within a minute
            raise ValueError(str(error).strip().rpartition("\n")[2]) from None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """(R, C, h, w) float32, of a call's ``tensors`` in their order. Python's lock is others' meanwhile."""
        request = self._network.create_infer_request()  # which keeps what it was told for as long as it lives
        request.infer([tensor.contiguous().numpy() for tensor in tensors], share_inputs=True)
        return torch.from_numpy(request.get_output_tensor(0).data.copy())


@lru_cache(maxsize=1)
def _core() -> Any:
    try:
        return import_openvino().Core()
    except ImportError as error:
        way_out = "mend it, or uninstall it: packages are then made without, by a C++ compiler."
        raise ConfigError(
            f"OpenVINO {openvino_version()} does not load ({error}); {way_out}", param="compile"
        ) from None
