"""One compiled call by OpenVINO: of a small network on a CPU, where it knows better kernels than a compiler.

A network is converted once for any number of rows, which takes seconds and no C++ compiler, and then compiled for each
number within one. A call's rows are shared out over streams, which do not wait for each other after every layer. Its
threads take work from each other (oneTBB) where OpenMP's wait for whichever was interrupted: so there is one number of
threads, which is right beside busy neighbours, too.

OpenVINO's frontend is asked directly: ``openvino.convert_model`` tells its makers of each use, and asks nobody. So does
its import, but by ``import_openvino``.
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
"""That are exported; from 64 on diffusers goes another way in its code, with the same numbers."""

DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Those of tensors by OpenVINO's names."""

BF16_UNITS: Final = ("AVX512-BF16", "AMX")
"""With which it computes in bfloat16; without, in float32."""

MOST_ROOM: Final = 1 << 22
"""Bytes that a package has for what its calls are told."""

SETTINGS: Final[dict[str, Any]] = {
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": False,  # others live on the machine
}


def settings_of(dtype: torch.dtype, *, num_threads: int = 1, num_streams: int = 1) -> dict[str, Any]:
    """What OpenVINO is told of calls that compute in ``dtype``, and not in one that it likes better."""
    precision = next(name for name, known in DTYPES.items() if known == dtype)
    threads = {"INFERENCE_NUM_THREADS": num_threads, "NUM_STREAMS": num_streams}
    return {**SETTINGS, **threads, "INFERENCE_PRECISION_HINT": precision}


@lru_cache(maxsize=1)
def openvino_version() -> str | None:
    """Of the library; ``None`` where it is not installed."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return None


class OpenVINOCompiler:
    """Compiles calls of ``flat`` for numbers of rows: a ``FlatUNet`` of ``network``, whose arguments are like
    ``tensors``, the first of them in the dtype that it computes in.
    """

    def __init__(self, flat: nn.Module, network: Any, tensors: Sequence[Tensor]) -> None:
        """Converts it. Raises what ``torch.export`` and the converter raise, ConfigError where there is no OpenVINO."""
        _core()
        from openvino.frontend import FrontEndManager
        from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

        tensors = in_waves(network, tensors)
        rows = torch.export.Dim("rows", min=EXAMPLE_ROWS, max=MOST_ROWS)
        sample, timesteps, *rest = ({0: rows} for _ in tensors)
        shapes = {"sample": sample, "timesteps": timesteps, "rest": tuple(rest)}
        example = tuple(torch.cat([tensor] * EXAMPLE_ROWS)[:EXAMPLE_ROWS].contiguous() for tensor in tensors)
        with torch.no_grad(), exportable(network), warnings.catch_warnings(), hushed("root"):
            warnings.simplefilter("ignore")  # of names that torch has dropped since
            program = torch.export.export(flat, example, dynamic_shapes=shapes)
            decoder = TorchFXPythonDecoder.from_exported_program(program)
            frontend = FrontEndManager().load_by_framework("pytorch")
            self._model: Any = frontend.convert(frontend.load(decoder))
        self._dtype = tensors[0].dtype
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
        made = _core().compile_model(self.of_rows(num_rows), "CPU", settings_of(self._dtype)).export_model()
        with ZipFile(path, "w", ZIP_STORED) as package:
            package.writestr(MEMBER, bytes(made.getbuffer()))


def in_waves(network: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A call's ``tensors`` with sines and cosines for the timesteps, (R, dim), and for what SDXL is told of sizes,
    (R, 6 dim): OpenVINO would round 999 to 1000 before it takes them, where it computes in bfloat16.
    """
    sample, timesteps, *rest = tensors
    if (sizes := getattr(network, "add_time_proj", None)) is not None:
        rest[1] = sizes(rest[1].flatten()).reshape(len(sample), -1).to(sample.dtype)
    return [sample, network.time_proj(timesteps).to(sample.dtype), *rest]


