"""Command ``python -m ui --server URL``: serves the page of a server that runs elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from diffserve.api.errors import DiffserveError
from diffserve.client import DEFAULT_URL
from diffserve.client.transport import base_url

EXIT_USER_ERROR = 2
MAX_PORT = 65535


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted.

    Returns:
        0, or 2 after a usage error, which is printed as one line on standard error.
    """
    options = _parser().parse_args(arguments)
    if not 1 <= options.port <= MAX_PORT:
        return _refuse(f"--port must be between 1 and {MAX_PORT}, got {options.port}.")
    try:
        base_url(options.server)
        from ui.mounting import launch_page

        launch_page(options.server, host=options.host, port=options.port)
    except DiffserveError as error:
        return _refuse(error.message)
    except OSError:
        return _refuse(f"cannot listen on {options.host}:{options.port}; try another --port.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ui", description="Serve the web page of a diffserve server that runs elsewhere."
    )
    parser.add_argument(
        "--server", default=DEFAULT_URL, metavar="URL", help=f"address of the server (default {DEFAULT_URL})"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default 7860)")
    return parser


def _refuse(message: str) -> int:
    print(f"ui: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
