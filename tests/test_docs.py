"""Documents and code say the same."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvd import telemetry
from kvd.config import ClientConfig, Config, parse
from kvd.protocol import messages
from kvd.protocol.errors import ERRORS
from kvd.protocol.units import ByteSize, decode_size
from kvd.testing.daemons import running_daemon
from kvd_tiers.host import HostConfig
from kvd_tiers.lmdb import LmdbConfig
from kvd_tiers.torch import TorchConfig

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
OPERATING = (ROOT / "config/OPERATING.md").read_text()
SAMPLE_TEXT = (ROOT / "config/kvd.toml").read_text()
SAMPLE = tomllib.loads(SAMPLE_TEXT)


def defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Field names and defaults, as a configuration file has them."""
    return {
        field.name: msgspec.structs.asdict(field.default)
        if isinstance(field.default, msgspec.Struct)
        else field.default
        for field in msgspec.structs.fields(kind)
    }


def read_sizes(section: dict[str, Any]) -> None:
    for key, value in section.items():
        if key.endswith("_bytes"):
            section[key] = decode_size(ByteSize, value)


def test_the_sample_configuration_has_every_key_with_its_default() -> None:
    sample = {key: value for key, value in SAMPLE.items() if key != "tiers"}
    for section in (sample, *(v for v in sample.values() if isinstance(v, dict))):
        read_sizes(section)
    expected = defaults(Config)
    # No quota and no client is the default, and tiers have their own keys.
    del expected["tiers"], expected["quotas"], expected["clients"]
    assert sample == expected


@pytest.mark.parametrize(("place", "kind"), [(0, HostConfig), (1, LmdbConfig)])
def test_the_sample_configuration_has_every_key_of_our_tiers(
    place: int, kind: type[msgspec.Struct]
) -> None:
    tier = {key: value for key, value in SAMPLE["tiers"][place].items() if key != "type"}
    read_sizes(tier)
    assert tier == defaults(kind)


def test_the_sample_configuration_names_every_key_of_the_torch_tier() -> None:
    for field in msgspec.structs.fields(TorchConfig):
        assert f"\n# {field.name} = " in SAMPLE_TEXT


def test_the_sample_configuration_names_every_key_of_a_client() -> None:
    for field in msgspec.structs.fields(ClientConfig):
        assert f"\n# {field.name} = " in SAMPLE_TEXT


def test_the_sample_configuration_is_one() -> None:
    assert parse(SAMPLE).sessions == Config().sessions


@pytest.mark.parametrize("union", ["AnyRequest", "AnyReply"])
def test_every_message_is_in_the_architecture(union: str) -> None:
    for message in get_args(getattr(messages, union)):
        assert message.__name__ in ARCHITECTURE


def test_every_error_is_in_the_architecture() -> None:
    for code in ERRORS:
        assert code in ARCHITECTURE


def test_every_path_in_the_documents_exists() -> None:
    documents = "README.md", "ARCHITECTURE.md", "CLIENTS.md", "PLUGINS.md", "config/OPERATING.md"
    for document in documents:
        for path in re.findall(
            r"`((?!/)[\w./-]+/[\w./-]+\.(?:py|toml|md))`", (ROOT / document).read_text()
        ):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_readme_has_the_figures_that_were_recorded() -> None:
    section = (ROOT / "README.md").read_text().split("## Figures")[1].split("\n## ")[0]
    rows = {line for line in section.splitlines() if line.startswith("|")}
    recorded = (ROOT / "tests/bench/results/infer.md").read_text().splitlines()
    assert rows
    assert rows <= set(recorded)


@pytest.mark.parametrize("metric", [*telemetry.LEVELS, *telemetry.TOTALS])
def test_every_metric_is_explained_to_operators(metric: telemetry.Metric) -> None:
    assert f"`{metric.name}`" in OPERATING


def test_every_alert_is_explained_to_operators() -> None:
    alerts = re.findall(r"alert: (\w+)", (ROOT / "config/alerts.yml").read_text())
    assert [name for name in alerts if f"`{name}`" not in OPERATING] == []


def readme_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


# What the examples take for granted: the reader's own model.
MODEL = """
import torch
from demo.models import tiny_llama
model, input_ids = tiny_llama(), torch.arange(40).reshape(1, 40)
"""


@pytest.mark.parametrize("number", range(len(readme_examples())))
def test_every_example_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    own = f'endpoint="ipc://{tmp_path}/s", directory="{tmp_path}/m", data_directory="{tmp_path}/d"'
    source = readme_examples()[number].replace('endpoint="ipc:///tmp/my-kvd/kvd.sock"', own)
    if "hf.generate" in source:
        source = MODEL + source
    with running_daemon({"tiers": [{"type": "host", "capacity_bytes": "64MiB"}]}) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=ROOT,
            env=os.environ | {"KVD_ENDPOINT": daemon.endpoint, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["kvd", "kvd-ctl", "kvd-infer"])
def test_every_script_has_help_with_an_example(command: str) -> None:
    script = Path(sys.executable).with_name(command)
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Example:" in done.stdout
