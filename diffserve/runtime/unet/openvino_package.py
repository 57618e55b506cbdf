"""OpenVINO packages: compiled UNet calls for small networks on a CPU.

A network is converted once for any number of rows (seconds, no C++ compiler) and then compiled per number of rows.
oneTBB threads balance work, so one thread count suits a loaded machine too. The frontend is called directly, because
``openvino.convert_model`` reports usage to Google Analytics; ``import_openvino`` avoids the report of the import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.api.errors import ConfigError
from diffserve.runtime.loading.library_imports import hushed, import_openvino
from diffserve.runtime.threads import computing_on, patient_threads

SUFFIX: Final = ".openvino"
MEMBER: Final = "network.blob"
EXAMPLE_ROWS: Final = 2
MOST_ROWS: Final = 63
"""Largest exported number of rows. From 64 rows on diffusers takes another code path with the same numbers."""

DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}
"""OpenVINO's names of tensor dtypes."""

BF16_UNITS: Final = ("AVX512-BF16", "AMX")
"""CPU units with which OpenVINO computes in bfloat16; without one it computes in float32."""

MOST_ROOM: Final = 1 << 22
"""Largest size in bytes of a package's input buffers."""

SETTINGS: Final[dict[str, Any]] = {
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": False,  # the machine has other processes
}


def settings_of(dtype: torch.dtype, *, num_threads: int = 1, num_streams: int = 1) -> dict[str, Any]:
    """Return OpenVINO's settings for calls that compute in exactly ``dtype``."""
    precision = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == dtype)
    threads = {"INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": num_streams}
    return {**SETTINGS, **threads, "INFERENCE_PRECISION_HINT": precision}


@lru_cache(maxsize=1)
def openvino_version() -> str | None:
    """Return the version of the installed OpenVINO; ``None`` without one."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return None


class OpenVINOCompiler:
    """Compiles calls of a ``FlatUNet`` for given numbers of rows.

    Args:
        flat: The ``FlatUNet`` of ``network``.
        network: diffusers' UNet.
        tensors: Example arguments; the first has the dtype to compute in.
    """

    def __init__(self, flat: nn.Module, network: Any, tensors: Sequence[Tensor]) -> None:
        """Convert ``flat``.

        Raises:
            ConfigError: OpenVINO is not installed.
            Exception: What ``torch.export`` or the converter raises.
        """
        _core()
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

        tensors = with_embeddings(network, tensors)
        rows = torch.export.Dim("rows", min=EXAMPLE_ROWS, max=MOST_ROWS)
        sample, timesteps, *further = ({0: rows} for _ in tensors)
        shapes = {"sample": sample, "timesteps": timesteps, "tensors": tuple(further)}
        example = tuple(torch.cat([tensor] * EXAMPLE_ROWS)[:EXAMPLE_ROWS].contiguous() for tensor in tensors)
        with torch.no_grad(), exportable(network), warnings.catch_warnings(), hushed("root"):
            warnings.simplefilter("ignore")  # about deprecated names of torch
            program = torch.export.export(flat, example, dynamic_shapes=shapes)
            decoder = TorchFXPythonDecoder.from_exported_program(program)
            frontend = FrontEndManager().load_by_framework("pytorch")
            self._model: Any = frontend.convert(frontend.load(decoder))
        self._dtype = tensors[0].dtype
        self._shapes = [list(tensor.shape[1:]) for tensor in tensors]
        if len(self._model.inputs) != len(tensors):
            raise RuntimeError("OpenVINO left out arguments of the network")

    def of_rows(self, num_rows: int) -> Any:
        """Return OpenVINO's model reshaped to ``num_rows`` rows; the next call reshapes it again."""
        ports = zip(self._model.inputs, self._shapes, strict=True)
        self._model.reshape({port: [num_rows, *shape] for port, shape in ports})
        return self._model

    def compile(self, num_rows: int, path: Path) -> None:
        """Write the package for ``num_rows`` rows to ``path``.

        Raises:
            OSError: The disk is full.
            RuntimeError: OpenVINO cannot compile the model.
        """
        blob = _core().compile_model(self.of_rows(num_rows), "CPU", settings_of(self._dtype)).export_model()
        with ZipFile(path, "w", ZIP_STORED) as package:
            package.writestr(MEMBER, bytes(blob.getbuffer()))


