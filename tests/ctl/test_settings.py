"""Where `kvd-ctl doctor` and `purge` know from what kvd goes by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd_client import BadRequest, DaemonUnavailable, StatusReply
from kvd_ctl import service
from kvd_ctl.settings import find_settings

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system without a service, where nobody said an endpoint."""
    monkeypatch.setattr(service, "SYSTEM", tmp_path)
    monkeypatch.delenv("KVD_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def with_service(system: Path, text: str) -> Path:
    """Its configuration, where it is installed."""
    unit, path = system / service.UNITS / "kvd.service", system / service.CONFIGURATION
    for each in (unit, path):
        each.parent.mkdir(parents=True)
        each.write_text(text)
    return path


def test_a_daemon_that_answers_says_where_it_is(daemon: RunningDaemon) -> None:
    found = find_settings(None, daemon.endpoint, 30.0)
    assert found.source == f"what kvd, pid {daemon.pid}, says"
    assert found.config.resolved_directory == daemon.directory
    assert found.config.resolved_data_directory == daemon.data_directory
    assert isinstance(found.answer, StatusReply)


def test_a_file_that_is_named_comes_first(daemon: RunningDaemon) -> None:
    found = find_settings(daemon.config_path, None, 30.0)
    assert found.source == str(daemon.config_path)
    assert found.config.resolved_directory == daemon.directory
    assert isinstance(found.answer, StatusReply)


def test_where_none_answers_the_file_of_the_service_counts(system: Path) -> None:
    path = with_service(system, f'endpoint = "ipc://{system}/s.sock"\ndirectory = "/a"\n')
    for endpoint in (None, f"ipc://{system}/s.sock"):
        found = find_settings(None, endpoint, 1.0)
        assert (found.source, found.config.directory) == (f"{path}, the service's", "/a")
        assert isinstance(found.answer, DaemonUnavailable)


def test_of_another_endpoint_the_service_says_nothing(system: Path) -> None:
    with_service(system, 'endpoint = "ipc:///a/kvd.sock"\n')
    found = find_settings(None, f"ipc://{system}/other.sock", 1.0)
    assert found.source.startswith("defaults")
    assert found.config.endpoint == f"ipc://{system}/other.sock"


def test_without_a_service_defaults_count(system: Path) -> None:
    found = find_settings(None, None, 1.0)
    assert found.source.startswith("defaults")
    assert found.config.resolved_endpoint == f"ipc://{system}/kvd/kvd.sock"


def test_another_machine_is_not_looked_at() -> None:
    with pytest.raises(BadRequest, match="not at tcp://10"):
        find_settings(None, "tcp://10.0.0.1:1", 1.0)
