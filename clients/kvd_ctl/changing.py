"""Commands that say what a running kvd keeps, and how it goes on."""

from typing import Annotated

import typer

from kvd_ctl import commands, configuration
from kvd_ctl.app import (
    NAME,
    TOKENS,
    Endpoint,
    Json,
    NamespaceNumber,
    Owner,
    Text,
    Timeout,
    TokenizerFolder,
    Yes,
    app,
    check_can_ask,
    client_of,
    confirm,
)
from kvd_ctl.drain import begin_drain, undo_drain
from kvd_ctl.notation import parse_duration
from kvd_ctl.prefetch import bring_up
from kvd_ctl.text import tokens_of


@app.command(epilog="Example: kvd-ctl checkpoint --timeout 60")
def checkpoint(endpoint: Endpoint = None, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Copy all blocks to the tiers that survive the machine, and sync them.

    When the time to wait is over, kvd goes on with it.
    """
    with client_of(endpoint, timeout) as client:
        commands.checkpoint(client, as_json=as_json)


@app.command(epilog="Example: kvd-ctl verify || kvd-ctl status")
def verify(endpoint: Endpoint = None, timeout: Timeout = 600.0, as_json: Json = False) -> None:
    """Compare all blocks with their checksums; exit status 1 where some were bad or missing.

    They are removed, with what follows them. Interrupting it does no harm: kvd goes on, as it does
    when the time to wait is over.
    """
    with client_of(endpoint, timeout) as client:
        is_good = commands.verify(client, as_json=as_json)
    if not is_good:
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl pin 1 @prompt.json --for 2h")
def pin(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes, TOKENS],
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
    with client_of(endpoint, timeout) as client:
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
    with client_of(endpoint, timeout) as client:
        commands.unpin(client, numbers or (), owner, as_json=as_json)


@app.command(epilog="Example: kvd-ctl drop 1 @prompt.json --from-token 512")
def drop(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, TOKENS] = None,
    from_token: Annotated[
        int, typer.Option(help="Keep the blocks before the one of this token.", min=0)
    ] = 0,
    yes: Yes = False,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Remove the blocks of these tokens and all that follow them, or all of a namespace."""
    if tokens is None and from_token:
        raise typer.BadParameter(
            "it counts in TOKENS, which are missing", param_hint="--from-token"
        )
    if tokens is None and not yes:
        check_can_ask("drop a namespace")
    with client_of(endpoint, timeout) as client:
        if tokens is None and not yes:
            confirm(commands.question(client, namespace))
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
    with client_of(endpoint, timeout) as client:
        commands.discard(client, name, namespace, as_json=as_json)


@app.command(epilog="Example: kvd-ctl prefetch 1 @prompt.json --timeout 10")
def prefetch(
    namespace: NamespaceNumber,
    tokens: Annotated[bytes | None, TOKENS] = None,
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
    with client_of(endpoint, timeout) as client:
        is_there = bring_up(client, namespace, asked, as_json=as_json)
    if not is_there:
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl reload && kvd-ctl config")
def reload(
    wait: Annotated[bool, typer.Option("--wait", help="For service files: it always does.")] = True,
    endpoint: Endpoint = None,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Have kvd read its configuration anew; where that is not good, kvd goes on as it was."""
    with client_of(endpoint, timeout) as client:
        configuration.reload(client, as_json=as_json)


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
    with client_of(endpoint, timeout) as client:
        if undo:
            undo_drain(client, as_json=as_json)
        else:
            begin_drain(client, stop=stop, as_json=as_json)
