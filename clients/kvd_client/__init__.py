"""The client library: attach, match, lease, attend over pages where they lie, commit.

    with Client() as client:
        namespace = client.open(Identity(model="m", revision="r1"), layout)
        with namespace.match(prompt[:-1]) as lease:
            ...

It does not import the daemon, and works without torch.
"""

from kvd.protocol.errors import (
    BadRequest,
    DaemonUnavailable,
    DeadlineExceeded,
    KvdError,
    LayoutMismatch,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
    PagesInUse,
    Unsupported,
)
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd_client.client import Client, Namespace
from kvd_client.lease import Lease

__all__ = [
    "BadRequest",
    "Client",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "Identity",
    "KvdError",
    "Layout",
    "LayoutMismatch",
    "Lease",
    "LeaseEnded",
    "LimitExceeded",
    "Namespace",
    "OutOfPages",
    "PagesInUse",
    "Unsupported",
]
