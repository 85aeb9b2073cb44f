"""Text: between what people read and token ids, where a model's tokenizer is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvd.protocol.codec import pack_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(directory: str) -> Tokenizer:
    """From a model's folder. Raises BadParameter where there is none, or no library to read it."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise typer.BadParameter("it needs a library: pip install tokenizers") from error
    path = Path(directory, "tokenizer.json")
    if not path.is_file():
        raise typer.BadParameter(f"{directory} has no tokenizer.json: give a model's folder")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokens_of(tokens: bytes | None, text: str | None, tokenizer: Tokenizer | None) -> bytes:
    """What a command was asked about: token ids, or a text. Raises BadParameter for both or none.

    A text is encoded as a prompt is, with the special tokens that belong around it.
    """
    if (tokens is None) == (text is None):
        raise typer.BadParameter("give either TOKENS or --text", param_hint="TOKENS")
    if tokens is not None:
        return tokens
    if tokenizer is None:
        raise typer.BadParameter("needed to read --text", param_hint="--tokenizer")
    return pack_tokens(tokenizer.encode(text).ids)


def ids_of(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("I").tolist()


def text_of(tokens: bytes, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(ids_of(tokens), skip_special_tokens=False)
    return text
