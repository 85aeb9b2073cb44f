"""What is streamed is what the tokenizer decodes from all ids, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvd_infer.text import TextStream

SENTENCES = [
    "The capital of France is Paris, isn't it?",
    "Ein Blick übers Meer — schön!",
    "日本語の文章と 😀 emoji 👩‍👩‍👧.",
]
PIECES = ["▁", "a", "b", "▁a", "ab", "▁ba", "é", "日", "\ufffd", "."]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As those of GPT-2, Llama 3 or Qwen: tokens are bytes, of whole characters or not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return wrapped(tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As those of Llama 2 or Mistral: tokens are characters, other characters are bytes."""
    tokens = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    return wrapped(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """As that of T5: the first token of a text loses its space."""
    tokenizer = Tokenizer(models.Unigram([("<end>", 0.0), *((each, -1.0) for each in PIECES)], 0))
    tokenizer.decoder = decoders.Metaspace()
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


MakeTokenizer = Callable[[], PreTrainedTokenizerFast]
each_kind = pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
examples = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def ids_of(tokenizer: PreTrainedTokenizerFast) -> st.SearchStrategy[list[int]]:
    """Any ids, special and unknown ones too, and those of texts."""
    size, special = len(tokenizer), [tokenizer.eos_token_id]
    anything = st.lists(st.integers(0, size) | st.integers(size - len(PIECES), size), max_size=30)
    texts = st.text("ab é日😀👩‍\ufffd.", max_size=20).map(tokenizer.encode)
    cut_texts = st.tuples(texts, st.integers(0, 20)).map(
        lambda drawn: drawn[0][: drawn[1]] + special + drawn[0][drawn[1] :]
    )
    return anything | texts | cut_texts


def streamed(stream: TextStream, ids: list[int], step: int = 1) -> list[str]:
    """The pieces of ids that come so many at a time."""
    pieces = [stream.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [*pieces, stream.finish()]


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def cut(text: str, stop: list[str]) -> str:
    """Before the stop string that is complete first, of several the longest."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(found)[1]] if found else text


def until_stop(tokenizer: PreTrainedTokenizerFast, ids: list[int], stop: list[str]) -> str:
    """The text of as many ids as it takes to have a stop string in it, or of all; not cut."""
    texts = (decoded(tokenizer, ids[:size]) for size in range(len(ids)))
    whole = (text for text in texts if not text.endswith("\ufffd"))  # or what comes may change it
    return next((text for text in whole if any(s in text for s in stop)), decoded(tokenizer, ids))


@each_kind
@examples
@given(data=st.data())
def test_pieces_are_the_text_of_all_ids(make: MakeTokenizer, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(ids_of(tokenizer))
    pieces = streamed(TextStream(tokenizer), ids, data.draw(st.integers(1, 4)))
    assert "".join(pieces) == decoded(tokenizer, ids)


@each_kind
@examples
@given(data=st.data())
def test_text_ends_before_the_first_stop_string(make: MakeTokenizer, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(ids_of(tokenizer))
    text = decoded(tokenizer, ids)
    inside = st.integers(0, len(text)).flatmap(lambda at: st.just(text[at : at + 3]))
    stop = data.draw(st.lists((inside | st.text("ab ", max_size=3)).filter(bool), max_size=3))
    stream = TextStream(tokenizer, stop)
    pieces = streamed(stream, ids, data.draw(st.integers(1, 4)))
    text = until_stop(tokenizer, ids, stop)
    assert "".join(pieces) == cut(text, stop)
    assert (stream.stopped_by is not None) == any(s in text for s in stop)


@examples
@given(text=st.text("ab é日😀👩‍.", max_size=20))
def test_character_comes_with_its_last_byte(text: str) -> None:
    stream, streamed_text = TextStream(byte_level()), ""
    for num_bytes, id in enumerate(ids_of_bytes(text), start=1):
        streamed_text += stream.feed([id])
        assert streamed_text == text.encode()[:num_bytes].decode(errors="ignore")


def ids_of_bytes(text: str) -> list[int]:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return byte_level().convert_tokens_to_ids([byte for word, _ in words for byte in word])


def test_run_of_bytes_comes_as_a_whole() -> None:
    stream = TextStream(byte_fallback())
    whole = byte_fallback().encode("ab😀")
    assert [stream.feed([id]) for id in whole] == ["a", "b", "", "", "", ""]
    assert stream.feed(whole[:1]) == "😀a"


@pytest.mark.parametrize(("text", "stop"), [("ab\n\n", "\n\n"), ("ab😀é", "b😀"), ("abé", "é")])
def test_stop_string_is_found_with_its_last_byte(text: str, stop: str) -> None:
    stream, before = TextStream(byte_fallback(), [stop]), text.index(stop)
    *others, last = byte_fallback().encode(text[: before + len(stop)])
    pieces = [stream.feed([id]) for id in others]
    assert stream.stopped_by is None
    assert "".join([*pieces, stream.feed([last])]) == text[:before]
    assert stream.stopped_by == stop


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(byte_level(), ["END", "Ende"])
    assert [stream.feed([id]) for id in ids_of_bytes("aENx")] == ["a", "", "", "ENx"]
    assert [stream.feed([id]) for id in ids_of_bytes("EEn")] == ["", "E", ""]
    assert stream.finish() == "En"
    assert stream.stopped_by is None


def test_nothing_comes_behind_a_stop_string() -> None:
    stream = TextStream(byte_level(), ["c", "bc", "bcd"])
    assert [stream.feed([id]) for id in ids_of_bytes("abcd")] == ["a", "", "", ""]
    assert (stream.finish(), stream.stopped_by) == ("", "bc")


def test_few_ids_are_decoded_again() -> None:
    stream = TextStream(byte_level())
    streamed(stream, 20 * ids_of_bytes("日本 ab😀"))
    assert len(stream._characters._ids) <= 8


@pytest.mark.real_model
def test_pieces_are_the_text_of_a_real_tokenizer(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)

    @examples
    @given(
        ids=ids_of(tokenizer), stop=st.lists(st.text("ae é", min_size=1, max_size=3), max_size=2)
    )
    def check(ids: list[int], stop: list[str]) -> None:
        pieces = streamed(TextStream(tokenizer, stop), ids)
        assert "".join(pieces) == cut(until_stop(tokenizer, ids, stop), stop)

    check()
