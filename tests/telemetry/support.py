"""What tests of metrics and health share: a daemon with a port for them, and how to ask it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from kvd.testing.daemons import RunningDaemon, running_daemon
from tests.e2e.support import PATIENCE_SECONDS, free_port

Series: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def watched_daemon(document: Mapping[str, Any]) -> Iterator[tuple[RunningDaemon, int]]:
    """A daemon, and the port where it tells of itself."""
    port = free_port()
    watched = {"http": {"endpoint": f"127.0.0.1:{port}"}}
    with running_daemon({**document, **watched}) as daemon:
        yield daemon, port


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    connection.request(method, path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def scrape(port: int) -> Series:
    """Every series, by its name and labels."""
    status, text = get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def named(series: Series, name: str, label: str) -> dict[str, float]:
    """The series of a name that are not 0, by one label."""
    return {
        dict(labels)[label]: value
        for (other, labels), value in series.items()
        if other == name and value
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]
