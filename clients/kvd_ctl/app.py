"""What the commands of `kvd-ctl` share: the arguments that several have, and a client."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from kvd import __version__
from kvd.protocol.endpoint import SYSTEM_SOCKET, connected, is_default, not_for_us
from kvd_client import Client, DaemonUnavailable, KvdError
from kvd_ctl import INTERRUPTED
from kvd_ctl.notation import parse_tokens
from kvd_ctl.text import load_tokenizer

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
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Text = Annotated[str | None, typer.Option(help="A prompt as text, instead of TOKENS.")]
TokenizerFolder = Annotated[
    Any, typer.Option(parser=load_tokenizer, metavar="DIR", help="A model's folder, to read text.")
]
NamespaceNumber = Annotated[
    int, typer.Argument(metavar="NAMESPACE", help="Its number, as `kvd-ctl namespaces` says.")
]
TOKENS = typer.Argument(
    parser=parse_tokens,
    metavar="TOKENS",
    help="Token ids: 1,2,3; or @FILE, a JSON list, or uint32 if it ends in .bin; or - for stdin.",
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def with_keys(
    key: Annotated[str, typer.Option(help="By TCP: the file of our secret key.")] = "",
    server_key: Annotated[str, typer.Option(help="By TCP: the file of kvd's key.")] = "",
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Note the keys where the client looks for them."""
    for variable, path in {"KVD_KEY": key, "KVD_SERVER_KEY": server_key}.items():
        if path:
            os.environ[variable] = path


@contextmanager
def client_of(endpoint: str | None, timeout: float, *, maps: bool = False) -> Iterator[Client]:
    """A client of a daemon that is there; what goes wrong is said in one line.

    Unless it `maps`, it may be of another user, or in another container.
    """
    with failures(), Client(endpoint, timeout=timeout, name=NAME, maps=maps) as client:
        check_listening(client.endpoint)
        yield client


@contextmanager
def failures() -> Iterator[None]:
    """What goes wrong is said in one line."""
    try:
        yield
    except KvdError as error:
        print(f"kvd-ctl: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def check_listening(endpoint: str) -> None:
    """Raises DaemonUnavailable at once where nobody listens: a client would wait for a start.

    Raises Forbidden where we may not ask.
    """
    if not endpoint.startswith("ipc://"):
        return
    try:
        with connected(endpoint):
            pass
    except BlockingIOError:
        pass  # somebody does, and is busy
    except PermissionError as error:
        raise not_for_us(endpoint) from error
    except OSError as error:
        message = f"kvd does not listen on {endpoint}: {error.strerror}"
        if is_default(endpoint):
            message += f"; as a service it listens on ipc://{SYSTEM_SOCKET}"
        raise DaemonUnavailable(message) from error


def check_can_ask(what: str) -> None:
    """Refuse, where nobody could confirm it, what is asked for without --yes (BadParameter)."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"needed to {what} without asking", param_hint="--yes")


def confirm(question: str) -> None:
    """Ask on the terminal; unless the answer is yes, the command ends with exit status 1."""
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from error
        raise
