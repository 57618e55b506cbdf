"""Commands for the jobs of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

jobs_app = typer.Typer(
    name="jobs",
    help="List, follow and control the jobs of a server. If it needs an API key, set DIFFSERVE_API_KEY.",
    rich_markup_mode=None,
)

LOCAL: Final = "http://127.0.0.1:8000"
ServerOption = Annotated[
    str, typer.Option("--server", envvar="DIFFSERVE_SERVER", help="Address of the running server.", metavar="URL")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
EndpointOption = Annotated[str | None, typer.Option("--endpoint", help="Only jobs of this path.", metavar="PATH")]
IdArgument = Annotated[str, typer.Argument(help="ID of the job.", metavar="ID")]
IdArguments = Annotated[list[str], typer.Argument(help="IDs of jobs.", metavar="ID")]


@jobs_app.command("list")
def list_jobs(
    status: Annotated[
        str | None, typer.Option("--status", help="Only jobs in this state, such as queued.", metavar="STATE")
    ] = None,
    endpoint: EndpointOption = None,
    limit: Annotated[int, typer.Option("--limit", help="Largest number of jobs.", metavar="N")] = 20,
    as_json: JsonOption = False,
    server: ServerOption = LOCAL,
) -> int:
    """List jobs, the newest first."""
    from diffserve.cli.jobs import show_list

    return show_list(server, status, endpoint, limit, is_json=as_json)


@jobs_app.command("show")
def show_job(job_id: IdArgument, as_json: JsonOption = False, server: ServerOption = LOCAL) -> int:
    """Show one job."""
    from diffserve.cli.jobs import show_one

    return show_one(server, job_id, is_json=as_json)


@jobs_app.command("watch")
def watch_job(job_id: IdArgument, as_json: JsonOption = False, server: ServerOption = LOCAL) -> int:
    """Print the states and the progress of a job until it is over.

    The exit code is 0 if the job succeeded, else 1.
    """
    from diffserve.cli.jobs import watch

    return watch(server, job_id, is_json=as_json)


@jobs_app.command("cancel")
def cancel_jobs(
    job_ids: Annotated[list[str] | None, typer.Argument(help="IDs of jobs.", metavar="ID")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", help="Jobs in this state: queued, running or paused; repeatable.", metavar="STATE"),
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    server: ServerOption = LOCAL,
) -> int:
    """Cancel jobs by ID or state.

    The exit code is 1 if a job with a given ID was not cancelled.
    """
    from diffserve.cli.jobs import cancel

    return cancel(server, job_ids or (), status or (), endpoint, is_json=as_json)


@jobs_app.command("retry")
def retry_jobs(job_ids: IdArguments, as_json: JsonOption = False, server: ServerOption = LOCAL) -> int:
    """Run jobs again that failed, expired or were cancelled."""
    from diffserve.cli.jobs import change
    from diffserve.client import Client

    return change(server, job_ids, Client.retry_job, is_json=as_json)


@jobs_app.command("pause")
def pause_jobs(job_ids: IdArguments, as_json: JsonOption = False, server: ServerOption = LOCAL) -> int:
    """Hold back queued or running jobs; a running one later continues where it was."""
    from diffserve.cli.jobs import change
    from diffserve.client import Client

    return change(server, job_ids, Client.pause_job, is_json=as_json)


@jobs_app.command("resume")
def resume_jobs(job_ids: IdArguments, as_json: JsonOption = False, server: ServerOption = LOCAL) -> int:
    """Return paused jobs to their places in the queue."""
    from diffserve.cli.jobs import change
    from diffserve.client import Client

    return change(server, job_ids, Client.resume_job, is_json=as_json)


@jobs_app.command("result")
def job_result(
    job_id: IdArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the images to this folder instead.", metavar="DIR"),
    ] = None,
    server: ServerOption = LOCAL,
) -> int:
    """Print the answer of a finished job, as JSON."""
    from diffserve.cli.jobs import result

    return result(server, job_id, output)
