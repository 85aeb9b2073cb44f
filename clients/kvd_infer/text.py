"""Text while it is generated: token ids in, what is final of their text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# How a byte is written in vocabularies of characters: a run of such tokens is text as a whole.
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# What bytes are decoded to that are no character, or not yet.
_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one generated sequence, in pieces that never change.

    Together they are what the tokenizer decodes from all ids at once, without special tokens and
    without cleaning up spaces, up to the first stop string: the one that is complete first, of
    several the longest. What may become another character or a stop string is held back.
    """

    stopped_by: str | None  # the stop string that was found

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str] = ()) -> None:
        self._characters = _Characters(tokenizer)
        self._stop = stop
        self._held = ""
        self.stopped_by = None

    def feed(self, ids: Sequence[int]) -> str:
        """What these ids make final; nothing any more behind a stop string."""
        for id in ids:
            self._held += self._characters.feed(id)
            if self._stop and self._is_stopped():
                return self.finish()
        return self._take(len(self._held) - _num_begun(self._held, self._stop))

    def finish(self) -> str:
        """What was held back: no more ids come."""
        self._held += self._characters.finish()
        return self._take(len(self._held))

    def _is_stopped(self) -> bool:
        """Whether the text as it stands has a stop string: no more ids come then."""
        text = self._held + self._characters.unsure()
        return any(s in text for s in self._stop)

    def _take(self, num_final: int) -> str:
        """Take the final characters out, or those before a stop string, which stays."""
        found = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            _, num_final, self.stopped_by = min(found)
        text, self._held = self._held[:num_final], self._held[num_final:]
        return text


class _Characters:
    """The characters of a sequence, each as soon as nothing that follows can change it.

    Only the last ids are decoded: those of the piece before, as the first token of a text may lose
    its space, and those behind it.

        ids:     … forgotten … | context | new …
        text:                  ………… num_given ………
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._bytes = {self._tokenizer.token_to_id(token) for token in _BYTES}
        self._ids: list[int] = []
        self._num_context = 0
        self._num_given = 0

    def feed(self, id: int) -> str:
        if self._has_text(id):
            self._ids.append(id)
        if self._ends_with_byte():
            return ""
        text = self._tokenizer.decode(self._ids)
        final = text.removesuffix(_REPLACEMENT)
        piece = self._give(final)
        if piece and final == text:
            self._forget()
        return piece

    def unsure(self) -> str:
        """What a run of bytes is so far, in whole characters; another byte may change them all."""
        text = self._tokenizer.decode(self._ids) if self._ends_with_byte() else ""
        return "" if text.endswith(_REPLACEMENT) else text[self._num_given :]

    def finish(self) -> str:
        return self._give(self._tokenizer.decode(self._ids))

    def _ends_with_byte(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._bytes

    def _has_text(self, id: int) -> bool:
        """Neither a special token nor one that only the model's padded vocabulary has."""
        return id not in self._special and self._tokenizer.id_to_token(id) is not None

    def _give(self, final: str) -> str:
        piece = final[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _forget(self) -> None:
        """Let what is new be the context of what comes: a character ends with it."""
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._num_given = len(self._tokenizer.decode(self._ids))


def _num_begun(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of the text with which a stop string may have begun."""
    lengths = ((s, n) for s in stop for n in range(1, min(len(s), len(text) + 1)))
    return max((n for s, n in lengths if text.endswith(s[:n])), default=0)
