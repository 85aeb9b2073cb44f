"""Daemon inside another program."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import zmq
from blockbuster import BlockBuster
from zmq.asyncio import Context

from kvd.config import Config, parse
from kvd.daemon import Daemon
from kvd.protocol.codec import decode_reply, encode
from kvd.protocol.errors import AlreadyRunning, ConfigError, KvdError, TierFailed
from kvd.protocol.messages import (
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    DetachRequest,
    HeartbeatRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    MatchResult,
    OpenReply,
    OpenRequest,
    ReleaseRequest,
    StatusReply,
    StatusRequest,
)
from kvd_tiers.host import HostTier
from tests.actors.waiting import until
from tests.arena.conftest import child, shm  # noqa: F401 - fixtures
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, settings, tokens_of

if TYPE_CHECKING:
    from tests.arena.conftest import Child


def config(base: Path, name: str = "kvd", **sections: Any) -> Config:
    own = {
        "endpoint": f"ipc://{base}/{name}.sock",
        "directory": f"{base}/{name}",
        "data_directory": f"{base}/{name}.data",
    }
    return parse(settings() | own | sections)


async def ask(endpoint: str, *requests: AnyRequest) -> list[AnyReply]:
    """The answers to requests over one connection, in their order."""
    with Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        replies = []
        for request in requests:
            await socket.send(encode(request))
            with anyio.fail_after(30):
                replies.append(decode_reply(await socket.recv()))
        return replies


async def serves(daemon: Daemon) -> bool:
    (reply,) = await ask(daemon.endpoint, StatusRequest(id=1))
    return isinstance(reply, StatusReply) and reply.epoch == daemon.epoch


def left(base: Path, name: str = "kvd") -> list[str]:
    return sorted(path.name for path in (base / name).iterdir())


CLEAN = ["daemon.lock", "header", "host.lock", "sequences"]


@pytest.fixture(autouse=True)
async def tidy() -> AsyncIterator[None]:
    """Nothing is left open by any of these tests: that would warn, and warnings are errors."""
    yield
    gc.collect()


# --- life ---


async def test_it_serves_inside_the_block_and_not_after(shm: Path) -> None:  # noqa: F811
    async with Daemon(config(shm)) as daemon:
        assert await serves(daemon)
    assert not (shm / "kvd.sock").exists()
    assert left(shm) == CLEAN


async def test_it_can_be_entered_again_by_another(shm: Path) -> None:  # noqa: F811
    for _ in range(3):
        async with Daemon(config(shm)) as daemon:
            assert await serves(daemon)


async def test_every_start_has_an_epoch_of_its_own(shm: Path) -> None:  # noqa: F811
    epochs = {Daemon(config(shm)).epoch for _ in range(10)}
    assert len(epochs) == 10
    assert all(epochs)


async def test_two_at_once_in_one_process(shm: Path) -> None:  # noqa: F811
    async with Daemon(config(shm, "one")) as one, Daemon(config(shm, "two")) as two:
        assert one.epoch != two.epoch
        assert await serves(one)
        assert await serves(two)
    assert left(shm, "one") == left(shm, "two") == CLEAN


def test_two_at_once_on_uvloop(shm: Path) -> None:  # noqa: F811
    async def main() -> None:
        async with Daemon(config(shm, "one")) as one, Daemon(config(shm, "two")) as two:
            assert await serves(one)
            assert await serves(two)

    anyio.run(main, backend_options={"use_uvloop": True})
    assert left(shm, "one") == left(shm, "two") == CLEAN


async def test_an_exception_in_the_block_stops_it(shm: Path) -> None:  # noqa: F811
    async def body() -> None:
        async with Daemon(config(shm)):
            raise KeyError("mine")

    with pytest.raises((KeyError, ExceptionGroup)) as raised:
        await body()
    assert "mine" in repr(raised.value)
    assert left(shm) == CLEAN
    async with Daemon(config(shm)) as daemon:
        assert await serves(daemon)


async def test_a_cancellation_from_outside_stops_it(shm: Path) -> None:  # noqa: F811
    with anyio.CancelScope() as scope:
        async with Daemon(config(shm)) as daemon:
            assert await serves(daemon)
            scope.cancel()
            await anyio.sleep_forever()
    assert left(shm) == CLEAN
    assert not (shm / "kvd.sock").exists()
    async with Daemon(config(shm)) as daemon:
        assert await serves(daemon)


def test_a_cancellation_leaves_the_loop_without_a_reader(shm: Path) -> None:  # noqa: F811
    async def main() -> set[int]:
        loop = asyncio.get_running_loop()
        selector = loop._selector  # type: ignore[attr-defined]
        before = set(selector.get_map())
        with anyio.CancelScope() as scope:
            async with Daemon(config(shm)):
                scope.cancel()
                await anyio.sleep_forever()
        return set(selector.get_map()) - before

    assert asyncio.run(main()) == set()


def test_an_interrupt_of_the_loop_stops_it(shm: Path) -> None:  # noqa: F811
    async def main() -> None:
        async with Daemon(config(shm)) as daemon:
            assert await serves(daemon)
            os.kill(os.getpid(), 2)
            await anyio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert left(shm) == CLEAN


def test_a_forked_child_of_its_program_does_not_keep_its_place(
    shm: Path,  # noqa: F811
    child: Callable[..., Child],  # noqa: F811
) -> None:
    """A child shares the descriptors of its parent's locks, whatever becomes of the parent."""
    code = """
import os, sys, anyio
from pathlib import Path
from kvd.daemon import Daemon
from tests.test_daemon import config, serves
async def main():
    shm = Path(sys.argv[1])
    async with Daemon(config(shm)):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until its parent ends
            os._exit(0)
    async with Daemon(config(shm)) as daemon:
        print(await serves(daemon))
anyio.run(main)
"""
    assert child(code, shm).says() == "True"


