"""`kvd-infer serve` in a process of its own, and a tiny model for it, with a tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING, Any

import httpx
from openai import OpenAI

from tests.infer.conftest import PATIENCE_SECONDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "tiny"
PROMPT = "The sea is deep, and nobody knows what lies there."
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: id for id, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )


def save_tiny_model(folder: Path) -> None:
    from demo.models import tiny_llama

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text).input_ids
    return ids


def plain_text(folder: Path, prompt: str, num_tokens: int) -> str:
    """What transformers itself generates behind a prompt, the likeliest token each time."""
    import torch
    from transformers import AutoTokenizer

    from demo import models

    model: Any = models.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    output = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


class RunningServer:
    """One that is there, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        """Wait until it is ready."""
        self.process = process
        self.is_stopping = False
        self._log_path = log_path
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("kvd-infer serves"), self.log
        self.url = ready.split()[-1]
        self.openai = OpenAI(
            base_url=self.url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS
        )
        self.http = httpx.Client(
            base_url=self.url.removesuffix("/v1"), timeout=PATIENCE_SECONDS, trust_env=False
        )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def health(self) -> Any:
        return self.http.get("/health").json()

    def signal(self, number: Signals = SIGTERM) -> None:
        self.is_stopping = True
        self.process.send_signal(number)

    def close(self) -> None:
        self.openai.close()
        self.http.close()


@contextmanager
def running_servers(folder: Path, logs: Path, *options: list[str]) -> Iterator[list[RunningServer]]:
    """A server for each list of options, started together; they must end as they should."""
    processes = [
        _start(folder, logs / f"server-{number}.log", each) for number, each in enumerate(options)
    ]
    servers = []
    try:
        for number, process in enumerate(processes):
            servers.append(RunningServer(process, logs / f"server-{number}.log"))
        yield servers
        for server in servers:
            if not server.is_stopping:  # or a second signal would end what it still does
                server.signal()
            assert server.process.wait(PATIENCE_SECONDS) == 0, server.log
    finally:
        for server in servers:
            server.close()
        for process in processes:
            process.kill()
            process.communicate()


def _start(folder: Path, log_path: Path, options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvd_infer", "serve", "--model", str(folder), "--port", "0"]
    with log_path.open("w") as log:
        return subprocess.Popen(
            [*command, "--served-name", NAME, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Small models gain nothing from a second thread, which others want.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
