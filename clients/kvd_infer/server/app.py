"""The application: a request's prompts go to the router, their outputs come back as an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvd_client import BadRequest, LimitExceeded
from kvd_infer import sequence
from kvd_infer.router import new_id
from kvd_infer.server.answers import END, Answer, ChatAnswer, Piece, TextAnswer, event
from kvd_infer.server.messages import (
    ChatRequest,
    CompletionRequest,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    PromptDetails,
    TextRequest,
    Trouble,
    Usage,
    read,
)

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from kvd_client import Client
    from kvd_infer.engine import Output
    from kvd_infer.prompts import Prompts
    from kvd_infer.router import Router, Stream

R = TypeVar("R", bound=CompletionRequest)
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
RETRY_SECONDS = 1
# Who reads nothing for so long is taken for one that never will, and gives up his place.
READ_SECONDS = 60.0
NOBODY_READS = 499


class Service:
    """One model, and what it is asked over HTTP: `app` is an ASGI application."""

    def __init__(
        self, router: Router, prompts: Prompts, name: str, max_tokens: int, client: Client | None
    ) -> None:
        """`max_tokens` is how long a prompt and its answer may get together."""
        self._router = router
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._client = client
        self._card = ModelCard(name, int(time.time()))
        self.is_stopping = False
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete_text, methods=["POST"]),
                Route("/v1/chat/completions", self._complete_chat, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
                Route("/health", self._tell_health),
            ],
            exception_handlers=dict.fromkeys(
                (BadRequest, ClientDisconnect, HTTPException, Exception), _refusal
            ),
        )

    # --- what is there ---

    async def _list_models(self, request: Request) -> Response:
        return _json(ModelList([self._card]))

    async def _get_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._card)

    async def _tell_health(self, request: Request) -> Response:
        kvd: Literal["attached", "away", "unused"] = "unused"
        if self._client is not None:
            kvd = "attached" if self._client.attached else "away"
        is_ready = self._router.is_alive and not self.is_stopping
        health = Health(is_ready, kvd, self._router.num_requests)
        return _json(health, 200 if is_ready else 503)

    def _check_model(self, name: str) -> None:
        if name != self._card.id:
            raise HTTPException(404, f"there is no model {name} here, but {self._card.id}")

    # --- completions ---

    async def _complete_text(self, request: Request) -> Response:
        asked = await self._asked(request, TextRequest)
        if len(asked.prompts) > (most := self._router.max_requests):
            raise HTTPException(400, f"{len(asked.prompts)} prompts in one request: {most} at most")
        ids = await asyncio.to_thread(self._ids_of_prompts, asked.prompts)
        return await self._answer(request, asked, ids, TextAnswer(asked, self._prompts.tokenizer))

    async def _complete_chat(self, request: Request) -> Response:
        asked = await self._asked(request, ChatRequest)
        messages = [message.for_template() for message in asked.messages]
        ids = await asyncio.to_thread(self._prompts.of_chat, messages, self._max_tokens)
        return await self._answer(request, asked, [ids], ChatAnswer(asked, self._prompts.tokenizer))

    async def _asked(self, request: Request, kind: type[R]) -> R:
        asked = await asyncio.to_thread(read, await _body(request), kind)
        self._check_model(asked.model)
        return asked

    def _ids_of_prompts(self, prompts: list[str | list[int]]) -> list[list[int]]:
        return [
            self._prompts.of_text(each, self._max_tokens) if isinstance(each, str) else each
            for each in prompts
        ]

    async def _answer(
        self, request: Request, asked: CompletionRequest, prompts: list[list[int]], answer: Answer
    ) -> Response:
        tally = _Tally(sum(map(len, prompts)))
        pieces = _pieces(self._submit(asked, prompts), tally)
        if not asked.stream:
            all_pieces = await _while_there(request, _collect(pieces))
            return _json(answer.whole(all_pieces, tally.usage))
        # What is wrong with a request is known with its first piece, and then has a status.
        first = await _while_there(request, _next(pieces))
        last = tally if asked.stream_options.include_usage else None
        return _ReadStream(_events(answer, first, pieces, last), media_type="text/event-stream")

    def _submit(self, asked: CompletionRequest, prompts: list[list[int]]) -> list[Stream]:
        """All of them or none."""
        requests = [self._request(asked, ids) for ids in prompts]
        try:
            return self._router.submit_all(requests)
        except LimitExceeded as error:
            status = 503 if self.is_stopping else 429
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise HTTPException(status, error.message, headers) from error

    def _request(self, asked: CompletionRequest, ids: list[int]) -> sequence.Request:
        params = asked.params(self._max_tokens - len(ids))
        return sequence.Request(new_id(), tuple(ids), params, asked.priority)


class _ReadStream(StreamingResponse):
    """A stream that ends when its client, connected still, takes nothing of it any more."""

    async def stream_response(self, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(READ_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_soon)
        except TimeoutError:
            logger.warning("reason=unread a stream was ended: nobody reads it")


@dataclass(slots=True)
class _Tally:
    """What an answer takes, counted as its pieces come."""

    num_prompt: int
    num_generated: int = 0
    cached: dict[str, int] = field(default_factory=dict)  # tokens of the prompt of each request

    def count(self, output: Output) -> None:
        self.num_generated += len(output.tokens)
        cached = self.cached.get(output.request, 0)  # others of its samples may have found less
        self.cached[output.request] = max(cached, output.cached_tokens)

    @property
    def usage(self) -> Usage:
        return Usage(
            self.num_prompt,
            self.num_generated,
            self.num_prompt + self.num_generated,
            PromptDetails(sum(self.cached.values())),
        )


async def _pieces(streams: list[Stream], tally: _Tally) -> AsyncIterator[Piece]:
    """What comes of one request after the other; all are cancelled where nobody goes on."""
    try:
        for place, stream in enumerate(streams):
            async for output in stream:
                tally.count(output)
                if output.reason not in (None, "stop", "length"):
                    raise HTTPException(503, f"the request was ended: {output.reason}")
                index = place * stream.request.params.n + output.sample
                yield Piece(index, output.text, output.tokens, output.reason)
    finally:
        for stream in streams:
            stream.cancel()


async def _collect(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


async def _events(
    answer: Answer, first: Piece, others: AsyncIterator[Piece], tally: _Tally | None
) -> AsyncIterator[bytes]:
    """The body of a stream; what goes wrong on the way is its last event."""
    try:
        for chunk in answer.chunks(first):
            yield event(chunk)
        async for piece in others:
            for chunk in answer.chunks(piece):
                yield event(chunk)
        if tally is not None:
            yield event(answer.last(tally.usage))
        yield END
    except Exception as error:
        status, reply = _error(error)
        if status == 500:
            logger.exception("reason=internal an answer failed")
        yield event(reply)


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do this, unless the client goes away first. Raises ClientDisconnect."""
    tasks = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            raise ClientDisconnect
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request has at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


# --- answers that are errors ---


def _refusal(request: Request, error: Exception) -> Response:
    """What nobody expected, a status of 500, is logged by the server."""
    status, reply = _error(error)
    return _json(reply, status, error.headers if isinstance(error, HTTPException) else None)


def _error(error: Exception) -> tuple[int, ErrorReply]:
    status, message, param = 500, f"{type(error).__name__}: {error}", None
    match error:
        case BadRequest():
            status, message, param = 400, error.message, error.details.get("param")
        case HTTPException():
            status, message = error.status_code, error.detail
        case ClientDisconnect():
            status = NOBODY_READS
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, ErrorReply(Trouble(message, kind, param))


def _json(
    message: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(message)
    return Response(body, status, headers, media_type="application/json")
