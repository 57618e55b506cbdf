"""Which ways of compiling and opening an AOTInductor package work on a device: each is tried in a process of its own.

    python -m benchmarks.gpu.package_variants cuda

On the first card every package of torch 2.11 ended the process that opened it by a segmentation fault. The variants
lead step by step from the way that torch's documentation shows to the way that ``runtime/unet/package.py`` opens
packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

TIMEOUT_S: Final = 180.0
LAST_LINES: Final = 12
MOST_PROCESSES: Final = 4


class Variant(NamedTuple):
    """options  of the compiler; weights  "inside" the package, "copied" into it, or the "user's"; calls  from how many
    threads at once the package expects calls: "one" or "many"; loader  "documented" or "direct"."""

    options: dict[str, Any]
    weights: str
    calls: str
    loader: str


OUTSIDE: Final[dict[str, Any]] = {"aot_inductor.package_constants_in_so": False}
VARIANTS: Final = {
    "as documented": Variant({}, "inside", "many", "documented"),
    "direct loader": Variant({}, "inside", "many", "direct"),
    "calls from one thread": Variant({}, "inside", "one", "direct"),
    "weights copied": Variant(OUTSIDE, "copied", "many", "direct"),
    "weights of the user": Variant(OUTSIDE, "user's", "many", "direct"),
    "weights of the user, one thread": Variant(OUTSIDE, "user's", "one", "direct"),
    "all options": Variant(
        OUTSIDE
        | {"always_keep_tensor_constants": True, "aot_inductor.compile_wrapper_opt_level": "Og"}
        | {"cpp.vec_isa_ok": True, "aot_inductor.precompile_headers": False},
        "user's",
        "one",
        "direct",
    ),
}


def small_network() -> nn.Module:
    """A network with a convolution, a norm, and a matrix product."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Flatten(), nn.Linear(32 * 64, 16))
    return nn.Sequential(*layers).eval()


def try_variant(name: str, device: str, stage_file: Path) -> float:
    """Compile and open the small network by the variant ``name``, call it twice, and return the largest error.

    What is done next is written to ``stage_file`` before it is done.
    """
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    variant = VARIANTS[name]
    network = small_network().to(device)
    tensor = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder) / "package.pt2")
        stage_file.write_text("compiling")
        program = torch.export.export(network, (tensor,))
        aoti_compile_and_package(program, package_path=path, inductor_configs=variant.options)
        stage_file.write_text("opening")
        index = -1 if device == "cpu" else 0
        if variant.loader == "documented":
            loader = aoti_load_package(path).loader
        else:
            from torch._C._aoti import AOTIModelPackageLoader

            loader = AOTIModelPackageLoader(path, "model", variant.calls == "one", 1, index)
        if variant.weights != "inside":
            stage_file.write_text("giving it the weights")
            held = dict(network.named_parameters())
            names = loader.get_constant_fqns()
            loader.load_constants({each: held[each].data for each in names}, False, True, variant.weights == "user's")
        expected, largest = network(tensor), 0.0
        for _ in range(2):
            stage_file.write_text("calling it")
            output = loader.boxed_run([tensor])[0]
            largest = max(largest, float((output - expected).abs().max()))
        stage_file.write_text("done")
        return largest


def outcomes(device: str) -> dict[str, str]:
    """Try every variant.

    Returns:
        By name of the variant: the largest error, or the stage at which its process ended and its exit code.
    """
    with ThreadPoolExecutor(MOST_PROCESSES) as pool:
        return dict(zip(VARIANTS, pool.map(lambda name: outcome(device, name), VARIANTS), strict=True))


def outcome(device: str, name: str) -> str:
    """Try the variant ``name`` in a process of its own; see ``outcomes`` for what is returned."""
    with tempfile.TemporaryDirectory() as folder:
        stage_file = Path(folder) / "stage"
        command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu.package_variants", device, name]
        try:
            done = subprocess.run(
                [*command, str(stage_file)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {TIMEOUT_S:.0f} s while {_stage(stage_file)}"
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[-1]
        last_lines = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        return f"ended with {done.returncode} while {_stage(stage_file)}:\n{last_lines}"


def _stage(file: Path) -> str:
    return file.read_text() if file.is_file() else "starting"


def main() -> None:
    """Try one variant, or all of them, and print the outcomes."""
    device, *variant = sys.argv[1:]
    if variant:
        print(f"largest error {try_variant(variant[0], device, Path(variant[1])):.2g}")
    else:
        print(json.dumps(outcomes(device), indent=1))


if __name__ == "__main__":
    main()
