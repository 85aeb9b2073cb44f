"""Commands that ask a running kvd how it is."""

from typing import Annotated

import typer

from kvd.protocol.units import MAX_INTEGER
from kvd_ctl import commands, configuration
from kvd_ctl.app import (
    TOKENS,
    Endpoint,
    Json,
    Limit,
    NamespaceNumber,
    Text,
    Timeout,
    TokenizerFolder,
    app,
    client_of,
)
from kvd_ctl.bench import measure
from kvd_ctl.events import follow, status_of_events
from kvd_ctl.explain import explain_match
from kvd_ctl.text import tokens_of
from kvd_ctl.top import watch
from kvd_ctl.tree import list_tree


@app.command(epilog="Example: kvd-ctl ping --timeout 0.5")
def ping(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Ask whether kvd answers, and how fast."""
    with client_of(endpoint, timeout) as client:
        commands.ping(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl status --json | jq .tiers")
def status(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Show pages by state, hits and misses, and what went wrong."""
    with client_of(endpoint, timeout) as client:
        commands.status(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl tiers --json | jq '.[].trouble'")
def tiers(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List the tiers: what each holds, what waits for it, and what is wrong with it."""
    with client_of(endpoint, timeout) as client:
        commands.tiers(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl sessions --json | jq '.[].client'")
def sessions(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List who is attached, what each holds and how long its requests took."""
    with client_of(endpoint, timeout) as client:
        commands.sessions(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl namespaces --json | jq '.[].revision'")
def namespaces(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """List the namespaces: which model's KV each is, and what it holds."""
    with client_of(endpoint, timeout) as client:
        commands.namespaces(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl leases --limit 10")
def leases(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the leases, the oldest first."""
    with client_of(endpoint, timeout) as client:
        commands.leases(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl pins --json | jq '.pins[].owner'")
def pins(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the pins, the oldest first."""
    with client_of(endpoint, timeout) as client:
        commands.pins(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl sequences --json | jq '.sequences[].sequence'")
def sequences(
    limit: Limit = 100, endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False
) -> None:
    """List the saved sequences, the oldest first."""
    with client_of(endpoint, timeout) as client:
        commands.sequences(client, limit, as_json=as_json)


@app.command(epilog="Example: kvd-ctl config --json | jq '.[] | select(.origin != \"default\")'")
def config(endpoint: Endpoint = None, timeout: Timeout = 2.0, as_json: Json = False) -> None:
    """Show what kvd goes by, and where each value comes from."""
    with client_of(endpoint, timeout) as client:
        configuration.config(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl events --since 0 --json | jq .type")
def events(
    since: Annotated[
        int | None,
        typer.Option(
            help="From this batch on, or what is there; else what comes.",
            min=0,
            max=MAX_INTEGER,
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after so many events.", min=1)] = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Print what comes to the tiers and leaves them, a line each, until it is interrupted."""
    with client_of(endpoint, timeout) as client:
        published = status_of_events(client, since)
    follow(published, since, count, timeout, as_json=as_json)


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
    with client_of(endpoint, timeout) as client:
        watch(client, interval, count, as_json=as_json)


@app.command(epilog="Example: kvd-ctl tree 1 --depth 2 --limit 20")
def tree(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, TOKENS] = None,
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
    with client_of(endpoint, timeout) as client:
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
    tokens: Annotated[bytes | None, TOKENS] = None,
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
    with client_of(endpoint, timeout) as client:
        explain_match(client, namespace, asked, as_json=as_json)


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
    with client_of(endpoint, timeout, maps=True) as client:
        measure(client, seconds, as_json=as_json)
