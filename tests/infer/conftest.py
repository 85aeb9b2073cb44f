"""A kvd of the tests' own, and what compares a model that uses it with one that does not."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from numpy.typing import NDArray

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Client, Namespace

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedModel

PATIENCE_SECONDS = 60.0
# Several layouts lie in one daemon, and each keeps as much memory ready.
SETTINGS = {"cache": {"back_ahead_bytes": "1MiB"}}

_salts = itertools.count()


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[RunningDaemon]:
    """One for all tests that do not kill it; their namespaces have salts of their own."""
    with running_daemon(SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """One that the test may kill."""
    with running_daemon(SETTINGS) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, pages and answers that come are waited for."""
    monkeypatch.setattr("kvd_infer.rows.RESERVE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("kvd_infer.scheduler.MATCH_SECONDS", None)
    monkeypatch.setattr("kvd_infer.engine.MATCH_SECONDS", None)


@pytest.fixture
def one_thread(_two_threads: None) -> Iterator[None]:
    """Small models gain nothing from a second thread, which others want."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plain(one_thread: None) -> LlamaForCausalLM:
    """A random model without kvd; `model` is the same with it."""
    from demo import models

    return models.tiny_llama()


@pytest.fixture
def model(plain: LlamaForCausalLM) -> LlamaForCausalLM:
    from tests.infer.runs import with_kvd

    return with_kvd()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with a tokenizer, as `kvd-infer` reads it."""
    from tests.infer.servers import save_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@contextmanager
def attached(daemon: RunningDaemon, *, maps: bool = True) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=PATIENCE_SECONDS, maps=maps) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        yield client


@pytest.fixture
def salt() -> str:
    """What keeps this test's namespaces apart from those of others."""
    return f"test {next(_salts)}"


OpenFor = Callable[..., Namespace]


@pytest.fixture
def open_for(shared_daemon: RunningDaemon, salt: str) -> Iterator[OpenFor]:
    """Opens a model's namespace; each call is another client, all calls in a test meet."""
    from kvd_infer.hf import identity_of, layout_of

    clients: list[Client] = []

    def open_for(model: PreTrainedModel, revision: str = "r1", block_size: int = 16) -> Namespace:
        clients.append(Client(shared_daemon.endpoint, timeout=PATIENCE_SECONDS))
        assert clients[-1].wait_attached(PATIENCE_SECONDS)
        layout = layout_of(model, block_size=block_size)
        return clients[-1].open(identity_of(model, revision), layout, salt)

    yield open_for
    for client in clients:
        client.close()


def page_of(namespace: Namespace, page: int) -> NDArray[Any]:
    """A page of the arena as a writable array, past every lease."""
    assert namespace._binding is not None
    return namespace._binding.arena.writable().page_view(page)


def as_kwargs(model: PreTrainedModel, cache: object) -> dict[str, Any]:
    """transformers 5.24 calls it `cache`, and warns of the name that it had before."""
    renamed = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def plain_logits(model: PreTrainedModel, ids: Tensor, num_cached: int = 0) -> Tensor:
    """Logits of all tokens behind the first `num_cached`, which lie in a DynamicCache."""
    import torch
    from transformers import DynamicCache

    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        if num_cached:
            model(ids[:, :num_cached], **as_kwargs(model, cache))
        logits: Tensor = model(ids[:, num_cached:], **as_kwargs(model, cache)).logits
    return logits


def tolerance_of(model: PreTrainedModel, ids: Tensor) -> float:
    """Ten times what cold and warm runs without kvd differ, and at most 1e-4 in float32."""
    cold, num_tokens = plain_logits(model, ids), ids.shape[1]
    splits = (1, num_tokens // 2, num_tokens - 1)
    warm = [(split, plain_logits(model, ids, split)) for split in splits]
    noise = max(float((cold[:, split:] - logits).abs().max()) for split, logits in warm)
    assert noise > 0
    return min(10 * noise, 1e-4) if cold.itemsize == 4 else 10 * noise
