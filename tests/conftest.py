"""What tests of several packages share: models that run offline.

torch is imported inside the fixtures, so that tests that need no model start at once.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

import demo  # noqa: F401 - sets what torch and transformers read when they are imported
from kvd.testing.places import own_place
from tests.leftovers import remove_leftovers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("kvd", deadline=None)
hypothesis.settings.load_profile("kvd")

# A shell that starts the suite in the background has it ignore interrupts, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The first test that asks for one of these waits until the model is made: once per machine.
MADE_ONCE = {"recall_dir", "smollm2_dir"}
SECONDS_TO_MAKE = 900

# What is in these folders takes longest and comes first, so that no core waits for it at the end.
LONG = {"bench", "demo", "e2e", "infer", "stress", "systemd"}


def pytest_configure(config: pytest.Config) -> None:
    """What a daemon keeps on disk where nothing else is said goes with the run.

    So does what runs left that were killed. The models that the demo made stay where they are.
    """
    remove_leftovers()
    models = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvd-models"
    models.mkdir(parents=True, exist_ok=True)
    resources = ExitStack()
    config.add_cleanup(resources.close)
    cache = resources.enter_context(own_place())
    (cache / "kvd-models").symlink_to(models)
    os.environ["XDG_CACHE_HOME"] = str(cache)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if MADE_ONCE.intersection(fixtures) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS_TO_MAKE))


@pytest.fixture(scope="session")
def _two_threads() -> None:
    """Results in floating point depend on the number of threads."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def recall_dir(_two_threads: None) -> Path:
    """The folder of the recall model: load it with `demo.models.load`, see `demo.recall`."""
    from demo import models

    return models.recall_dir(print)


@pytest.fixture(scope="session")
def smollm2_dir(_two_threads: None) -> Path:
    """The folder of SmolLM2; the test is skipped where its weights are not there."""
    from demo import models

    try:
        return models.smollm2_dir(print)
    except models.ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def tiny_llama(_two_threads: None) -> LlamaForCausalLM:
    """A fresh random Llama whose logits show every error in its KV."""
    from demo import models

    return models.tiny_llama()
