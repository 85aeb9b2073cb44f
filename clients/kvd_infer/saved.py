"""What kvd keeps of a sequence beside its tokens and its KV, for another process to go on."""

from __future__ import annotations

import math
import time
from typing import Annotated, Self, TypeAlias

import msgspec
from msgspec import Meta

from kvd_client import BadRequest
from kvd_infer.sampler import SamplingParams
from kvd_infer.sequence import Request

Int64: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Saved(msgspec.Struct, frozen=True):
    """As MessagePack, of which any client may have written anything."""

    params: SamplingParams
    priority: Int64
    num_prompt: Annotated[int, Meta(ge=1)]
    deadline: float  # as time.time() has it: another boot has another monotonic clock
    last: int  # the last token, which has no KV yet

    def __post_init__(self) -> None:
        if math.isnan(self.deadline):
            raise ValueError("the deadline is no number")

    @classmethod
    def of(cls, request: Request, last: int) -> Self:
        deadline = request.deadline - time.monotonic() + time.time()
        return cls(request.params, request.priority, len(request.tokens), deadline, last)

    @classmethod
    def decode(cls, state: bytes) -> Self:
        """Raises BadRequest for what no engine saved."""
        try:
            return msgspec.msgpack.decode(state, type=cls)
        except msgspec.MsgspecError as error:
            raise BadRequest(str(error)) from error

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def request(self, id: str, tokens: list[int]) -> Request:
        """What was asked, of which so many tokens are there. Raises BadRequest."""
        if self.num_prompt > len(tokens):
            raise BadRequest(f"a prompt of {self.num_prompt} tokens, of which {len(tokens)} are")
        deadline = self.deadline - time.time() + time.monotonic()
        prompt = tuple(tokens[: self.num_prompt])
        return Request(id, prompt, self.params.seeded(), self.priority, deadline)


def check_saving(request: Request) -> None:
    """Refuse what would not be the same when it was saved: what is of a wrong type, or too large.

    Raises BadRequest.
    """
    try:
        Saved.decode(Saved.of(request, last=0).encode())
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(str(error)) from error
