"""Prompts: text and chats as the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvd_client import BadRequest


class Prompts:
    """What a model's tokenizer makes of text. For any threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take a tokenizer over: from then on it neither cuts nor fills what it encodes."""
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """From a model's local folder. Raises BadRequest where there is none that we can use."""
        if not Path(directory, "tokenizer.json").is_file():
            raise BadRequest(f"{directory} has no tokenizer.json: give the folder of a local model")
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # of its files, transformers raises whatever comes of them
            raise BadRequest(f"the tokenizer in {directory} cannot be loaded: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise BadRequest(f"the tokenizer in {directory} is none of transformers' fast ones")
        return cls(tokenizer)

    def of_text(self, text: str, max_tokens: int) -> list[int]:
        """With the special tokens that the tokenizer puts around a text.

        Raises BadRequest for a text of so many characters that it must have more than `max_tokens`.
        """
        return self._encode(text, max_tokens, add_special_tokens=True)

    def of_chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> list[int]:
        """As the model's template writes a chat down, up to where the next answer begins.

        Raises BadRequest where there is no template, it refuses these messages, or as `of_text`.
        """
        if not self.tokenizer.chat_template:
            raise BadRequest("this model has no chat template: ask for a completion instead")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return self._encode(str(text), max_tokens, add_special_tokens=False)

    def _encode(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        if len(text) > max_tokens * self._longest_token:  # and would take the tokenizer long
            raise BadRequest(
                f"a prompt of {len(text)} characters is more than the {max_tokens} tokens of the "
                f"model, of which none has more than {self._longest_token}"
            )
        # The tokenizer itself sets up its backend anew each time, which other threads may be using.
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # of what came from bytes that are no UTF-8
            raise BadRequest("a prompt is text in UTF-8: this one is not") from error
        return ids
