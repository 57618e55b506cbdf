"""Write ``requirements.lock``: constraints.txt with the hashes of every file that an index has of it.

``python tests/lock.py`` needs uv and a package index. torch comes twice: on Linux the CPU wheel that pip finds here, as
``torch==X+cpu``, elsewhere whatever the index has. What only its CUDA wheels ask for is left out.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "requirements.lock"
CUDA: Final = re.compile(r"nvidia-|cuda-|triton==|httpx2-jsfetch==")
CPU_TORCH: Final = "sys_platform == 'linux' and platform_machine == 'x86_64'"
OTHER_TORCH: Final = "sys_platform != 'linux' or platform_machine != 'x86_64'"
COMPILE: Final = "uv pip compile -q pyproject.toml --extra dev -c constraints.txt --universal --python-version 3.11"
HEAD: Final = """\
# constraints.txt with the hashes of all files that an index may give for it, for a set-up that takes nothing else:
#     pip install --require-hashes -r requirements.lock && pip install --no-deps .
# On Linux torch is the CPU wheel (Python 3.11), so the CUDA packages that its other wheels ask for are not here.
# To renew it: poe lock.
"""


def blocks() -> list[str]:
    """One for each package: its pin, and under it its hashes."""
    command = [*COMPILE.split(), "--generate-hashes", "--no-header", "--no-annotate"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [block for block in re.split(r"\n(?=\w)", output.strip()) if not CUDA.match(block)]


def torches(block: str) -> str:
    """Return the block of torch twice: the CPU wheel for Linux, and the index's wheel elsewhere."""
    (version,) = re.findall(r"^torch==(\S+)", block)
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"torch=={version}"]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).iterdir()
        if "+cpu" not in wheel.name:
            raise SystemExit(f"pip finds {wheel.name} here, not a CPU wheel of torch {version}.")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    cpu_line = f"torch=={version}+cpu ; {CPU_TORCH} \\\n    --hash=sha256:{digest}"
    return f"{cpu_line}\ntorch=={version} ; {OTHER_TORCH} \\\n" + block.partition("\n")[2]


if __name__ == "__main__":
    LOCK.write_text(HEAD + "\n".join(torches(b) if b.startswith("torch==") else b for b in blocks()) + "\n")
