"""The `kvd-ctl` command: its arguments.

Exit status 0; 1, with a line on stderr, where kvd does not answer or refuses; 2 for usage.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace

from kvd.config import Config
from kvd.loading import find, load
from kvd.protocol.endpoint import SYSTEM_SOCKET, is_default
from kvd_client import Client, ClientStatus, DaemonUnavailable, KvdError, StatusReply

try:
    import typer

    from kvd_ctl import commands, configuration, keys, service
    from kvd_ctl.bench import measure
    from kvd_ctl.doctor import examine
    from kvd_ctl.drain import begin_drain, undo_drain
    from kvd_ctl.explain import explain_match
    from kvd_ctl.notation import parse_duration, parse_tokens
    from kvd_ctl.prefetch import bring_up
    from kvd_ctl.purge import find_leftovers, remove_leftovers, tell_leftovers
    from kvd_ctl.text import load_tokenizer, tokens_of
    from kvd_ctl.top import watch
    from kvd_ctl.tree import list_tree
except ModuleNotFoundError as error:
    sys.exit(f"kvd-ctl: {error}: install kvd[ctl]")

NAME = "kvd-ctl"

app = typer.Typer(
    help="Inspect a running kvd, and say what it keeps.",
    epilog="Example: kvd-ctl status --json | jq .counters",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(
    help="Make and list the keys by which clients come over TCP.",
    epilog="Example: kvd-ctl keys new engine-1",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")

Endpoint = Annotated[
    str | None,
    typer.Option(help="Where kvd listens; by default where clients look.", envvar="KVD_ENDPOINT"),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.01)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Limit = Annotated[int, typer.Option(help="List so many at most.", min=1, max=1000)]
Owner = Annotated[str, typer.Option(help="Whose pins they are.")]
Root = Annotated[Path, typer.Option(help="Where the system lies, as of an image.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="What kvd is configured by, if by a file.")
]
Text = Annotated[str | None, typer.Option(help="A prompt as text, instead of TOKENS.")]
TokenizerFolder = Annotated[
    Any, typer.Option(parser=load_tokenizer, metavar="DIR", help="A model's folder, to read text.")
]
NamespaceNumber = Annotated[
    int, typer.Argument(metavar="NAMESPACE", help="Its number, as `kvd-ctl namespaces` says.")
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called.")]
KeyDirectory = Annotated[
    Path,
    typer.Option(
        help="Where the keys lie.",
        default_factory=keys.default_directory,
        show_default="~/.config/kvd/keys",
    ),
]
_tokens = typer.Argument(
    parser=parse_tokens,
    metavar="TOKENS",
    help="Token ids: 1,2,3; or @FILE, a JSON list, or uint32 if it ends in .bin; or - for stdin.",
)


@app.callback()
def with_keys(
    key: Annotated[str, typer.Option(help="By TCP: the file of our secret key.")] = "",
    server_key: Annotated[str, typer.Option(help="By TCP: the file of kvd's key.")] = "",
) -> None:
    """Note the keys where the client looks for them."""
    for variable, path in {"KVD_KEY": key, "KVD_SERVER_KEY": server_key}.items():
        if path:
            os.environ[variable] = path


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


@app.command(epilog="Example: kvd-ctl config --json | jq '.[] | select(.origin != \"default\")'")
def config(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Show what kvd goes by, and where each value comes from."""
    with _client(endpoint, timeout) as client:
        configuration.config(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl reload && kvd-ctl config")
def reload(
    wait: Annotated[bool, typer.Option("--wait", help="For service files: it always does.")] = True,
    endpoint: Endpoint = None,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Have kvd read its configuration anew; where that is not good, kvd goes on as it was."""
    with _client(endpoint, timeout) as client:
        configuration.reload(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl install && systemctl enable --now kvd.socket kvd.service")
def install(
    gpu: Annotated[bool, typer.Option("--gpu", help="Let it use NVIDIA's GPUs.")] = False,
    root: Root = service.SYSTEM,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make this kvd a service of the system, which systemd starts and watches.

    What was changed by hand since it was installed stays as it is.
    """
    with _failures():
        service.install(root, gpu=gpu, dry_run=dry_run, as_json=as_json)


@app.command(epilog="Example: kvd-ctl uninstall --dry-run")
def uninstall(
    purge_data: Annotated[
        bool, typer.Option("--purge-data", help="Remove what is cached, in memory and on disk.")
    ] = False,
    root: Root = service.SYSTEM,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Stop the service and remove what `kvd-ctl install` put in place."""
    with _failures():
        service.uninstall(root, purge_data=purge_data, dry_run=dry_run, as_json=as_json)


@app.command(epilog="Example: kvd-ctl top --count 1 --json | jq .hit_rate")
def top(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=86_400)
    ] = 2.0,
    count: Annotated[int | None, typer.Option(help="End after so many looks.", min=1)] = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a look.")] = False,
) -> None:
    """Watch what kvd does: rates per second, hit rate, pages, tiers, the busiest sessions.

    It goes on while kvd does not answer and after it was restarted, until Ctrl-C.
    """
    with _client(endpoint, timeout) as client:
        watch(client, interval, count, as_json=as_json)


@app.command(epilog="Example: kvd-ctl tree 1 --depth 2 --limit 20")
def tree(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, _tokens] = None,
    depth: Annotated[int, typer.Option(help="So many levels.", min=1, max=100)] = 100,
    limit: Limit = 100,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Branches by their tokens, not the biggest first.")
    ] = False,
    tokenizer: TokenizerFolder = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """List what a namespace has, branch by branch; with TOKENS, what is there behind them.

    Of very many branches the biggest are listed. Hits are matches that went through a branch; its
    age is how many leases ended since its last one did.
    """
    with _client(endpoint, timeout) as client:
        list_tree(
            client,
            namespace,
            tokens or b"",
            depth,
            limit,
            tokenizer,
            in_order=in_order,
            as_json=as_json,
        )


@app.command(epilog="Example: kvd-ctl explain 1 @prompt.json")
def explain(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, _tokens] = None,
    text: Text = None,
    tokenizer: TokenizerFolder = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Say how far a prompt matches, by tier, and why not further.

    Whether the rest was evicted since kvd started, or was not; and which other namespaces have more
    of it, and what tells them from this one. Nothing is leased or touched for it.
    """
    asked = tokens_of(tokens, text, tokenizer)
    with _client(endpoint, timeout) as client:
        explain_match(client, namespace, asked, as_json=as_json)


@app.command(epilog="Example: kvd-ctl prefetch 1 @prompt.json --timeout 10")
def prefetch(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, _tokens] = None,
    text: Text = None,
    tokenizer: TokenizerFolder = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Bring to memory what lower tiers have of a prompt; exit status 1 where not all came in time.

    What is still on its way then goes on.
    """
    asked = tokens_of(tokens, text, tokenizer)
    with _client(endpoint, timeout) as client:
        is_there = bring_up(client, namespace, asked, as_json=as_json)
    if not is_there:
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl drain --stop --timeout 60")
def drain(
    stop: Annotated[bool, typer.Option("--stop", help="Stop kvd when all is saved.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Have it take sessions again.")] = False,
    endpoint: Endpoint = None,
    timeout: Timeout = 600.0,
    as_json: Json = False,
) -> None:
    """Have kvd take no new sessions, wait until all leases have ended, and have all saved.

    Sessions that there are go on. When the time to wait is over, kvd goes on draining.
    """
    if stop and undo:
        raise typer.BadParameter("it cannot be had with --undo", param_hint="--stop")
    with _client(endpoint, timeout) as client:
        if undo:
            undo_drain(client, as_json=as_json)
        else:
            begin_drain(client, stop=stop, as_json=as_json)


@app.command(epilog="Example: kvd-ctl bench --seconds 1")
def bench(
    seconds: Annotated[float, typer.Option(help="Match for so long.", min=0.1, max=60)] = 2.0,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Measure how fast the running kvd answers, with a megabyte of its memory.

    Where all memory is taken it measures misses alone, so that no block of others goes for it.
    """
    with _client(endpoint, timeout, maps=True) as client:
        measure(client, seconds, as_json=as_json)


@app.command(epilog="Example: kvd-ctl purge --dry-run")
def purge(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Remove what daemons that do not run have left of this user: memory, disk and sockets.

    With it goes what their next start would have found. What a daemon or a client still uses stays.
    Exit status 1 where something could not be removed.
    """
    with _failures():
        found = find_leftovers(_settings(config, endpoint))
    if not as_json:
        tell_leftovers(found)
    if found and not (yes or dry_run):
        if not sys.stdin.isatty():
            raise typer.BadParameter("needed to remove without asking", param_hint="--yes")
        typer.confirm("Remove all of these?", abort=True, err=True)
    if not remove_leftovers(found, dry_run=dry_run, as_json=as_json):
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl doctor || kvd-ctl status")
def doctor(
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Look whether this machine has what kvd needs; exit status 1 where something is bad."""
    with _failures():
        settings = _settings(config, endpoint)
        is_well = examine(_answer(settings, timeout), settings, as_json=as_json)
    if not is_well:
        raise typer.Exit(1)


@keys_app.command("new", epilog="Example: kvd-ctl keys new server --server")
def keys_new(
    name: KeyName,
    directory: KeyDirectory,
    is_server: Annotated[bool, typer.Option("--server", help="It is to be kvd's own.")] = False,
    as_json: Json = False,
) -> None:
    """Make a key, and tell what to configure for it."""
    with _failures():
        keys.new(name, directory.absolute(), is_server=is_server, as_json=as_json)


@keys_app.command("list", epilog="Example: kvd-ctl keys list --json | jq '.clients[].name'")
def keys_list(
    directory: KeyDirectory,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """List the keys that lie here and, where kvd answers, those that it lets in."""
    with _failures():
        keys.list_all(directory, _allowed(endpoint, timeout), as_json=as_json)


@keys_app.command("show", epilog="Example: kvd-ctl keys show engine-1")
def keys_show(name: KeyName, directory: KeyDirectory, as_json: Json = False) -> None:
    """Print the half of a key that everybody may see."""
    with _failures():
        keys.show(name, directory, as_json=as_json)


def _allowed(endpoint: str | None, timeout: float) -> tuple[ClientStatus, ...]:
    """Who may come over TCP; nobody where kvd does not answer."""
    try:
        with _client(endpoint, timeout) as client:
            return client.status().clients
    except typer.Exit:
        return ()


def _settings(config: Path | None, endpoint: str | None) -> Config:
    """As a daemon would have them: what the file says comes first."""
    settings = load(find(str(config)) if config else None, os.environ).config
    return replace(settings, endpoint=settings.endpoint or endpoint or "")


def _answer(settings: Config, timeout: float) -> StatusReply | KvdError:
    try:
        with Client(settings.endpoint or None, timeout=timeout, name=NAME, maps=False) as client:
            _check_listening(client.endpoint)
            return client.status()
    except KvdError as error:
        return error


@contextmanager
def _client(endpoint: str | None, timeout: float, *, maps: bool = False) -> Iterator[Client]:
    """A client of a daemon that is there; what goes wrong is said in one line.

    Unless it `maps`, it may be of another user, or in another container.
    """
    with _failures(), Client(endpoint, timeout=timeout, name=NAME, maps=maps) as client:
        _check_listening(client.endpoint)
        yield client


@contextmanager
def _failures() -> Iterator[None]:
    """What goes wrong is said in one line."""
    try:
        yield
    except KvdError as error:
        print(f"kvd-ctl: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _check_listening(endpoint: str) -> None:
    """Raises DaemonUnavailable at once where nobody listens: a client would wait for a start."""
    if not endpoint.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except BlockingIOError:
            pass  # somebody does, and is busy
        except OSError as error:
            message = f"kvd does not listen on {endpoint}: {error.strerror}"
            if is_default(endpoint):
                message += f"; as a service it listens on ipc://{SYSTEM_SOCKET}"
            raise DaemonUnavailable(message) from error


def main() -> None:
    """Entry point of the `kvd-ctl` script."""
    # What the client library would log, the error says.
    logging.getLogger("kvd_client").addHandler(logging.NullHandler())
    try:
        app()
    except OSError as error:  # as of a full disk, where the output goes
        sys.exit(f"kvd-ctl: {error}")


if __name__ == "__main__":
    main()
