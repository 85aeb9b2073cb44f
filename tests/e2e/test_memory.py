"""Capacity, a full file system, and what the daemon itself takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon
from kvd_client import Identity, KvdError, Layout, OutOfPages
from kvd_client.client import Client
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    compute,
    holds,
    pages,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd_client.client import Namespace
    from tests.arena.conftest import Child

Mount = Callable[..., Path]


def fill(directory: Path) -> Path:
    """Take all that is left of a file system; the file to remove."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):  # until it is full
        while True:
            filler.write(bytes(1 << 12))
    return path


WIDE = Layout(2, 4, 8, "float32", block_size=BLOCK)


def on(directory: Path, num_pages: int) -> dict[str, object]:
    """A configuration whose memory lies in a directory of its own."""
    document = settings(num_pages)
    document["tiers"][0]["directory"] = str(directory)
    return document


def test_a_capacity_larger_than_the_file_system_is_refused_with_both_sizes(tmpfs: Mount) -> None:
    small = tmpfs("size=1m")
    with (
        pytest.raises(DaemonFailed, match=r"capacity of 2\.3\d*MiB .* has 1MiB"),
        running_daemon(on(small, (2 << 20) // LAYOUT.page_bytes)),
    ):
        pass


def test_where_the_file_system_is_full_reserve_says_out_of_pages_and_later_goes_on(
    tmpfs: Mount,
) -> None:
    small = tmpfs("size=1m")
    document = on(small, 1024) | {"cache": {"back_ahead_bytes": 0}}
    with running_daemon(document) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        lease = client.open(IDENTITY, LAYOUT).match(tokens_of(1, 1))
        filler = fill(small)
        with pytest.raises(OutOfPages):
            lease.reserve(BLOCK, timeout=0.5)
        assert pages(client) == {"unbacked": 1024}
        filler.unlink()
        lease.reserve(BLOCK)
        assert daemon.log.count("reason=no_memory") == 1


def test_where_the_file_system_is_full_old_blocks_make_room(tmpfs: Mount) -> None:
    small = tmpfs("size=1m")
    with running_daemon(on(small, 1760)) as daemon, Client(daemon.endpoint, timeout=30) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        for seed in range(60):
            store(namespace, tokens_of(seed, 60))
        assert client.status().counters["blocks_evicted"] > 0
        for seed in range(60):
            with namespace.match(tokens_of(seed, 60)) as lease:
                assert holds(lease, tokens_of(seed, 60), lease.num_tokens)
        assert daemon.is_running


def test_memory_that_is_there_is_used_though_it_is_less_than_wanted(tmpfs: Mount) -> None:
    small = tmpfs("size=1m")
    with running_daemon(on(small, 1760)) as daemon, Client(daemon.endpoint, timeout=30) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match(tokens_of(1, 1))
        lease.reserve(BLOCK, timeout=2.0)  # of the megabyte, 900 KiB are free


def test_an_arena_for_which_there_is_no_room_is_a_miss_for_its_client_alone(tmpfs: Mount) -> None:
    small = tmpfs("size=1m")
    with running_daemon(on(small, 1024)) as daemon, Client(daemon.endpoint, timeout=30) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        store(namespace, tokens_of(1, 4))
        filler = fill(small)
        other = client.open(IDENTITY, Layout(1, 1, 8, "float32", block_size=4))
        assert not other.match(tokens_of(1, 4)).is_open
        with namespace.match(tokens_of(1, 4)) as lease:
            assert holds(lease, tokens_of(1, 4))
        filler.unlink()
        assert other.match(tokens_of(1, 4)).is_open


def test_a_file_system_without_inodes_does_not_end_the_daemon(tmpfs: Mount) -> None:
    small = tmpfs("size=64m,nr_inodes=8")
    with running_daemon(on(small, 1024)) as daemon, Client(daemon.endpoint, timeout=2.0) as client:
        for size in range(8, 64, 8):
            namespace = client.open(IDENTITY, Layout(1, 1, size, "float32", block_size=4))
            try:
                namespace.match(tokens_of(1, 4))
            except KvdError:
                break
        assert client.status().pid == daemon.pid
        assert "Traceback" not in daemon.log


def test_a_layout_that_does_not_fit_is_refused(client: Client) -> None:
    large = client.open(IDENTITY, Layout(64, 8, 128, "float32"))
    with pytest.raises(KvdError, match="capacity_bytes"):
        large.match(tokens_of(1, 4))


def test_two_layouts_and_two_models_share_the_capacity(client: Client) -> None:
    other = Layout(1, 2, 8, "float32", block_size=4)
    spaces = [
        client.open(identity, layout)
        for identity in (IDENTITY, Identity("model", "other"))
        for layout in (LAYOUT, other)
    ]
    lease = spaces[0].match(tokens_of(1, 16))
    compute(lease, tokens_of(1, 16))
    assert [space.match(tokens_of(1, 16)).num_tokens for space in spaces] == [16 * BLOCK, 0, 0, 0]
    assert len(client.status().namespaces) == 4


def test_a_second_layout_gets_the_memory_that_the_first_does_not_use(client: Client) -> None:
    store(client.open(IDENTITY, LAYOUT), tokens_of(1, 16))
    other = client.open(IDENTITY, Layout(1, 2, 8, "float32", block_size=4))
    other.match(tokens_of(1, 1)).reserve(BLOCK, timeout=2.0)


def test_memory_follows_the_load_from_one_model_to_the_other_and_back(client: Client) -> None:
    spaces = [client.open(IDENTITY, layout) for layout in (LAYOUT, WIDE)]
    for space in (*spaces, *spaces):
        for seed in range(40):
            sequence = tokens_of(seed, 8)
            with space.match(sequence) as lease:
                lease.reserve(len(sequence))
                for array in lease.write_arrays(lease.num_committed, len(sequence)):
                    array[:] = seed + space.layout.num_kv_heads
                    del array
                lease.commit(sequence[lease.num_committed :])
        tier, *_ = client.status().tiers
        assert tier.backed_bytes <= tier.capacity_bytes
        with space.match(tokens_of(39, 8)) as lease:
            assert lease.num_tokens == 8 * BLOCK
            for array in lease.read_arrays(0, lease.num_tokens):
                assert (array == 39 + space.layout.num_kv_heads).all()
    assert client.status().counters["pages_unbacked"] > 0


# --- the daemon itself ---


def test_a_daemon_without_a_gpu_tier_never_imports_torch(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libzmq" in maps or "_zmq" in maps
    assert "torch" not in maps


def test_a_client_that_asks_for_no_tensor_never_imports_torch(
    program: Callable[..., Child],
) -> None:
    code = "store(namespace, tokens_of(1, 4))\nprint(sorted({'torch', 'kvd.daemon', 'anyio'} & "
    client = program(code + "set(sys.modules)))")
    assert client.says() == "[]"


def test_the_daemon_takes_little_memory_of_its_own(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    (anonymous,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    assert int(anonymous) * 1024 < 100e6


def test_the_arena_is_for_its_owner_and_group_alone(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    assert daemon.directory.stat().st_mode & 0o777 == 0o750
    modes = {path.suffix: path.stat().st_mode & 0o007 for path in daemon.directory.iterdir()}
    assert set(modes.values()) == {0}
    assert os.stat(daemon.endpoint.removeprefix("ipc://")).st_mode & 0o777 == 0o660


def test_a_small_shm_is_said_at_start_with_what_to_do(tmpfs: Mount, tmp_path: Path) -> None:
    small = tmpfs("size=64k")
    config = tmp_path / "kvd.toml"
    config.write_text(
        f'endpoint = "ipc://{tmp_path}/kvd.sock"\ndirectory = "{small}/kvd"\n'
        f'data_directory = "{tmp_path}/data"\n'
    )
    command = [sys.executable, "-m", "kvd", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # The header alone has 512 KiB.
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert str(small) in line