# --- a socket that others listen on ---


@pytest.fixture
def listener(shm: Path) -> Iterator[socket.socket]:  # noqa: F811
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{shm}/kvd.sock")
        listener.listen()
        yield listener


async def test_it_serves_a_socket_that_it_is_given_and_leaves_it(
    shm: Path,  # noqa: F811
    listener: socket.socket,
) -> None:
    for _ in range(2):
        given = {f"ipc://{shm}/kvd.sock": os.dup(listener.fileno())}
        async with Daemon(config(shm), listeners=given) as daemon:
            assert await serves(daemon)
        assert (shm / "kvd.sock").is_socket()
    assert not (shm / "kvd.sock.lock").exists()


async def test_a_socket_that_listens_elsewhere_is_refused(
    shm: Path,  # noqa: F811
    listener: socket.socket,
) -> None:
    with pytest.raises(ConfigError, match=r"other\.sock"):
        Daemon(config(shm), listeners={f"ipc://{shm}/other.sock": listener.fileno()})


# --- a start that fails ---


async def fails(daemon: Daemon, kind: type[KvdError], match: str) -> None:
    with pytest.raises(kind, match=match):
        async with daemon:
            pass


async def test_a_place_that_is_taken_is_refused_and_the_owner_goes_on(
    shm: Path,  # noqa: F811
) -> None:
    async with Daemon(config(shm)) as daemon:
        await fails(Daemon(config(shm)), AlreadyRunning, "kvd.sock")
        elsewhere = config(shm, endpoint=f"ipc://{shm}/other.sock")
        await fails(Daemon(elsewhere), AlreadyRunning, f"{shm}/kvd")
        events = config(shm, "other", events={"endpoint": daemon.endpoint})
        await fails(Daemon(events), AlreadyRunning, "kvd.sock")
        tier = {"type": "host", "capacity_bytes": "64KiB", "directory": f"{shm}/kvd"}
        await fails(Daemon(config(shm, "other", tiers=[tier])), AlreadyRunning, "memory")
        assert await serves(daemon)
    async with Daemon(config(shm, "other")) as daemon:
        assert await serves(daemon)


