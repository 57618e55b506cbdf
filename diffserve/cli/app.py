"""The ``diffserve`` command line: command registration, exit codes and error messages.

Heavy packages are imported only when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from diffserve.api.errors import DiffserveError
from diffserve.cli.commands.jobs import jobs_app
from diffserve.cli.commands.machine import doctor, list_names, prune, warm
from diffserve.cli.commands.paint import batch, generate, rewrite, upscale
from diffserve.cli.commands.serve import cluster_app, keys_app, mcp, serve
from diffserve.cli.commands.study import calibrate, sweep, verify
from diffserve.cli.start import end_soon, own_process, refuse
from diffserve.version import __version__

EXIT_INTERRUPTED = 130

_ClickException: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base class of usage errors. Typer may use its own copy of click, so the class is looked up."""

SIZE: Final = "--size WIDTHxHEIGHT, such as --size 512x512"
OTHER_NAMES: Final = {
    **dict.fromkeys(("--cfg", "--cfg-scale", "--guidance-scale", "--scale", "--cfg_scale"), "--guidance"),
    **dict.fromkeys(("--width", "--height", "-W", "-H", "--resolution", "--w", "--h"), SIZE),
    **dict.fromkeys(("--negative-prompt", "--neg", "--negative_prompt", "--uc"), "--negative"),
    **dict.fromkeys(("--num-inference-steps", "--num-steps", "--ddim-steps", "--sample-steps"), "--steps"),
    **dict.fromkeys(("--scheduler", "--sampling-method", "--sampler-name"), "--sampler"),
    **dict.fromkeys(("--num-images", "--count", "--n", "--num", "--batch-size", "--n-samples"), "-n"),
    **dict.fromkeys(("--out", "--outfile", "--outdir", "--output-dir", "--save"), "--output"),
    **dict.fromkeys(("--ckpt", "--checkpoint", "--model-path", "--model-id"), "--model"),
    **dict.fromkeys(("--init-image", "--init-img", "--image", "--input"), "--init"),
    **dict.fromkeys(("--denoising-strength", "--denoise"), "--strength"),
    **dict.fromkeys(("--lora-path", "--loras"), "--lora"),
    **dict.fromkeys(("--url", "--api", "--endpoint"), "--server"),
    **dict.fromkeys(("--listen", "--bind"), "--host"),
    **dict.fromkeys(("--precision", "--fp16", "--half"), "--dtype"),
}
"""Maps options of other programs to the equivalent option of this one."""


app = typer.Typer(
    name="diffserve",
    help="Generate images from text, on this machine or as an HTTP service.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    A user error prints one line on standard error and exits with code 2.

    Args:
        arguments: Arguments of a caller that continues afterwards. None: the arguments of the shell; the process then
            runs only this command.
    """
    if arguments is None:
        own_process()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="diffserve", standalone_mode=False)
    except DiffserveError as error:
        code = refuse(error.message)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "diffserve", "schedulers", "ui"):
            raise
        code = refuse(
            f"this command needs the Python package {package}, which is not installed; install it, or all dependencies "
            "of diffserve."
        )
    except OSError as error:  # such as a file name that is too long, missing permissions or a full disk
        code = refuse(f"{error.strerror or error}{f': {str(error.filename)!r}' if error.filename else ''}.")
    except MemoryError:
        code = refuse("not enough memory; see ulimit -v and free.")
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except _ClickException as error:
        message = suggestion_for(error)
        code = refuse(message or (error.format_message() if hasattr(error, "format_message") else str(error)))
    except Exception as error:
        from diffserve.store.errors import StoreError  # here, because the package imports SQLAlchemy

        if not isinstance(error, StoreError):
            raise
        code = refuse(error.message)
    end_soon()
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Generate images from text, on this machine or as an HTTP service."""
    if version:
        print(f"diffserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, upscale, batch, rewrite, serve, sweep, calibrate, verify, doctor, warm, prune, mcp):
    app.command()(command)
app.command("list")(list_names)
for group in (jobs_app, keys_app, cluster_app):
    app.add_typer(group)


def suggestion_for(error: Any) -> str | None:
    """Return an error message that suggests the equivalent of an unknown option, or None.

    Args:
        error: A usage error of click.
    """
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    right = OTHER_NAMES.get(option) if isinstance(option, str) else None
    if right is None or context is None:
        return None
    options = {name for parameter in context.command.params for name in parameter.opts}
    if right.split()[0] not in options:
        return None
    return f"No such option: {option}; give {right}."
