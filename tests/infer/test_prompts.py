"""Text and chats become the ids that the model's own tokenizer has for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd_client import BadRequest
from kvd_infer.prompts import Prompts
from tests.infer.servers import tiny_tokenizer

MOST = 100
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]


def test_a_text_is_encoded_as_the_tokenizer_does() -> None:
    tokenizer = tiny_tokenizer()
    assert Prompts(tokenizer).of_text("Bär <|end|>", MOST) == tokenizer("Bär <|end|>").input_ids


def test_a_chat_is_encoded_as_its_template_does() -> None:
    tokenizer = tiny_tokenizer()
    encoded = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert Prompts(tokenizer).of_chat(CHAT, MOST) == encoded


def test_a_long_text_is_not_cut() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    assert len(Prompts(tokenizer).of_text("ten tokens", MOST)) == 10


def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts(tiny_tokenizer())
    assert len(prompts.of_text("<|end|>" * MOST, MOST)) == MOST
    monkeypatch.setattr(prompts, "_backend", None)
    content = "x" * (MOST * len("<|end|>") + 1)
    for encode, long in (
        (prompts.of_text, content),
        (prompts.of_chat, [CHAT[0] | {"content": content}]),
    ):
        with pytest.raises(BadRequest, match="more than the 100 tokens of the model"):
            encode(long, MOST)


def test_a_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(BadRequest, match="UTF-8"):
        Prompts(tiny_tokenizer()).of_text("B\udce4r", MOST)


def test_a_chat_needs_a_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(BadRequest, match="has no chat template"):
        Prompts(tokenizer).of_chat(CHAT, MOST)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('a user must begin') }}", "a user must begin"),
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_may_refuse_a_chat(template: str, complaint: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(BadRequest, match=complaint):
        Prompts(tokenizer).of_chat(CHAT, MOST)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("config.json", "[]")]
)
def test_a_folder_that_is_broken_is_refused(tmp_path: Path, name: str, content: str) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(BadRequest, match="cannot be loaded"):
        Prompts.load(tmp_path)
