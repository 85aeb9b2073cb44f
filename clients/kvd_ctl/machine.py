"""Commands for a machine: the service, what daemons have left, what kvd needs, the keys of TCP."""

from pathlib import Path
from typing import Annotated

import typer

from kvd.config import Config
from kvd_client import ClientStatus
from kvd_ctl import keys, service
from kvd_ctl.app import (
    Endpoint,
    Json,
    Timeout,
    Yes,
    app,
    check_can_ask,
    client_of,
    confirm,
    failures,
)
from kvd_ctl.doctor import examine
from kvd_ctl.purge import find_leftovers, remove_leftovers, tell_leftovers
from kvd_ctl.settings import find_settings

keys_app = typer.Typer(
    help="Make and list the keys by which clients come over TCP.",
    epilog="Example: kvd-ctl keys new engine-1",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")

Root = Annotated[Path, typer.Option(help="Where the system lies, as of an image.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="What kvd is configured by, if by a file.")
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
    with failures():
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
    with failures():
        service.uninstall(root, purge_data=purge_data, dry_run=dry_run, as_json=as_json)


@app.command(epilog="Example: kvd-ctl purge --dry-run")
def purge(
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Remove what daemons that do not run have left: memory, disk and sockets.

    It looks where kvd is by --config, else where the kvd that answers says, or its service, and at
    the default places of this user. With it goes what their next start would have found. What a
    daemon or a client still uses stays. Exit status 1 where something could not be removed.
    """
    with failures():
        settings = find_settings(config, endpoint, timeout)
        looked_at = {settings.source: settings.config}
        if config is None:
            looked_at["this user's defaults"] = Config()
        found = find_leftovers(looked_at.values())
    if not as_json:
        tell_leftovers("; ".join(looked_at), found)
    if found and not (yes or dry_run):
        check_can_ask("remove")
        confirm("Remove all of these?")
    if not remove_leftovers(found, dry_run=dry_run, as_json=as_json):
        raise typer.Exit(1)


@app.command(epilog="Example: kvd-ctl doctor || kvd-ctl status")
def doctor(
    config: ConfigFile = None,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """Look whether this machine has what kvd needs; exit status 1 where something is bad.

    What it needs is what --config says, else the kvd that answers, or the service's file.
    """
    with failures():
        is_well = examine(find_settings(config, endpoint, timeout), as_json=as_json)
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
    with failures():
        keys.new(name, directory.absolute(), is_server=is_server, as_json=as_json)


@keys_app.command("list", epilog="Example: kvd-ctl keys list --json | jq '.clients[].name'")
def keys_list(
    directory: KeyDirectory,
    endpoint: Endpoint = None,
    timeout: Timeout = 2.0,
    as_json: Json = False,
) -> None:
    """List the keys that lie here and, where kvd answers, those that it lets in."""
    with failures():
        keys.list_all(directory, _allowed(endpoint, timeout), as_json=as_json)


@keys_app.command("show", epilog="Example: kvd-ctl keys show engine-1")
def keys_show(name: KeyName, directory: KeyDirectory, as_json: Json = False) -> None:
    """Print the half of a key that everybody may see."""
    with failures():
        keys.show(name, directory, as_json=as_json)


def _allowed(endpoint: str | None, timeout: float) -> tuple[ClientStatus, ...]:
    """Who may come over TCP; nobody where kvd does not answer."""
    try:
        with client_of(endpoint, timeout) as client:
            return client.status().clients
    except typer.Exit:
        return ()
