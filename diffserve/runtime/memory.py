"""Free memory of devices and of the system, and the release of memory that libraries keep."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from diffserve.runtime.accelerators import ACCELERATORS, device_module, has_streams

CGROUP_FILES: Final = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files by folder of the memory controller under /sys/fs/cgroup (version 2; 1).

They are the limit, the usage, and the line of ``memory.stat`` for inactive file pages.
"""

M_MMAP_THRESHOLD: Final = -3
"""glibc's number of the option (malloc.h)."""


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that tensors may still take on ``device``; ``None`` if unknown.

    On CUDA and XPU this is the driver's free memory plus torch's unused reserve; on MPS the remainder of Metal's
    recommended maximum; on a CPU the system's available memory, or what remains under the limit of a control group (a
    container's) if that is less. ``root`` is the root of the file system.
    """
    if has_streams(device):
        module = device_module(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0]) + int(unused)
    if device.type == "mps":
        return max(0, int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory()))
    if device.type != "cpu":
        return None
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *_cgroup_bytes(root)], default=None)


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each control group of this process."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if "memory" not in controllers.split(",") and controllers:
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, used, idle = CGROUP_FILES["memory" if controllers else ""]
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            try:
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # "max" is no number: there is no limit
                left = int((group / limit).read_text()) - int((group / used).read_text()) + int(stat.get(idle, 0))
                yield max(0, left)
            except (OSError, ValueError):
                pass
            if group == top:
                break


def give_memory_back(device: torch.device) -> None:
    """Return torch's unused memory blocks to the device, which joins them. Do nothing on a CPU."""
    if device.type in ACCELERATORS:
        device_module(device).empty_cache()


def give_heap_back() -> None:
    """Return free blocks inside glibc's heap to the system, which takes milliseconds; do nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap_small() -> None:
    """Allocate all blocks of 128 KiB and more directly from the system from now on; do nothing without glibc.

    glibc raises its initial threshold when large blocks are freed. Offloaded weights would then fragment the heap by
    several layers. The price is a system call per block.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 128 << 10)


def without_frames(error: BaseException) -> None:
    """Drop the traceback and causes of ``error``, whose frames keep tensors alive."""
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
