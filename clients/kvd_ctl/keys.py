"""`kvd-ctl keys`: the keys by which clients come over TCP, and who may come with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvd_client import ClientStatus, list_public, load_public, make_pair, to_json
from kvd_ctl import render

CLIENT_LINES = """
# In kvd's configuration; the salts are those of the namespaces that it may open:
[[clients]]
name = "{name}"
key = "{key}"
verbs = ["inference"]
salts = [""]"""
SERVER_LINES = """
# In kvd's configuration; clients need {directory}/{name}.key:
[tcp]
endpoint = "tcp://127.0.0.1:7654"
server_key = "{directory}/{name}.key_secret\""""


def default_directory() -> Path:
    """Where keys lie, unless somebody says where."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "kvd/keys"


def new(name: str, directory: Path, *, is_server: bool, as_json: bool) -> None:
    """Make a pair, and tell what to configure for it."""
    key = make_pair(directory, name).public
    if as_json:
        print(to_json({"name": name, "key": key, "directory": str(directory)}))
        return
    print(f"key {name}: {key}")
    print(f"{directory}/{name}.key_secret is its secret half: whoever has it is {name}")
    lines = SERVER_LINES if is_server else CLIENT_LINES
    print(lines.format(name=name, key=key, directory=directory))


def show(name: str, directory: Path, *, as_json: bool) -> None:
    """Print the half of a key that may be shown."""
    key = load_public(directory / f"{name}.key")
    print(to_json({"name": name, "key": key}) if as_json else key)


def list_all(directory: Path, clients: Sequence[ClientStatus], *, as_json: bool) -> None:
    """List the keys of a directory, and the clients that kvd lets in."""
    files = list_public(directory)
    if as_json:
        print(to_json({"files": files, "clients": clients}))
        return
    names = {key: name for name, key in files.items()}
    rows = [
        {
            "client": each.name,
            "verbs": ",".join(each.verbs),
            "sessions": each.num_sessions,
            "file": names.pop(each.key, ""),
            "key": each.key,
        }
        for each in clients
    ]
    unknown: dict[str, object] = {"client": "", "verbs": "", "sessions": ""}
    rows += [unknown | {"file": name, "key": key} for key, name in names.items()]
    render.table("keys", rows)
