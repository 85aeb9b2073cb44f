"""What each command does: a model's folder becomes an engine, for one prompt or for a server."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from transformers.utils import logging

from kvd_client import Client, to_json
from kvd_infer.engine import Engine, Output, Reason
from kvd_infer.model import Model
from kvd_infer.prompts import Prompts
from kvd_infer.router import Router
from kvd_infer.server.app import Service
from kvd_infer.server.run import Server, listen

if TYPE_CHECKING:
    from kvd_infer.sampler import SamplingParams


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that answers, and the client by which it uses kvd."""

    model: Model
    prompts: Prompts
    router: Router
    client: Client | None


@contextmanager
def open_model(
    directory: Path, endpoint: str | None, uses_kvd: bool, max_requests: int = 1
) -> Iterator[Opened]:
    """Raises BadRequest, Unsupported, ConfigError."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with Client(endpoint, name="kvd-infer") if uses_kvd else nullcontext() as client:
        prompts = Prompts.load(directory)
        model = Model.load(directory)
        engine = Engine(model, client, tokenizer=prompts.tokenizer)
        with Router(engine, max_requests=max_requests) as router:
            yield Opened(model, prompts, router, client)


def serve(opened: Opened, name: str, host: str, port: int, grace: float) -> None:
    """Answer as OpenAI's API does until SIGTERM or Ctrl-C; says on stdout where."""
    service = Service(opened.router, opened.prompts, name, opened.model.max_tokens, opened.client)
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        where = f"[{host}]" if ":" in host else host
        print(f"kvd-infer serves {name} on http://{where}:{port}/v1", flush=True)
        Server(service, opened.router, grace).run([listener])


class Generated(msgspec.Struct, frozen=True):
    """What followed a prompt. Tokens per second are those behind the first one."""

    text: str
    reason: Reason
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens ({self.reason}), {self.cached_tokens} of "
            f"{self.prompt_tokens} prompt tokens cached, first token after "
            f"{self.first_token_seconds:.3f} s, {self.tokens_per_second:.1f} tokens/s"
        )


def generate(opened: Opened, prompt: str, params: SamplingParams, *, as_json: bool) -> Reason:
    """Print what follows a prompt as it comes, and on stderr how that went; why it ended.

    Ctrl-C ends it where it stands.
    """
    began = time.perf_counter()
    ids = opened.prompts.of_text(prompt, opened.model.max_tokens)
    stream = opened.router.submit(ids, params)
    outputs, moments = [], []
    with _on_interrupt(stream.cancel):
        for output in stream:
            outputs.append(output)
            moments.append(time.perf_counter())
            if not as_json:
                print(output.text, end="", flush=True)
    generated = _generated(outputs, len(ids), moments[0] - began, moments[-1] - moments[0])
    if as_json:
        print(to_json(generated))
    else:
        print(end="\n" if sys.stdout.isatty() else "", flush=True)
        print(generated, file=sys.stderr)
    return generated.reason


@contextmanager
def _on_interrupt(do: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C do this, and nothing else."""
    before = signal.signal(signal.SIGINT, lambda *_: do())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _generated(
    outputs: list[Output], prompt_tokens: int, first_seconds: float, other_seconds: float
) -> Generated:
    last, num_tokens = outputs[-1], sum(len(output.tokens) for output in outputs)
    assert last.reason is not None
    return Generated(
        text="".join(output.text for output in outputs),
        reason=last.reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=last.cached_tokens,
        tokens=num_tokens,
        first_token_seconds=first_seconds,
        tokens_per_second=(num_tokens - 1) / other_seconds if num_tokens > 1 else 0.0,
    )