def with_embeddings(network: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a call's ``tensors`` with sinusoidal embeddings of the timesteps (R, dim) and of SDXL's sizes (R, 6 dim).

    In bfloat16 OpenVINO would otherwise round 999 to 1000 before it computes the embedding.
    """
    sample, timesteps, *further = tensors
    if (sizes := getattr(network, "add_time_proj", None)) is not None:
        further[1] = sizes(further[1].flatten()).reshape(len(sample), -1).to(sample.dtype)
    return [sample, network.time_proj(timesteps).to(sample.dtype), *further]


@contextmanager
def exportable(network: Any) -> Iterator[None]:
    """Patch diffusers' ``network`` for export: embeddings become inputs, and norms independent of the thread count."""
    sizes = getattr(network, "add_time_proj", None)
    norms = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    network.get_time_embed = lambda sample, timestep: timestep
    if sizes is not None:
        network.add_time_proj = nn.Identity()
    for norm in norms:
        norm.forward = partial(_normed, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del network.get_time_embed
        if sizes is not None:
            network.add_time_proj = sizes
        for norm in norms:
            del norm.forward


def _normed(norm: nn.GroupNorm, input: Tensor) -> Tensor:
    """Return the group norm of ``input`` (R, C, ...), computed by a layer norm of each group.

    OpenVINO's own group norm sums over threads in an order that depends on their number. In bfloat16 that changes about
    every second row.
    """
    groups = input.reshape(input.shape[0] * norm.num_groups, -1)
    output = F.layer_norm(groups, groups.shape[1:], eps=norm.eps).reshape(input.shape)
    if not norm.affine:
        return output
    like = (-1, *[1] * (input.ndim - 2))
    return output * norm.weight.view(like) + norm.bias.view(like)


class OpenVINOPackage:
    """Compiled calls from a package file, for ``num_streams`` times the rows of the file on ``num_threads`` threads.

    It takes three times the memory of the weights, plus input buffers unless these are large. It runs one call at a
    time.

    Raises:
        Exception: One of ``DAMAGE`` (see ``compiled``): the file is damaged or from another machine.
        ConfigError: OpenVINO cannot be loaded.
    """

    def __init__(self, path: Path, network: Any, dtype: torch.dtype, *, num_threads: int, num_streams: int = 1) -> None:
        self._unet = network
        with ZipFile(BytesIO(path.read_bytes())) as package:
            content = package.read(MEMBER)  # checks the CRC
        settings = settings_of(dtype, num_threads=num_threads, num_streams=num_streams)
        try:
            with patient_threads():  # the stream threads start here
                loaded = _core().import_model(content, "CPU", settings)
        except RuntimeError as error:  # OpenVINO gives no cause; a new package takes less than a minute
            raise ValueError(str(error).strip().rpartition("\n")[2]) from None
        self._loaded, self._num_streams = loaded, num_streams
        self._output = _room(loaded.output(0), num_streams)
        self._inputs = [_room(port, num_streams) for port in loaded.inputs]
        if sum(tensor.nbytes for tensor in self._inputs) > MOST_ROOM:
            self._inputs.clear()  # large inputs, such as LoRA factors, are read in place
        self._requests = self._bound(self._inputs) if self._inputs else []

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (R, C, h, w) for a call's ``tensors`` in their order. The GIL is released meanwhile."""
        with computing_on(1):
            inputs = with_embeddings(self._unet, tensors)
            if self._inputs:
                requests = self._requests
                for buffer, tensor in zip(self._inputs, inputs, strict=True):
                    buffer.copy_(tensor)
            else:
                inputs = [tensor.contiguous() for tensor in inputs]
                requests = self._bound(inputs)
        with ExitStack() as ends:  # wait for every request, even if one fails
            for request in requests:
                request.start_async()
                ends.callback(request.wait)
        with computing_on(1):
            return self._output.clone()

    def _bound(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Return a request for each stream, which reads its share of the rows of ``inputs`` in place."""
        requests = [self._loaded.create_infer_request() for _ in range(self._num_streams)]
        for number, request in enumerate(requests):
            for index, tensor in enumerate(inputs):
                request.set_input_tensor(index, _shared(tensor.chunk(self._num_streams)[number]))
            request.set_output_tensor(0, _shared(self._output.chunk(self._num_streams)[number]))
        return requests


def _room(port: Any, num_streams: int) -> Tensor:
    """Return an empty tensor for the values of all streams at ``port`` of a network."""
    rows, *shape = port.shape
    with torch.inference_mode(False):  # calls may come from outside of inference mode
        return torch.empty(num_streams * rows, *shape, dtype=DTYPES[port.element_type.get_type_name()])


def _shared(tensor: Tensor) -> Any:
    """Return ``tensor`` as an OpenVINO tensor of the same memory."""
    import openvino

    name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
    return openvino.Tensor(bits.numpy(), list(tensor.shape), getattr(openvino.Type, name))


@lru_cache(maxsize=1)
def _core() -> Any:
    try:
        return import_openvino().Core()
    except ImportError as error:
        way_out = "repair or uninstall it; without OpenVINO packages are made by a C++ compiler."
        raise ConfigError(
            f"OpenVINO {openvino_version()} does not load ({error}); {way_out}", param="compile"
        ) from None
