"""Access: what may be asked over a connection, and of which namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.protocol.errors import Forbidden
from kvd.protocol.verbs import INFERENCE, OPERATOR, Verb, verbs_named

if TYPE_CHECKING:
    from kvd.config import ClientConfig
    from kvd.protocol.messages import AnyRequest


@dataclass(frozen=True, slots=True)
class Access:
    """`client` is who came with a key; without one, every namespace may be opened."""

    verbs: frozenset[Verb]
    client: ClientConfig | None = None

    @property
    def is_operator(self) -> bool:
        return self.verbs == OPERATOR

    def check(self, request: AnyRequest) -> None:
        """Raises Forbidden for a verb that is not for them."""
        if type(request) not in self.verbs:
            who = f"client {self.client.name}" if self.client else "whoever comes here"
            where = "operators ask at operator.endpoint, or with a key of theirs"
            raise Forbidden(f"{request.verb} is not for {who}: {where}")

    def may_open(self, model: str, salt: str) -> bool:
        """Whether the namespaces of a model and a salt are theirs."""
        if (client := self.client) is None:
            return True
        return model in (client.models or (model,)) and salt in (client.salts or (salt,))


EVERYTHING = Access(OPERATOR)
INFERENCE_ALONE = Access(INFERENCE)
NOTHING = Access(frozenset())


def access_of(client: ClientConfig) -> Access:
    """What a configured client may ask."""
    return Access(verbs_named(client.verbs), client)
