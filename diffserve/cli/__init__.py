"""The command line: ``diffserve generate``, ``diffserve serve``, ``diffserve doctor``."""

from diffserve.cli.app import main

__all__ = ["main"]
