"""One inference process of the demonstration: `python -m demo.worker JOB`, a Job as JSON.

It prints its result as a line of JSON; where it waits, an empty line, until it reads one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from demo.models import load
from demo.recall import logits_behind, prompts
from kvd_client import Client
from kvd_infer.hf import generate, identity_of, layout_of

# Where the two best logits are closer, either token is as good: plain runs that only cut the same
# tokens into other passes differ by as much.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Job:
    """Answer a question about a topic of Python's documentation; without one, judge answers.

    `waits_at` is where it waits: in the middle layer of the "prefill", or inside the "answer".
    """

    model: str
    text: str = "execmodel"
    question: str = ""
    waits_at: str = ""


class Timer(BaseStreamer):
    """Notes when the first token came, and waits at the fifth where the job says so."""

    def __init__(self, job: Job) -> None:
        self.seconds = 0.0
        self._job = job
        self._begin = time.perf_counter()
        self._num_put = 0  # the prompt is put as well

    def put(self, value: torch.Tensor) -> None:
        self._num_put += 1
        if self._num_put == 2:
            self.seconds = time.perf_counter() - self._begin
        if self._num_put == 6 and self._job.waits_at == "answer":
            wait()

    def end(self) -> None: ...


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load(Path(job.model))
    result = answer(job, model) if job.question else judge(model, json.loads(sys.stdin.readline()))
    print(json.dumps(result), flush=True)


def answer(job: Job, model: LlamaForCausalLM) -> dict[str, Any]:
    """Answer with what kvd has of the prompt, and say how long the first token took."""
    model.set_attn_implementation("kvd")
    ids, tokenizer = prompt_of(job)
    generate(model, None, ids[:, :8], max_new_tokens=2)  # what a process does only once
    with Client() as client:
        client.wait_attached(30)
        revision = Path(job.model).name  # has the digest of what the weights were made from
        namespace = client.open(identity_of(model, revision), layout_of(model))
        if job.waits_at == "prefill":
            middle = model.config.num_hidden_layers // 2
            model.model.layers[middle].register_forward_hook(wait)
        timer = Timer(job)
        done = generate(
            model, namespace, ids, streamer=timer, max_new_tokens=32, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    new = done.sequences[0, ids.shape[1] :].tolist()
    return {
        "prompt": ids[0].tolist(),
        "answer": new,
        "words": " ".join(tokenizer.decode(new).split()) if tokenizer else str(new)[1:-1],
        "reused": done.reused_tokens,
        "attempts": done.attempts,
        "ttft_s": timer.seconds,
    }


def judge(model: LlamaForCausalLM, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether plain transformers give the same answers, token by token; and its first token's time.

    Where its two best tokens are as good as each other, it goes on with the one that was given.
    """
    verdicts, seconds = [], []
    for run in (runs[0] | {"prompt": runs[0]["prompt"][:8]}, *runs):  # the first one warms up
        cache, begin = DynamicCache(config=model.config), time.perf_counter()
        prompt, last = torch.tensor([run["prompt"]]), torch.tensor([-1])
        first = logits_behind(model, prompt, cache, logits_to_keep=last)[0]
        seconds.append(time.perf_counter() - begin)
        each = [logits_behind(model, torch.tensor([[id]]), cache)[0] for id in run["answer"][:-1]]
        logits = torch.cat([first, *each])
        given = logits.gather(1, torch.tensor(run["answer"])[:, None])[:, 0]
        verdicts.append(float((logits.max(1).values - given).max()) <= TIE)
    return {"verdicts": verdicts[1:], "ttft_s": seconds[1]}


def prompt_of(job: Job) -> tuple[torch.Tensor, Any]:
    """Text and question as ids, and the tokenizer; the recall model has none, its text is ids."""
    if not (Path(job.model) / "tokenizer.json").exists():
        text = prompts(1, seed=len(job.text), num_tokens=250).repeat(1, 6)
        return torch.cat([text, text[:, len(job.question) :][:, :8]], 1), None
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    content = f"{topics[job.text][:7000]}\n\nIn one paragraph: {job.question}"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    return torch.tensor([ids]), tokenizer


def wait(*_: object) -> None:
    print(flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
