"""The judge of the demonstration sees an answer that is not the model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def test_judge_tells_other_answers_apart(tiny_llama: LlamaForCausalLM) -> None:
    from demo.worker import judge

    prompt = torch.arange(40)[None]
    answer = tiny_llama.generate(prompt, max_new_tokens=8, do_sample=False)[0, 40:].tolist()
    wrong = [*answer[:5], (answer[5] + 1) % 256, *answer[6:]]
    runs = [{"prompt": prompt[0].tolist(), "answer": given} for given in (answer, wrong)]
    assert judge(tiny_llama, runs)["verdicts"] == [True, False]


def test_text_is_ids_where_there_is_no_tokenizer() -> None:
    from demo.worker import Job, prompt_of

    one, other = (prompt_of(Job("nowhere", question=q))[0] for q in ("what?", "and why?"))
    assert one.shape == other.shape
    assert one[0, :1500].equal(other[0, :1500])
    assert not one.equal(other)
