"""The `kvd` command: flags, then Config, then Daemon. Only here is the process touched."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import kvd
from kvd.protocol.errors import ConfigError, KvdError
from kvd.protocol.units import format_bytes

INTERRUPTED = 130

try:
    import anyio
    import uvloop  # noqa: F401 - anyio asks for it by name

    from kvd import sdk, systemd
    from kvd.check import check
    from kvd.daemon import Daemon, one_error
    from kvd.loading import Loaded, find, load, profiles
    from kvd.logs import JsonFormatter, StormFilter, TextFormatter
except ModuleNotFoundError as error:
    sys.exit(f"kvd: {error}: install kvd[daemon]")
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from kvd.config import Config, LogConfig

STDOUT, STDERR = 1, 2
# One for all handlers: a reload ends no storm.
STORMS = StormFilter()


def main() -> None:
    """Run kvd until SIGTERM or Ctrl-C.

    Exit status 0, or with a line that says what was wrong 1, or 78 for its configuration; 130 for
    a Ctrl-C before it began, or when it had stopped.
    """
    _open_standard_descriptors()
    try:
        status = _run(_arguments())
    except KeyboardInterrupt:
        status = INTERRUPTED
    if threading.active_count() > 1:  # one that hangs in a disk would keep the process for ever
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def _run(args: argparse.Namespace) -> int:
    if args.check:
        try:
            return check(lambda: _load(args), _say, as_json=args.json)
        except OSError as error:  # a disk that is full, or nobody who reads
            print(f"kvd: {error}", file=sys.stderr)
            return 1
    try:
        loaded = _load(args)
        _set_up_logging(loaded.config.log)
        _raise_descriptor_limit()
        with loaded.naming_source():
            flush = sdk.start("kvd", prometheus=bool(loaded.config.http.endpoint))
            stop_by = anyio.run(_serve, loaded, backend_options={"use_uvloop": True})
        flush(stop_by)
    except KvdError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return os.EX_CONFIG if isinstance(error, ConfigError) else 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvd",
        description="Own the KV cache of this machine's LLM inference processes.",
        epilog="Without --config it uses its defaults and says what they are. Example: "
        "kvd --config /etc/kvd/kvd.toml --check",
    )
    parser.add_argument(
        "--config",
        type=find,
        metavar="FILE",
        help=f"configuration (TOML), or one of those that come with kvd: {', '.join(profiles())}",
    )
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", choices=["text", "json"])
    parser.add_argument("--check", action="store_true", help="say what it would do, and end")
    parser.add_argument("--json", action="store_true", help="what --check says, for programs")
    parser.add_argument("--version", action="version", version=f"kvd {kvd.__version__}")
    args = parser.parse_args()
    if args.json and not args.check:
        parser.error("--json goes with --check")
    return args


def _load(args: argparse.Namespace) -> Loaded:
    flags = {"log.level": args.log_level, "log.format": args.log_format}
    given = {key: value for key, value in flags.items() if value is not None}
    return load(args.config, os.environ, given)


async def _serve(loaded: Loaded) -> float:
    """Until a signal; when the stop must be over (time.monotonic)."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    with one_error(), anyio.open_signal_receiver(*numbers) as signals:
        systemd.notify(STATUS="recovering")
        daemon = Daemon(
            loaded,
            on_reload=_log_as_told,
            listeners=systemd.take_listeners(),
            moved=functools.partial(systemd.extend, loaded.config.hang_seconds),
        )
        ready, told = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as running:
            running.start_soon(_run_daemon, daemon, ready, told)
            await _until_told_to_stop(signals, daemon, ready)
            systemd.notify(STOPPING=1, STATUS="saving")
            systemd.extend(daemon.config.grace_seconds)
            stop_by = time.monotonic() + daemon.config.grace_seconds
            told.set()
            if not ready.is_set():  # it has served nobody: there is nothing to save
                running.cancel_scope.cancel()
                # It may wait for a disk that hangs, whoever cancels it.
                asyncio.get_running_loop().call_later(daemon.config.grace_seconds, _leave)
    return stop_by


async def _run_daemon(daemon: Daemon, ready: anyio.Event, told: anyio.Event) -> None:
    """Until it is told to stop; it is `ready` before that."""
    async with daemon, anyio.create_task_group() as reports:
        tiers = ", ".join(
            f"{tier.name} tier: up to {format_bytes(tier.capacity_bytes)} in "
            f"{daemon.directory if tier.kind == 'memory' else daemon.data_directory}"
            for tier in daemon.tier_status()
        )
        with contextlib.suppress(OSError):  # nobody who reads, or a disk that is full
            _say(f"kvd {kvd.__version__} is ready on {_listed(daemon.places.endpoints)}; {tiers}")
        systemd.notify(READY=1, STATUS=daemon.summary())
        reports.start_soon(systemd.report, daemon.pulse, daemon.summary)
        ready.set()
        await told.wait()
        reports.cancel_scope.cancel()


def _listed(endpoints: Mapping[str, str]) -> str:
    """In short: that of requests, and behind a word each of the others."""
    words = {key: key.removesuffix("endpoint").strip("._") for key in endpoints}
    return ", ".join(f"{words[key]} {endpoint}".strip() for key, endpoint in endpoints.items())


async def _until_told_to_stop(
    signals: AsyncIterator[signal.Signals], daemon: Daemon, ready: anyio.Event
) -> None:
    """Reload at each SIGHUP until another signal comes, which waits for no file and no start."""
    async with anyio.create_task_group() as reloads:
        async for number in signals:
            if number == signal.SIGHUP:
                reloads.start_soon(_reload, daemon, ready)
                continue
            logging.getLogger(kvd.__name__).info("%s: stopping", signal.Signals(number).name)
            reloads.cancel_scope.cancel()
            return


def _leave() -> None:
    """End the process as it stands."""
    logging.getLogger(kvd.__name__).error("reason=left the start does not end: it is left")
    logging.shutdown()
    os._exit(0)


async def _reload(daemon: Daemon, ready: anyio.Event) -> None:
    await ready.wait()
    with systemd.reloading(), contextlib.suppress(Exception):  # the log has it
        await daemon.reload()


def _open_standard_descriptors() -> None:
    """Where one was closed, what is opened next would be taken for it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)


def _say(line: str) -> None:
    """To whoever reads stdout, at once. Raises OSError."""
    os.write(STDOUT, f"{line}\n".encode())


def _raise_descriptor_limit() -> None:
    """Each client takes some, and the usual limit of 1024 is for programs that still use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log_as_told(config: Config) -> None:
    _set_up_logging(config.log)


def _set_up_logging(config: LogConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    handler.addFilter(STORMS)
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    # It sends spans and metrics, and at level debug would tell of each time.
    logging.getLogger("urllib3").setLevel(max(logging.INFO, logging.root.level))


if __name__ == "__main__":
    main()
