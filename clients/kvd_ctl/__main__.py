"""The `kvd-ctl` command: its arguments. Exit status 0, 1 where kvd does not answer, 2 for usage."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvd_client import Client, KvdError
from kvd_ctl import commands

app = typer.Typer(
    help="Inspect a running kvd.",
    epilog="Example: kvd-ctl status --json | jq .counters",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Endpoint = Annotated[
    str | None,
    typer.Option(help="Where kvd listens; by default where clients look.", envvar="KVD_ENDPOINT"),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.01)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command(epilog="Example: kvd-ctl ping --timeout 0.5")
def ping(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Ask whether kvd answers, and how fast."""
    _run(commands.ping, endpoint, timeout, as_json)


@app.command(epilog="Example: kvd-ctl status --json | jq .tiers")
def status(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Show pages by state, hits and misses, namespaces and sessions."""
    _run(commands.status, endpoint, timeout, as_json)


def _run(command: Callable[..., None], endpoint: str | None, timeout: float, as_json: bool) -> None:
    try:
        with Client(endpoint, timeout=timeout, name="kvd-ctl") as client:
            command(client, as_json=as_json)
    except KvdError as error:
        print(f"kvd-ctl: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point of the `kvd-ctl` script."""
    app()


if __name__ == "__main__":
    main()