async def test_a_directory_that_cannot_be_made_is_refused(shm: Path) -> None:  # noqa: F811
    (shm / "file").touch()
    inside = config(shm, directory=f"{shm}/file/kvd")
    await fails(Daemon(inside), KvdError, "file")
    async with Daemon(config(shm)) as daemon:
        assert await serves(daemon)


async def test_an_endpoint_that_cannot_be_bound_is_refused_and_leaves_nothing(
    shm: Path,  # noqa: F811
) -> None:
    (shm / "kvd.sock").mkdir()
    await fails(Daemon(config(shm)), KvdError, "kvd.sock")
    (shm / "kvd.sock").rmdir()
    async with Daemon(config(shm)) as daemon:
        assert await serves(daemon)


def test_a_configuration_that_cannot_be_used_is_refused(shm: Path) -> None:  # noqa: F811
    for tiers in ([{"type": "nonesuch"}], [{"type": "host", "capacity_bytes": "1024TiB"}]):
        with pytest.raises(ConfigError):
            Daemon(config(shm, tiers=tiers))


def test_the_errors_of_a_start_are_of_one_family() -> None:
    assert issubclass(AlreadyRunning, KvdError)
    assert issubclass(ConfigError, KvdError)
    assert issubclass(TierFailed, KvdError)


# --- the loop ---


async def test_a_tier_that_cannot_be_closed_ends_no_stop(
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    close = HostTier.close

    def close_oddly(tier: HostTier) -> None:
        close(tier)
        raise ValueError("odd")

    monkeypatch.setattr(HostTier, "close", close_oddly)
    async with Daemon(config(shm)):
        pass
    assert "reason=not_closed tier=host at the stop: ValueError: odd" in caplog.text


async def test_its_pulse_goes_while_it_serves(shm: Path) -> None:  # noqa: F811
    async with Daemon(config(shm)) as daemon:
        with anyio.fail_after(30):
            await daemon.pulse()


def test_it_serves_on_every_kind_of_asyncio_loop(shm: Path) -> None:  # noqa: F811
    """What the host program runs it by is its own business: here without anyio's runner."""

    async def main() -> None:
        async with Daemon(config(shm)) as daemon:
            assert len(await drive(daemon)) == 3

    anyio.run(main)
    asyncio.run(main())


def test_serving_never_blocks_the_loop(shm: Path) -> None:  # noqa: F811
    """Attach, open, match, reserve, release, heartbeat, sweeps: each blocking call is caught."""

    async def main() -> list[AnyReply]:
        async with Daemon(config(shm)) as daemon:
            detector = BlockBuster("kvd")
            detector.activate()
            try:
                return await drive(daemon)
            finally:
                detector.deactivate()

    assert [type(reply) for reply in anyio.run(main)] == [AttachReply, OpenReply, MatchReply]


async def drive(daemon: Daemon) -> list[AnyReply]:
    with Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(daemon.endpoint)

        async def answer(request: AnyRequest, *frames: bytes) -> AnyReply:
            await socket.send_multipart([encode(request), *frames])
            with anyio.fail_after(30):
                return decode_reply(await socket.recv())

        attach = await answer(AttachRequest(id=1, version=1, min_version=1))
        own = {"epoch": daemon.epoch}
        opened = await answer(
            OpenRequest(id=2, **own, identity=IDENTITY, layout=LAYOUT, maps=False)
        )
        assert isinstance(opened, OpenReply), opened
        tokens = bytes(4 * len(tokens_of(1, 1)))
        item = MatchItem(opened.namespace, 1, BLOCK, reserve=16)
        matched = await answer(MatchRequest(id=3, **own, items=(item,)), tokens)
        assert isinstance(matched, MatchReply)
        assert isinstance(matched.results[0], MatchResult)
        await answer(HeartbeatRequest(id=4, **own, leases=(1,)))
        await answer(ReleaseRequest(id=5, **own, leases=(1,)))
        await answer(DetachRequest(id=6, **own))
        # A sweep removes the file of a session that has ended.
        await until(lambda: not list(daemon.directory.glob("*.session")))
        return [attach, opened, matched]
