"""Arms of the UNet benchmark: one network on the same rows by the engine, torch, its compiler, OpenVINO, onnxruntime.

Peers are diffusers' own network with text embeddings. The engine's arm makes calls as in serving: in its call sizes,
with precomputed keys and values of the text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from diffserve.engine import Engine
from diffserve.engine.image.task import GroupKey
from diffserve.runtime.loading.library_imports import hushed, import_openvino, import_quietly
from diffserve.runtime.threads import computing_on
from diffserve.runtime.unet.call import Compiled, UNetArguments
from diffserve.runtime.unet.compiled import FlatUNet
from diffserve.runtime.unet.cross_attention import KeysValues
from diffserve.runtime.unet.openvino_package import OpenVINOCompiler, with_embeddings
from diffserve.runtime.unet.random_rows import random_inputs
from diffserve.runtime.unet.unet import UNetRunner

Predict = Callable[[], Tensor]
"""Runs the rows it was made for: (rows, C, h, w) in float32 in main memory, once the device is done."""

EXPORT_ROWS: Final = 2
MOST_EXPORTED: Final = 63


class Absent(Exception):  # noqa: N818  # no error: the arm is named and left out
    """Error of an arm that cannot run here, with the reason and a solution."""


class Peers:
    """The network of ``directory`` in all arms, on rows of the ``engine``'s native size.

    num_threads  of a call, in every arm
    most_rows    largest number of rows to be measured
    """

    def __init__(self, engine: Engine, directory: Path, *, num_threads: int, most_rows: int) -> None:
        self.engine = engine
        self.model = engine.model
        self.num_threads = num_threads
        self._directory = directory
        width_px, height_px = engine.info.good_sizes[0]
        self.group = engine.runners.group_of_short_prompts(width_px, height_px)
        engine.runners.groups.learn(self.group)
        self.compiled_group = engine.runners.groups.best(self.group)
        while engine.study():  # verify packages that are not verified yet
            pass
        self.compiled_group = engine.runners.groups.best(self.group)
        self._inputs = random_inputs(self.model, self.group.shape, self._rows_laid(most_rows))
        self._exported: dict[str, Any] = {}

    def _rows_laid(self, most_rows: int) -> int:
        """Return the rows of calls of up to ``most_rows`` rows after padding to measured cheap sizes."""
        curves = [self.engine.runners.groups.facts_of(group).curve for group in (self.group, self.compiled_group)]
        padded = max(sum(curve.cover(rows)) for curve in curves for rows in range(1, most_rows + 1))
        return most_rows + padded  # a size that was long passed over is called before the others

    def inputs(self, rows: range) -> dict[str, Any]:
        """Return arguments of ``UNetRunner.predict`` for some of the rows, with embeddings for ``contexts``."""
        index = torch.tensor(rows, device=self.model.device)
        return {name: value.index_select(0, index) for name, value in self._inputs.items()}

    @cached_property
    def plain(self) -> UNetRunner:
        """Diffusers' network in the engine's precision."""
        return self._load(self.model.dtype)

    @cached_property
    def exact(self) -> UNetRunner:
        """Diffusers' network in float32."""
        return self._load(torch.float32)

    def reference(self, num_rows: int) -> Tensor:
        """Compute the rows in float32 with eager torch."""
        return self.exact.predict(**self.inputs(range(num_rows))).cpu()

    def make(self, name: str, num_rows: int) -> Predict:
        """Build the arm ``name`` for calls of ``num_rows`` rows. Raises Absent if it cannot run here."""
        with warnings.catch_warnings(), hushed("torch.onnx", "onnxscript"):
            warnings.simplefilter("ignore")  # of tracers, about branches that do not depend on the numbers
            return ARMS[name](self, num_rows)

    def run(self, runner: UNetRunner, num_rows: int, compiled: Compiled | None = None) -> Predict:
        """Return a function that calls ``runner`` with ``num_rows`` rows, optionally with the network ``compiled``."""
        inputs = self.inputs(range(num_rows))
        return lambda: runner.predict(compiled=compiled, **inputs).cpu()

    def as_served(self, group: GroupKey, num_rows: int) -> Predict:
        """Return a function that makes the calls into which the engine splits ``num_rows`` rows of ``group``."""
        groups, conditioner = self.engine.runners.groups, self.engine.runners.conditioner
        inputs = self.inputs(range(len(self._inputs["timesteps"])))
        contexts = conditioner.of_embeddings(inputs.pop("contexts"))
        parts = []
        for start, stop, bucket in groups.facts_of(group).curve.calls(num_rows):
            index = torch.arange(start, start + bucket, device=self.model.device)
            row_contexts = (
                contexts.select(index) if isinstance(contexts, KeysValues) else contexts.index_select(0, index)
            )
            row_inputs: dict[str, Any] = {name: value.index_select(0, index) for name, value in inputs.items()}
            parts.append((stop - start, {**row_inputs, "contexts": row_contexts}))

        def predict() -> Tensor:
            makers: dict[str, Any] = {
                "compiled": groups.compiled.of(group),
                "recorder": groups.compiled.recorder(group),
            }
            return torch.cat([self.model.unet.predict(**makers, **part)[:num_used] for num_used, part in parts]).cpu()

        return predict

    def calls(self, name: str, num_rows: int) -> list[int]:
        """Return the rows of each call of an arm for ``num_rows``; the engine splits calls where that is cheaper."""
        if name not in OURS:
            return [num_rows]
        group = self.group if name == "ours" else self.compiled_group
        return [bucket for *_, bucket in self.engine.runners.groups.facts_of(group).curve.calls(num_rows)]

    def flat(self) -> tuple[FlatUNet, UNetArguments]:
        """Return the float32 network with tensors for arguments, for export, and the arguments of a call."""
        if self.model.device.type != "cpu":
            raise Absent("a peer on CPUs")
        call = self.exact.call(**self.inputs(range(EXPORT_ROWS)))
        return FlatUNet(self.exact.network, call).eval(), call

    def export(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, cached for all numbers of rows."""
        if name not in self._exported:
            with torch.no_grad():
                self._exported[name] = make()
        return self._exported[name]

    def _load(self, dtype: torch.dtype) -> UNetRunner:
        with hushed("diffusers"):
            network = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(
                str(self._directory), subfolder="unet", torch_dtype=dtype
            )
        return UNetRunner(network.eval().to(self.model.device), device=self.model.device, dtype=dtype)


def _engine_arm(peers: Peers, num_rows: int) -> Predict:
    return peers.as_served(peers.group, num_rows)


def _ours_compiled(peers: Peers, num_rows: int) -> Predict:
    if peers.compiled_group == peers.group:
        raise Absent("there are no packages of this model on this machine: run `diffserve warm --model ...` first")
    return peers.as_served(peers.compiled_group, num_rows)


def _eager(peers: Peers, num_rows: int) -> Predict:
    return peers.run(peers.plain, num_rows)


def _torch_compile(peers: Peers, num_rows: int) -> Predict:
    torch.compiler.reset()  # what was compiled for another number of rows is over
    call = peers.plain.call(**peers.inputs(range(num_rows)))
    network = FlatUNet(peers.plain.network, call).eval()
    compiled = torch.compile(network, dynamic=False, options={"freezing": True})
    predict = peers.run(peers.plain, num_rows, lambda call: compiled(*call.tensors))
    predict()  # compiles
    return predict


def _openvino(peers: Peers, num_rows: int, precision: str) -> Predict:
    try:
        openvino = import_openvino()
    except ImportError:
        raise Absent("openvino is not installed") from None
    tensors = peers.exact.call(**peers.inputs(range(num_rows))).tensors
    plain = peers.exact.network
    model = peers.export("openvino", lambda: OpenVINOCompiler(peers.flat()[0], plain, tensors)).of_rows(num_rows)
    hints = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    network = openvino.Core().compile_model(model, "CPU", {**hints, "INFERENCE_NUM_THREADS": peers.num_threads})

    def run(call: UNetArguments) -> Tensor:
        with computing_on(1):  # as in the engine's arm: torch's threads would interfere
            arrays = [tensor.numpy() for tensor in with_embeddings(plain, call.tensors)]
        return torch.from_numpy(network(arrays)[0].copy())

    return peers.run(peers.exact, num_rows, run)


def _openvino_bf16(peers: Peers, num_rows: int) -> Predict:
    return _openvino(peers, num_rows, "bf16")


def _openvino_f32(peers: Peers, num_rows: int) -> Predict:
    return _openvino(peers, num_rows, "f32")


def _onnxruntime(peers: Peers, num_rows: int) -> Predict:
    onnxruntime = _import("onnxruntime")
    _import("onnxscript")

    def export() -> bytes:
        network, call = peers.flat()
        rows = torch.export.Dim("rows", min=2, max=MOST_EXPORTED)
        each = [{0: rows} for _ in call.tensors]
        shapes = {"sample": each[0], "timesteps": each[1], "rest": tuple(each[2:])}
        program = torch.onnx.export(network, tuple(call.tensors), dynamo=True, verbose=False, dynamic_shapes=shapes)
        assert program is not None
        content: bytes = program.model_proto.SerializeToString()
        return content

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = peers.num_threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its threads would burn the next arm's
    content = peers.export("onnx", export)
    options.add_free_dimension_override_by_name("rows", num_rows)
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def run(call: UNetArguments) -> Tensor:
        fed = {name: tensor.numpy() for name, tensor in zip(names, call.tensors, strict=True)}
        return torch.from_numpy(session.run(None, fed)[0])

    return peers.run(peers.exact, num_rows, run)


class Arm(NamedTuple):
    """Builder of an arm, and its precision; "" is the engine's."""

    make: Callable[[Peers, int], Predict]
    precision: str = ""

    def __call__(self, peers: Peers, num_rows: int) -> Predict:
        return self.make(peers, num_rows)


ARMS: Final = {
    "torch": Arm(_eager),
    "ours": Arm(_engine_arm),
    "ours-compiled": Arm(_ours_compiled),
    "torch.compile": Arm(_torch_compile),
    "openvino-bf16": Arm(_openvino_bf16, "bfloat16"),
    "openvino-f32": Arm(_openvino_f32, "float32"),
    "onnxruntime-f32": Arm(_onnxruntime, "float32"),
}
OURS: Final = ("ours-compiled", "ours")


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise Absent(f'{name} is not installed: pip install "diffserve[bench]"') from None
