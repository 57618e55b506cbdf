"""A safety filter in a process of its own: ``python -m diffserve.engine.safety_process --fd N --filter NAME``.

It reports which questions it can judge, answers one question after the other, and ends when the other side closes the
socket. An exception of the filter ends it with a reason.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from diffserve.api.errors import ConfigError
from diffserve.media.safety import OF_MODEL, FilterReady, Judgement, SafetyQuestion, Trouble, receive, send
from diffserve.processes import leave_stopping_to_parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer requests until the other side closes the socket."""
    parser = argparse.ArgumentParser(prog="diffserve-safety", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    parser.add_argument("--filter", required=True, help="model, or MODULE:FACTORY")
    parser.add_argument("--model", default="", help="the directory of the model")
    options = parser.parse_args(arguments)
    leave_stopping_to_parent()
    with socket.socket(fileno=options.fd) as connection:
        try:
            _answer(connection, load_filter(options.filter, options.model))
        except OSError as error:
            if connection.fileno() >= 0 and not isinstance(error, ConnectionError):
                send(connection, Trouble(f"{type(error).__name__}: {error}"))
        except Exception as error:  # user code may raise anything
            send(connection, Trouble(f"{type(error).__name__}: {error}"))
            return 1
    return 0


def load_filter(name: str, model: str) -> Any:
    """Load the filter ``name`` with the model in directory ``model``. Raises ConfigError, and the filter's errors."""
    if name == OF_MODEL:
        from diffserve.runtime.safety_checker import SafetyChecker

        return SafetyChecker.load(model)
    module, _, factory = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        create_filter: Callable[[], Any] = getattr(import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"safety_filter {name!r} cannot be imported: {error}.", param="safety_filter") from None
    return create_filter()


def _answer(connection: socket.socket, safety_filter: Any) -> None:
    prompts, pictures = (getattr(safety_filter, f"blocks_{what}", None) for what in ("prompt", "picture"))
    negatives = getattr(safety_filter, "blocks_negative_prompt", prompts)
    has_texts = prompts is not None or negatives is not None
    if not has_texts and pictures is None:
        message = "it has neither blocks_prompt nor blocks_negative_prompt nor blocks_picture."
        raise ConfigError(message, param="safety_filter")
    send(connection, FilterReady(has_texts, pictures is not None))
    while isinstance(question := receive(connection), SafetyQuestion):
        subject = question.subject
        is_text = isinstance(subject, str)
        judge = pictures if not is_text else negatives if question.is_negative else prompts
        answer = False if judge is None else judge(subject if isinstance(subject, str) else subject.array)
        if not isinstance(answer, (bool, int)) and str(answer) not in ("True", "False"):  # numpy's own bool is fine
            raise TypeError(f"it answered {answer!r}; it must return True or False.")
        send(connection, Judgement(bool(answer)))


if __name__ == "__main__":
    sys.exit(main())
