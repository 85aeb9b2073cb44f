"""Rows of KV, where each is the number of its token: what is there, and never written again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvd.testing.daemons import running_daemon
from kvd_client import BadRequest, Dropped, Identity, Layout, Lease, LeaseEnded, Namespace
from kvd_infer.rows import Rows
from tests.e2e.support import capacity_of
from tests.infer.conftest import PATIENCE_SECONDS, attached

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.testing.daemons import RunningDaemon

LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", block_size=16)
NUMBERS = Identity("numbers", "r1")
TOKENS = torch.arange(50)
LENGTHS = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49]


@pytest.fixture
def namespace(shared_daemon: RunningDaemon, salt: str) -> Iterator[Namespace]:
    with attached(shared_daemon) as client:
        yield client.open(NUMBERS, LAYOUT, salt)


def write(rows: Rows, tokens: Tensor) -> None:
    """Write the rows that these tokens have and `rows` has not."""
    targets, _ = rows.extend(len(tokens))
    numbers = tokens[rows.length :].float().split([target.shape[2] for target in targets])
    for target, its_numbers in zip(targets, numbers, strict=True):
        target.copy_(its_numbers[:, None, None].expand_as(target))
    del target, targets
    rows.written(len(tokens))


def read(rows: Rows) -> list[int]:
    """The tokens whose rows are there."""
    _, views = rows.extend(rows.length)
    numbers = torch.cat(views, dim=2)
    assert numbers.eq(numbers[:1, :1, :, :1, :1]).all(), "a row is of several tokens"
    return numbers[0, 0, :, 0, 0].int().tolist()


def written(namespace: Namespace | None) -> Rows:
    rows = Rows(namespace, LAYOUT, TOKENS)
    write(rows, TOKENS)
    return rows


def changed(start: int) -> Tensor:
    """The tokens, others from `start` on."""
    return torch.cat([TOKENS[:start], TOKENS[start:] + 100])


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_matched_to_the_token(namespace: Namespace, length: int) -> None:
    written(namespace).close()
    tokens = changed(length)
    rows = Rows(namespace, LAYOUT, tokens)
    found = min(length, 48)
    assert (rows.length, rows.reused_tokens, rows.num_committed) == (found, found, found // 16 * 16)
    write(rows, tokens)
    assert (read(rows), rows.num_committed) == (tokens.tolist(), 48)
    for each in (TOKENS, tokens):  # neither has become part of the other
        assert read(Rows(namespace, LAYOUT, each)) == each[:48].tolist()


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 39])
def test_copied_rows_can_be_cropped(namespace: Namespace, length: int) -> None:
    written(namespace).close()
    rows, other = Rows(namespace, LAYOUT, changed(40)), changed(length)
    rows.crop(length)
    assert (rows.length, rows.reused_tokens) == (length, length)
    write(rows, other)
    assert read(rows) == other.tolist()
    rows.commit(other)
    for each in (TOKENS, other):
        assert read(Rows(namespace, LAYOUT, each)) == each[:48].tolist()


def test_without_a_page_for_its_rows_whole_blocks_are_matched() -> None:
    settings = {
        "tiers": [{"type": "host", "capacity_bytes": capacity_of(64, LAYOUT)}],
        "limits": {"session_reserved_fraction": 1.0},
        "cache": {"high_watermark": 1.0, "low_watermark": 1.0},
    }
    with running_daemon(settings) as daemon, attached(daemon) as client:
        namespace = client.open(NUMBERS, LAYOUT)
        written(namespace).close()
        with namespace.match(TOKENS.numpy(), reserve_tokens=61 * 16) as others:
            assert others.shortage is None
            rows = Rows(namespace, LAYOUT, changed(40))
            assert (rows.length, rows.num_committed) == (32, 32)
        write(rows, changed(40))
        assert (read(rows), rows.num_committed) == (changed(40).tolist(), 48)


def test_copied_rows_are_there_when_the_daemon_is_away(daemon: RunningDaemon) -> None:
    with attached(daemon) as client:
        namespace = client.open(NUMBERS, LAYOUT)
        written(namespace).close()
        rows = Rows(namespace, LAYOUT, changed(40))
        daemon.kill()
        write(rows, changed(40))
        assert read(rows) == changed(40).tolist()


def test_copied_rows_are_void_when_the_daemon_was_away(daemon: RunningDaemon) -> None:
    with attached(daemon) as client:
        namespace = client.open(NUMBERS, LAYOUT)
        written(namespace).close()
        rows = Rows(namespace, LAYOUT, changed(40))
        daemon.restart()
        with pytest.raises(LeaseEnded):
            write(rows, changed(40))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_warm", [False, True], ids=["committed", "matched"])
def test_rows_go_on_differently_behind_a_crop(
    namespace: Namespace, length: int, is_warm: bool
) -> None:
    other = changed(length)
    if is_warm:
        written(namespace).close()
    rows = written(namespace)
    rows.crop(length)
    write(rows, other)
    assert read(rows) == other.tolist()
    rows.commit(other)
    assert rows.num_committed == 48
    for tokens in (TOKENS, other):  # neither has become part of the other
        assert read(Rows(namespace, LAYOUT, tokens)) == tokens[:48].tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_private_memory_can_be_cropped(length: int) -> None:
    other = changed(length)
    rows = written(None)
    rows.crop(length)
    write(rows, other)
    assert read(rows) == other.tolist()


def pages(rows: Rows) -> list[int]:
    assert rows._lease is not None
    return rows._lease.pages.tolist()


@pytest.mark.parametrize("length", [32, 33])
def test_crop_into_what_is_committed_goes_on_in_pages_of_its_own(
    namespace: Namespace, length: int
) -> None:
    rows = written(namespace)
    before = pages(rows)
    rows.crop(length)
    assert pages(rows)[:2] == before[:2]
    assert not set(pages(rows)[2:]) & set(before)
    assert read(rows) == TOKENS[:length].tolist()


def test_crop_behind_what_is_committed_keeps_its_pages(namespace: Namespace) -> None:
    rows = written(namespace)
    before = pages(rows)
    rows.crop(49)
    write(rows, TOKENS)
    assert pages(rows) == before


def test_crop_keeps_the_rows_when_the_daemon_is_away(daemon: RunningDaemon) -> None:
    with attached(daemon) as client:
        rows = written(client.open(NUMBERS, LAYOUT))
        daemon.kill()
        rows.crop(20)
        assert read(rows) == TOKENS[:20].tolist()
        write(rows, TOKENS)
        assert read(rows) == TOKENS.tolist()


def test_crop_of_a_lease_that_has_ended_keeps_no_row(daemon: RunningDaemon) -> None:
    with attached(daemon) as client:
        rows = written(client.open(NUMBERS, LAYOUT))
        daemon.restart()
        with pytest.raises(LeaseEnded):
            rows.crop(20)
        assert rows.length == 0


def test_cropped_ids_are_the_caller_s_again(namespace: Namespace) -> None:
    rows = written(namespace)
    rows.crop(20)
    assert (rows.num_known, rows.reused_tokens, rows.num_committed) == (20, 0, 16)
    write(rows, TOKENS)
    assert rows.num_committed == 16
    rows.commit(TOKENS)
    assert rows.num_committed == 48


def test_rows_begun_anew_are_of_the_same_tokens(namespace: Namespace) -> None:
    written(namespace).close()
    rows = Rows(namespace, LAYOUT, TOKENS)
    assert rows.reused_tokens == 48
    rows.begin_anew()
    assert (rows.length, rows.reused_tokens, rows.num_known) == (0, 0, 50)
    write(rows, TOKENS)
    assert (read(rows), rows.num_committed) == (TOKENS.tolist(), 48)


def test_commit_wants_all_ids_and_the_same_ones(namespace: Namespace) -> None:
    rows = written(namespace)
    with pytest.raises(BadRequest, match="crop"):
        rows.commit(TOKENS[:49])
    with pytest.raises(BadRequest, match="begin with"):
        rows.commit(TOKENS + 1)


# --- what an engine asks for ---


@pytest.fixture
def small() -> Iterator[Namespace]:
    """A namespace of a daemon with 32 pages."""
    settings = {
        "tiers": [{"type": "host", "capacity_bytes": capacity_of(32, LAYOUT)}],
        "limits": {"session_reserved_fraction": 1.0},
        "cache": {"high_watermark": 1.0, "low_watermark": 1.0},
    }
    with running_daemon(settings) as daemon, attached(daemon) as client:
        yield client.open(NUMBERS, LAYOUT)


def test_reserve_says_whether_there_are_pages(small: Namespace) -> None:
    rows = Rows(small, LAYOUT, TOKENS)
    assert rows.reserve(100, PATIENCE_SECONDS)
    with small.match([], reserve_tokens=16 * 16) as others:
        assert others.shortage is None
        assert not rows.reserve(20 * 16, 0.05)
    assert rows.reserve(20 * 16, PATIENCE_SECONDS)


def test_refused_reserve_ends_no_pages(small: Namespace) -> None:
    """Only rows that had to be written elsewhere do: then none behind them gets a page."""
    rows = Rows(small, LAYOUT, TOKENS)
    assert not rows.reserve(33 * 16, 0.05)
    write(rows, TOKENS)
    assert rows.num_committed == 48


@pytest.mark.parametrize("namespace_", [None, "away"])
def test_without_a_daemon_nothing_need_be_reserved(
    daemon: RunningDaemon, namespace_: str | None
) -> None:
    with attached(daemon) as client:
        rows = Rows(client.open(NUMBERS, LAYOUT) if namespace_ else None, LAYOUT, TOKENS)
        daemon.kill()
        assert rows.reserve(10_000, PATIENCE_SECONDS)
        write(rows, TOKENS)
        assert read(rows) == TOKENS.tolist()


def test_ids_that_are_learned_are_committed_as_they_are_written(namespace: Namespace) -> None:
    rows = Rows(namespace, LAYOUT, TOKENS[:20])
    for num_tokens in range(20, 51):
        rows.learn(TOKENS[:num_tokens])
        write(rows, TOKENS[:num_tokens])
        assert rows.num_committed == num_tokens // 16 * 16
    assert read(Rows(namespace, LAYOUT, TOKENS)) == TOKENS[:48].tolist()


def test_block_that_cannot_be_committed_is_not_tried_with_each_token(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, tried = Rows(namespace, LAYOUT, TOKENS), []

    def fail(lease: Lease, tokens: NDArray[Any]) -> None:
        tried.append(len(tokens))
        raise Dropped("a test's")

    monkeypatch.setattr(Lease, "commit", fail)
    for num_tokens in range(1, 51):
        write(rows, TOKENS[:num_tokens])
    assert tried == [16, 32, 48]


def test_each_outage_is_said_once(daemon: RunningDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with attached(daemon) as client:
        namespace = client.open(NUMBERS, LAYOUT)
        for _ in range(2):
            rows = Rows(namespace, LAYOUT, TOKENS)
            assert rows.reserve(50, PATIENCE_SECONDS)
            daemon.kill()
            for num_tokens in range(1, 51):
                write(rows, TOKENS[:num_tokens])
            written(namespace)
            daemon.start()
            assert client.wait_attached(PATIENCE_SECONDS)
    said = [record.message for record in caplog.records if record.name == "kvd_infer.rows"]
    assert ["without" in each for each in said] == [True, False, True]


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_fork_goes_on_differently(namespace: Namespace, length: int) -> None:
    tokens, other = TOKENS[: length + 1], changed(length)
    rows = Rows(namespace, LAYOUT, tokens)
    write(rows, tokens[:length])
    fork = rows.fork(PATIENCE_SECONDS)
    assert fork is not None
    assert (pages(fork)[: length // 16], fork.length) == (pages(rows)[: length // 16], length)
    fork.learn(other)
    write(fork, other)
    rows.learn(TOKENS)
    write(rows, TOKENS)
    assert (read(fork), read(rows)) == (other.tolist(), TOKENS.tolist())


def test_private_memory_is_not_forked() -> None:
    assert written(None).fork(PATIENCE_SECONDS) is None


def test_rows_that_end_in_private_memory_are_not_forked(
    small: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_infer.rows.RESERVE_SECONDS", 0.05)
    tokens = torch.arange(300)
    rows = Rows(small, LAYOUT, tokens)
    write(rows, tokens[:50])
    with small.match([], reserve_tokens=16 * 16):
        write(rows, tokens)
    assert rows.num_committed == len(pages(rows)) * 16 == 256
    assert rows.fork(PATIENCE_SECONDS) is None
    assert read(rows) == tokens.tolist()


def test_fork_without_pages_for_the_rest_is_none(small: Namespace) -> None:
    rows = written(small)
    num_pages = 32 - len(pages(rows))
    with small.match([], reserve_tokens=num_pages * 16) as others:
        assert others.shortage is None
        assert rows.fork(0.05) is None
    assert read(rows) == TOKENS.tolist()


def test_rows_have_what_a_lease_has(namespace: Namespace) -> None:
    rows = written(namespace)
    assert rows.lease is not None
    rows.lease.save("one", TOKENS.numpy())
    resumed = namespace.resume("one")
    again = Rows(namespace, LAYOUT, TOKENS, resumed.lease)
    assert (again.length, again.num_committed) == (50, 48)
    assert read(again) == TOKENS.tolist()
