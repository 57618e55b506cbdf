"""Command ``python -m ui --server URL``: serves the page of a server that runs elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from diffserve.api.errors import DiffserveError
from diffserve.client import DEFAULT_URL
from diffserve.client.transport import base_url

EXIT_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted.

    Returns:
        0, or 2 after a usage error, which is printed as one line on standard error.
    """
    options = _parser().parse_args(arguments)
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
    parser = argparse.ArgumentParser(prog="python -m ui", description="The page of a diffserve server elsewhere.")
    parser.add_argument("--server", default=DEFAULT_URL, metavar="URL", help=f"where it listens ({DEFAULT_URL})")
    parser.add_argument("--host", default="127.0.0.1", help="address the page listens on")
    parser.add_argument("--port", type=int, default=7860, help="port the page listens on")
    return parser


def _refuse(message: str) -> int:
    print(f"ui: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