@contextmanager
def exportable(network: Any) -> Iterator[None]:
    """Diffusers' ``network`` as it is when it is told these, and with norms that round alike on any threads."""
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
    """What ``norm`` gives, (R, C, ...), by a layer norm of each group: OpenVINO sums a group's numbers over its
    threads, in an order that depends on how many there are, which shows in bfloat16 in a row of two.
    """
    groups = input.reshape(input.shape[0] * norm.num_groups, -1)
    output = F.layer_norm(groups, groups.shape[1:], eps=norm.eps).reshape(input.shape)
    if not norm.affine:
        return output
    like = (-1, *[1] * (input.ndim - 2))
    return output * norm.weight.view(like) + norm.bias.view(like)


class OpenVINOPackage:
    """Compiled calls on ``num_threads`` threads of ``num_streams`` times the rows that the file at ``path`` is for.

    It takes three times the memory of its weights, and room for what a call is told, unless that is much. One call at a
    time. One of ``DAMAGE`` (see ``compiled``) where the file is damaged or of another machine's making, ConfigError
    where there is no OpenVINO.
    """

    def __init__(self, path: Path, network: Any, dtype: torch.dtype, *, num_threads: int, num_streams: int = 1) -> None:
        self._unet = network
        with ZipFile(BytesIO(path.read_bytes())) as package:
            content = package.read(MEMBER)  # every byte of it is checked
        settings = settings_of(dtype, num_threads=num_threads, num_streams=num_streams)
        try:
            with patient_threads():  # those of its streams begin here
                loaded = _core().import_model(content, "CPU", settings)
        except RuntimeError as error:  # it tells nothing of what is wrong, and another is made within a minute
            raise ValueError(str(error).strip().rpartition("\n")[2]) from None
        self._loaded, self._num_streams = loaded, num_streams
        self._output = _room(loaded.output(0), num_streams)
        self._inputs = [_room(port, num_streams) for port in loaded.inputs]
        if sum(told.nbytes for told in self._inputs) > MOST_ROOM:
            self._inputs.clear()  # adapters' factors, say, are read where they are
        self._requests = self._bound(self._inputs) if self._inputs else []

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """(R, C, h, w) of a call's ``tensors`` in their order. Python's lock is others' meanwhile."""
        with computing_on(1):
            told = in_waves(self._unet, tensors)
            if self._inputs:
                requests = self._requests
                for own, tensor in zip(self._inputs, told, strict=True):
                    own.copy_(tensor)
            else:
                told = [tensor.contiguous() for tensor in told]
                requests = self._bound(told)
        with ExitStack() as ends:  # each of them is waited for, whichever fails
            for request in requests:
                request.start_async()
                ends.callback(request.wait)
        with computing_on(1):
            return self._output.clone()

    def _bound(self, inputs: Sequence[Tensor]) -> list[Any]:
        """A request for each stream, which reads its share of the rows of ``inputs`` where they are."""
        requests = [self._loaded.create_infer_request() for _ in range(self._num_streams)]
        for number, request in enumerate(requests):
            for place, told in enumerate(inputs):
                request.set_input_tensor(place, _shared(told.chunk(self._num_streams)[number]))
            request.set_output_tensor(0, _shared(self._output.chunk(self._num_streams)[number]))
        return requests


def _room(port: Any, num_streams: int) -> Tensor:
    """For what all streams together are told, or tell, at ``port`` of a network."""
    rows, *shape = port.shape
    with torch.inference_mode(False):  # so that a call may be made outside of it
        return torch.empty(num_streams * rows, *shape, dtype=DTYPES[port.element_type.get_type_name()])


def _shared(tensor: Tensor) -> Any:
    """``tensor`` as OpenVINO's, of the same memory."""
    import openvino

    name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # which numpy does not know
    return openvino.Tensor(bits.numpy(), list(tensor.shape), getattr(openvino.Type, name))


@lru_cache(maxsize=1)
def _core() -> Any:
    try:
        return import_openvino().Core()
    except ImportError as error:
        way_out = "mend it, or uninstall it: packages are then made without, by a C++ compiler."
        raise ConfigError(
            f"OpenVINO {openvino_version()} does not load ({error}); {way_out}", param="compile"
        ) from None
