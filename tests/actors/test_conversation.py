"""What a client of an earlier version says is answered as it was then.

After a raise of PROTOCOL_VERSION record a conversation of the new one with

    KVD_WRITE_GOLDEN=1 pytest tests/actors/test_conversation.py

which makes the file that is missing and never touches one that is there.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvd.protocol.messages import PROTOCOL_VERSION
from kvd.testing.daemons import running_daemon
from tests.actors.conversation import Replay, record
from tests.actors.wire import Wire
from tests.e2e.support import SESSIONS, faultless_daemon, settings

GOLDEN = Path(__file__).parent.parent / "protocol/golden"
SPOKEN = GOLDEN / f"conversation-v{PROTOCOL_VERSION}.json"
# No heartbeat comes between what is recorded.
SETTINGS = settings(sessions=SESSIONS | {"heartbeat_seconds": 600.0})


if os.environ.get("KVD_WRITE_GOLDEN") and not SPOKEN.exists():
    with running_daemon(SETTINGS) as recorded, TemporaryDirectory() as directory:
        SPOKEN.write_text(json.dumps(record(recorded, Path(directory)), indent=1) + "\n")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("conversation-*")), ids=lambda path: path.stem)
def test_a_recorded_conversation_goes_as_it_went(path: Path) -> None:
    with faultless_daemon(SETTINGS) as daemon, closing(Wire(daemon.endpoint)) as wire:
        Replay(wire, json.loads(path.read_text())).run()
