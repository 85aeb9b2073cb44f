"""How an answer is written: whole, or in chunks while it is generated."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
from msgspec import UNSET

from kvd_infer.server.messages import (
    AnswerMessage,
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    CompletionReply,
    Delta,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from kvd_infer.sampler import NextToken
    from kvd_infer.server.messages import CompletionRequest

END = b"data: [DONE]\n\n"
# So a tokenizer writes bytes that are no character.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one choice: tokens, the text that became final, and why it is over if it is."""

    index: int
    text: str
    tokens: tuple[NextToken, ...]
    reason: Literal["stop", "length"] | None


class Answer(ABC):
    """The answer to one request, of which pieces come."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, asked: CompletionRequest, tokenizer: PreTrainedTokenizerFast) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def whole(self, pieces: Iterable[Piece], usage: Usage) -> CompletionReply:
        """All of it at once."""

    @abstractmethod
    def chunks(self, piece: Piece) -> Iterator[CompletionReply]:
        """What is sent of a piece."""

    def last(self, usage: Usage) -> CompletionReply:
        """The chunk behind all others, which tells of usage."""
        return self._reply(self.chunk_object, [], usage)

    def _reply(
        self,
        object: str,
        choices: list[TextChoice] | list[ChatChoice] | list[ChunkChoice],
        usage: Usage | msgspec.UnsetType = UNSET,
    ) -> CompletionReply:
        return CompletionReply(self._id, object, self._created, self._asked.model, choices, usage)

    def _has_news(self, piece: Piece) -> bool:
        """Text that is held back comes with a later piece."""
        return bool(piece.text or piece.reason or self._asked.num_likeliest is not None)

    def _token(self, id: int) -> str:
        """Its text, or what the vocabulary calls it if it is only a part of a character."""
        text = str(self._tokenizer.decode([id]))
        return str(self._tokenizer.convert_ids_to_tokens(id)) if _REPLACEMENT in text else text


class TextAnswer(Answer):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, asked: CompletionRequest, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(asked, tokenizer)
        # By choice: characters of its tokens so far.
        self._offsets: Counter[int] = Counter()

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> CompletionReply:
        return self._reply(self.object, [self._choice(piece) for piece in _joined(pieces)], usage)

    def chunks(self, piece: Piece) -> Iterator[CompletionReply]:
        if self._has_news(piece):
            yield self._reply(self.chunk_object, [self._choice(piece)])

    def _choice(self, piece: Piece) -> TextChoice:
        return TextChoice(piece.index, piece.text, self._logprobs(piece), piece.reason)

    def _logprobs(self, piece: Piece) -> TextLogprobs | None:
        if self._asked.num_likeliest is None:
            return None
        told = TextLogprobs([], [], [], [])
        for token in piece.tokens:
            assert token.logprobs is not None
            told.tokens.append(text := self._token(token.id))
            told.token_logprobs.append(token.logprobs[token.id])
            told.top_logprobs.append({self._token(id): p for id, p in token.logprobs.items()})
            told.text_offset.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(text)
        return told


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, asked: CompletionRequest, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(asked, tokenizer)
        self._begun: set[int] = set()

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> CompletionReply:
        choices = [
            ChatChoice(piece.index, AnswerMessage(piece.text), self._logprobs(piece), piece.reason)
            for piece in _joined(pieces)
        ]
        return self._reply(self.object, choices, usage)

    def chunks(self, piece: Piece) -> Iterator[CompletionReply]:
        """The first of a choice says who speaks, the last one why it is over."""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self._chunk(ChunkChoice(piece.index, Delta(content="", role="assistant")))
        if self._has_news(piece):
            delta = Delta(content=piece.text) if piece.text or not piece.reason else Delta()
            yield self._chunk(ChunkChoice(piece.index, delta, self._logprobs(piece), piece.reason))

    def _chunk(self, choice: ChunkChoice) -> CompletionReply:
        return self._reply(self.chunk_object, [choice])

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_likeliest = self._asked.num_likeliest
        if num_likeliest is None:
            return None
        told = []
        for token in piece.tokens:
            assert token.logprobs is not None
            likeliest = list(token.logprobs.items())[:num_likeliest]
            chosen = self._logprob(token.id, token.logprobs[token.id])
            top = [self._logprob(id, logprob) for id, logprob in likeliest]
            told.append(msgspec.structs.replace(chosen, top_logprobs=top))
        return ChatLogprobs(told)

    def _logprob(self, id: int, logprob: float) -> TokenLogprob:
        text = str(self._tokenizer.decode([id]))
        is_part = _REPLACEMENT in text
        return TokenLogprob(self._token(id), logprob, None if is_part else list(text.encode()))


def event(message: msgspec.Struct) -> bytes:
    """A message as one of those that a browser's EventSource would read."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Each choice as one piece, in the order of their indices."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [
        Piece(
            index,
            "".join(piece.text for piece in its_pieces),
            tuple(token for piece in its_pieces for token in piece.tokens),
            its_pieces[-1].reason,
        )
        for index, its_pieces in sorted(by_index.items())
    ]
