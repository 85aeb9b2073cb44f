"""The `kvd-ctl` command: its arguments.

Exit status 0; 1, with a line on stderr, where kvd does not answer or refuses; 2 for usage.
"""

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from kvd_client import Client, DaemonUnavailable, KvdError

try:
    import typer

    from kvd_ctl import commands
    from kvd_ctl import events as event_commands
    from kvd_ctl.notation import parse_duration, parse_tokens
except ModuleNotFoundError as error:
    sys.exit(f"kvd-ctl: {error}: install kvd[ctl]")

NAME = "kvd-ctl"

app = typer.Typer(
    help="Inspect a running kvd, and say what it keeps.",
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
Limit = Annotated[int, typer.Option(help="List so many at most.", min=1, max=1000)]
Owner = Annotated[str, typer.Option(help="Whose pins they are.")]
NamespaceNumber = Annotated[
    int, typer.Argument(metavar="NAMESPACE", help="Its number, as `kvd-ctl namespaces` says.")
]
_tokens = typer.Argument(
    parser=parse_tokens,
    metavar="TOKENS",
    help="Token ids: 1,2,3; or @FILE, a JSON list, or uint32 if it ends in .bin; or - for stdin.",
)


@app.command(epilog="Example: kvd-ctl ping --timeout 0.5")
def ping(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Ask whether kvd answers, and how fast."""
    with _client(endpoint, timeout) as client:
        commands.ping(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl status --json | jq .tiers")
def status(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Show pages by state, hits and misses, and what went wrong."""
    with _client(endpoint, timeout) as client:
        commands.status(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl tiers --json | jq '.[].trouble'")
def tiers(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List the tiers: what each holds, what waits for it, and what is wrong with it."""
    with _client(endpoint, timeout) as client:
        commands.tiers(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl checkpoint --timeout 60")
def checkpoint(endpoint: Endpoint = None, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Copy all blocks to the tiers that survive the machine, and sync them.

    When the time to wait is over, kvd goes on with it.
    """
    with _client(endpoint, timeout) as client:
        commands.checkpoint(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl verify || kvd-ctl status")
def verify(endpoint: Endpoint = None, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Compare all blocks with their checksums; exit status 1 where some were bad or missing.

    They are removed, with what follows them. Interrupting it does no harm: kvd goes on, as it does
    when the time to wait is over.
    """
    with _client(endpoint, timeout) as client:
        is_good = commands.verify(client, as_json=as_json)
    if not is_good:
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl sessions --json | jq '.[].client'")
def sessions(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List who is attached, what each holds and how long its requests took."""
    with _client(endpoint, timeout) as client:
        commands.sessions(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl namespaces --json | jq '.[].revision'")
def namespaces(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List the namespaces: which model's KV each is, and what it holds."""
    with _client(endpoint, timeout) as client:
        commands.namespaces(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl leases --limit 10")
def leases(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the leases, the oldest first."""
    with _client(endpoint, timeout) as client:
        commands.leases(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl pins --json | jq '.pins[].owner'")
def pins(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the pins, the oldest first."""
    with _client(endpoint, timeout) as client:
        commands.pins(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl sequences --json | jq '.sequences[].sequence'")
def sequences(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the saved sequences, the oldest first."""
    with _client(endpoint, timeout) as client:
        commands.sequences(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl events --since 0 --json | jq .type")
def events(
    since: Annotated[
        int | None,
        typer.Option(help="From this batch on, or what is there; else what comes.", min=0),
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after so many events.", min=1)] = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Print what comes to the tiers and leaves them, a line each, until it is interrupted."""
    with _client(endpoint, timeout) as client:
        status = event_commands.published(client)
    event_commands.follow(status, since, count, timeout, as_json=as_json)


@app.command(epilog="Example: kvd-ctl pin 1 @prompt.json --for 2h")
def pin(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes, _tokens],
    seconds: Annotated[
        float,
        typer.Option("--for", parser=parse_duration, metavar="TIME", help="90s, 30m, 2h or 7d."),
    ],
    owner: Owner = NAME,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Keep what is cached of these tokens for so long, whatever else goes."""
    with _client(endpoint, timeout) as client:
        commands.pin(client, namespace, tokens, seconds, owner, as_json=as_json)


@app.command(epilog="Example: kvd-ctl unpin 3 4")
def unpin(
    numbers: Annotated[
        list[int] | None, typer.Argument(metavar="[PIN]...", help="All of the owner's, if none.")
    ] = None,
    owner: Owner = NAME,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """End pins of an owner."""
    with _client(endpoint, timeout) as client:
        commands.unpin(client, numbers or (), owner, as_json=as_json)


@app.command(epilog="Example: kvd-ctl drop 1 @prompt.json --from-token 512")
def drop(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, _tokens] = None,
    from_token: Annotated[
        int, typer.Option(help="Keep the blocks before the one of this token.", min=0)
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Remove the blocks of these tokens and all that follow them, or all of a namespace."""
    if tokens is None and from_token:
        raise typer.BadParameter(
            "it counts in TOKENS, which are missing", param_hint="--from-token"
        )
    if tokens is None and not yes and not sys.stdin.isatty():
        raise typer.BadParameter("needed to drop a namespace without asking", param_hint="--yes")
    with _client(endpoint, timeout) as client:
        if tokens is None and not yes:
            typer.confirm(commands.question(client, namespace), abort=True, err=True)
        commands.drop(client, namespace, tokens or b"", from_token, as_json=as_json)


@app.command(epilog="Example: kvd-ctl discard chat-7")
def discard(
    name: Annotated[str, typer.Argument(metavar="SEQUENCE", help="Its name.")],
    namespace: Annotated[
        str, typer.Option(help="How its key begins, as `kvd-ctl sequences` says.")
    ] = "",
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Forget a saved sequence; nobody can resume it any more."""
    with _client(endpoint, timeout) as client:
        commands.discard(client, name, namespace, as_json=as_json)


@contextmanager
def _client(endpoint: str | None, timeout: float) -> Iterator[Client]:
    """A client of a daemon that is there; what goes wrong is said in one line."""
    try:
        # It maps nothing: it may be of another user, or in another container.
        with Client(endpoint, timeout=timeout, name=NAME, maps=False) as client:
            _check_listening(client.endpoint)
            yield client
    except KvdError as error:
        print(f"kvd-ctl: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _check_listening(endpoint: str) -> None:
    """Raises DaemonUnavailable at once where nobody listens: a client would wait for a start."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except BlockingIOError:
            pass  # somebody does, and is busy
        except OSError as error:
            raise DaemonUnavailable(
                f"kvd does not listen on {endpoint}: {error.strerror}"
            ) from error


def main() -> None:
    """Entry point of the `kvd-ctl` script."""
    # What the client library would log, the error says.
    logging.getLogger("kvd_client").addHandler(logging.NullHandler())
    app()


if __name__ == "__main__":
    main()
