"""The client library: attach, match, lease, attend over pages where they lie, commit.

    with Client() as client:
        namespace = client.open(Identity(model="m", revision="r1"), layout)
        with namespace.match(prompt[:-1]) as lease:
            ...

It does not import the daemon, and works without torch.
"""

from kvd.protocol.certificates import list_public, load_public, make_pair
from kvd.protocol.codec import to_json
from kvd.protocol.errors import (
    BadRequest,
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    Dropped,
    Forbidden,
    KvdError,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
    PagesInUse,
    SequenceTaken,
    TierFailed,
    UnknownNamespace,
    UnknownSequence,
    Unsupported,
    VersionMismatch,
)
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd.protocol.messages import (
    ClientStatus,
    ConfigChange,
    ConfigReply,
    DropResult,
    EventStatus,
    ExplainReply,
    LeasesReply,
    NamespaceStatus,
    PinResult,
    ReloadReply,
    SequencesReply,
    SequenceStatus,
    Shortage,
    StatusReply,
    TierStatus,
    TreeReply,
    VerifyReply,
)
from kvd.protocol.units import format_bytes
from kvd_client.client import Client, Lease, Namespace
from kvd_client.namespace import Resumed

__all__ = [
    "BadRequest",
    "Client",
    "ClientStatus",
    "ConfigChange",
    "ConfigError",
    "ConfigReply",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "DropResult",
    "Dropped",
    "EventStatus",
    "ExplainReply",
    "Forbidden",
    "Identity",
    "KvdError",
    "Layout",
    "Lease",
    "LeaseEnded",
    "LeasesReply",
    "LimitExceeded",
    "Namespace",
    "NamespaceStatus",
    "OutOfPages",
    "PagesInUse",
    "PinResult",
    "ReloadReply",
    "Resumed",
    "SequenceStatus",
    "SequenceTaken",
    "SequencesReply",
    "Shortage",
    "StatusReply",
    "TierFailed",
    "TierStatus",
    "TreeReply",
    "UnknownNamespace",
    "UnknownSequence",
    "Unsupported",
    "VerifyReply",
    "VersionMismatch",
    "format_bytes",
    "list_public",
    "load_public",
    "make_pair",
    "to_json",
]
