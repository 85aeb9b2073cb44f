"""Models whose KV the service keeps: whatever becomes of it, they generate what they would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.support import eventually
from tests.systemd.conftest import BINARIES, ENGINE, Box

# Several starts of torch, in a box.
pytestmark = pytest.mark.timeout(600)

FOLDER = "/opt/kvd/tiny"
PROMPT = "Whoever asks: these are the rules of the house, and there are many. " * 16
MAX_TOKENS = 32
# kvd has all of the prompt but its last token, behind which the model computes.
CACHED = len(PROMPT) - 1

# What transformers itself generates; it leaves the model in FOLDER.
ALONE = f"""
import json, pathlib
from tests.infer.servers import plain_text, save_tiny_model
folder = pathlib.Path("{FOLDER}")
save_tiny_model(folder)
print(json.dumps(plain_text(folder, "{PROMPT}", {MAX_TOKENS})))
"""
# Asks the model that lives on.
ASK = f"""
import httpx
def ask():
    asked = {{"model": "tiny", "prompt": "{PROMPT}", "max_tokens": {MAX_TOKENS}, "temperature": 0}}
    reply = httpx.post("http://127.0.0.1:8000/v1/completions", json=asked, timeout=60.0)
    assert reply.json()["choices"][0]["text"] == %r, reply.text
"""
ASK_ON = """
import pathlib
systemd.notify(READY=1)
while not pathlib.Path("/run/enough").exists():
    ask()
"""
DEATHS = {
    "restart": ["restart"],
    "kill": ["kill", "--signal=KILL", "--kill-whom=main"],
    "standstill": ["kill", "--signal=STOP", "--kill-whom=main"],
}


@pytest.fixture(scope="module")
def alone(box: Box) -> str:
    """What the model generates without kvd."""
    box.run("install", "-d", "-o", ENGINE, FOLDER)
    text: str = json.loads(box.engine(ALONE))
    return text


@pytest.fixture(scope="module", autouse=True)
def server(box: Box, alone: str) -> None:
    """A model that lives on; the prompt's KV is in kvd from here on."""
    command = [f"{BINARIES}/kvd-infer", "serve", "--model", FOLDER]
    box.run("systemctl", "start", "kvd.service")
    box.run("systemd-run", "--unit=model", f"--uid={ENGINE}", *command)
    eventually(lambda: "serves tiny" in box.run("journalctl", "--unit=model"), patience=100.0)
    box.engine(ASK % alone + "ask()")


@pytest.fixture
def watched(service_with: Callable[[str], Box]) -> Box:
    """The service, that soon ends if it stands still."""
    return service_with("WatchdogSec=2s")


def generate(box: Box) -> Any:
    """What a model that was just started generates, and how."""
    options = [PROMPT, "--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--json"]
    command = [f"{BINARIES}/kvd-infer", "generate", "--model", FOLDER, *options]
    return json.loads(box.run("runuser", "-u", ENGINE, "--", *command))


def dies(service: Box, death: str) -> None:
    """It is served by another process afterwards."""
    pid = service.show("MainPID")
    service.run("systemctl", *DEATHS[death], "kvd.service")
    eventually(lambda: service.show("MainPID") not in (pid, "0"))
    eventually(lambda: service.show("ActiveState") == "active")


def tokens_matched(service: Box) -> int:
    """Of all prompts since the daemon's start."""
    counted: int = json.loads(service.ctl("status", "--json"))["counters"]["tokens_matched"]
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
def test_a_new_model_finds_the_prefix_after_a(death: str, watched: Box, alone: str) -> None:
    dies(watched, death)
    generated = generate(watched)
    assert (generated["text"], generated["cached_tokens"]) == (alone, CACHED)
    assert tokens_matched(watched) == CACHED


@pytest.mark.slow
def test_a_model_that_lives_on_generates_the_same(watched: Box, alone: str) -> None:
    asking = watched.start_engine(ASK % alone + ASK_ON)
    for death in DEATHS:
        dies(watched, death)
        eventually(lambda: tokens_matched(watched) >= CACHED)
    watched.write("/run/enough", "")
    watched.ended(asking)
