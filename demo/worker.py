"""One inference process of the demonstration: `python -m demo.worker JOB`, a Job as JSON.

It says on stdout, a JSON object a line, how far it is; the last line is its result. Where it waits,
it goes on at a line on stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

TEXT_CHARACTERS = 7000
# How close the two best logits are where either token is as good as the other: plain runs that
# only cut their prompt at another place differ by about a tenth of it.
TIE = 1e-3
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do: answer a question about a text, or judge the answers of others.

    `waits_at` names where it stops until it is told to go on: in the middle layer of the prefill,
    or behind a token of the answer.
    """

    model: str
    text: str = "execmodel"  # a topic of Python's own documentation
    question: str = ""
    num_answer: int = 32
    waits_at: str = ""


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    import torch
    from transformers.utils import logging

    from demo.models import load

    logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    say(at="loading")
    if job.question:
        model = load(Path(job.model), attn_implementation="kvd")
        say(at="end", **answer(job, model))
    else:
        model = load(Path(job.model))
        say(at="ready")
        say(at="end", **judge(model, json.loads(sys.stdin.readline())))


def answer(job: Job, model: PreTrainedModel) -> dict[str, Any]:
    """Answer the question with kvd, and say how long the first token took."""
    import torch

    from kvd_client import Client
    from kvd_infer.hf import generate, identity_of, layout_of

    ids = torch.tensor([prompt_ids(job)])
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": job.num_answer}
    arguments |= {"min_new_tokens": job.num_answer, "attention_mask": torch.ones_like(ids)}
    with Client() as client:
        # The folder's name holds the digest of what its weights were made from.
        identity = identity_of(model, revision=Path(job.model).name)
        namespace = client.open(identity, layout_of(model))
        generate(model, None, ids[:, :8], max_new_tokens=2)  # what a process does only once
        assert client.wait_attached(PATIENCE_SECONDS)
        if job.waits_at == "prefill":
            middle = model.config.num_hidden_layers // 2
            model.get_decoder().layers[middle].register_forward_hook(lambda *_: wait(job))
        streamer = Timer(lambda count: count == 5 and job.waits_at == "answer" and wait(job))
        done = generate(model, namespace, ids, streamer=streamer, **arguments)  # type: ignore[arg-type]
    return {
        "ttft_s": streamer.first - streamer.begin,
        "reused": done.reused_tokens,
        "attempts": done.attempts,
        "prompt": ids[0].tolist(),
        "answer": done.sequences[0, ids.shape[1] :].tolist(),
        "words": words(job, done.sequences[0, ids.shape[1] :]),
    }


class Timer:
    """A streamer that notes when the first token came: the first thing put is the prompt."""

    def __init__(self, each: Callable[[int], object]) -> None:
        self.begin = time.perf_counter()
        self.first = 0.0
        self._count = -1
        self._each = each

    def put(self, value: torch.Tensor) -> None:
        self._count += 1
        if self._count == 1:
            self.first = time.perf_counter()
        self._each(self._count)

    def end(self) -> None:
        pass


def judge(model: PreTrainedModel, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether plain transformers, without kvd, give the same answers, token by token.

    Where its two best tokens are as good as each other, it goes on with the one that was given.
    """
    import torch
    from transformers import DynamicCache

    from demo.recall import logits_behind

    logits_behind(model, torch.tensor([runs[0]["prompt"][:8]]), DynamicCache(config=model.config))
    verdicts: list[bool] = []
    seconds: list[float] = []
    for run in runs:
        cache, begin = DynamicCache(config=model.config), time.perf_counter()
        last = torch.tensor([run["prompt"]])
        same = True
        for number, token in enumerate(run["answer"]):
            logits = logits_behind(model, last, cache, logits_to_keep=1)[0, -1]
            if number == 0:
                seconds.append(time.perf_counter() - begin)
            same = same and float(logits.max() - logits[token]) <= TIE
            last = torch.tensor([[token]])
        verdicts.append(same)
        say(at="judged", same=same)
    return {"verdicts": verdicts, "ttft_s": seconds[0]}


def prompt_ids(job: Job) -> list[int]:
    """The text, then the question, as the chat template has it; for the recall model ids alone."""
    folder = Path(job.model)
    if not (folder / "tokenizer.json").exists():
        from demo.recall import prompts

        text = prompts(1, seed=len(job.text), num_tokens=250).repeat(1, 6)[0].tolist()
        return [*text, *text[len(job.question) : len(job.question) + 8]]
    from pydoc_data.topics import topics

    content = f"{topics[job.text][:TEXT_CHARACTERS]}\n\n{job.question}"
    chat = [{"role": "user", "content": content}]
    ids: list[int] = tokenizer(folder).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    return ids


def words(job: Job, ids: torch.Tensor) -> str:
    folder = Path(job.model)
    if not (folder / "tokenizer.json").exists():
        return " ".join(map(str, ids.tolist()))
    return " ".join(tokenizer(folder).decode(ids, skip_special_tokens=True).split())


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def wait(job: Job) -> None:
    say(at=job.waits_at)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
