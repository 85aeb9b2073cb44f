"""The `kvd` command: flags, then Config, then Daemon. Only here is the process touched."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

import kvd
from kvd.protocol.errors import KvdError
from kvd.protocol.units import format_bytes

try:
    import anyio
    import uvloop  # noqa: F401 - anyio asks for it by name

    from kvd import sdk
    from kvd.config import Config, LogConfig, load
    from kvd.daemon import Daemon
    from kvd.logs import JsonFormatter, StormFilter, TextFormatter
except ModuleNotFoundError as error:
    sys.exit(f"kvd: {error}: install kvd[daemon]")


def main() -> None:
    """Run kvd until SIGTERM or Ctrl-C; exit status 0, or 1 with a line that says what was wrong."""
    status = _run(_arguments())
    if threading.active_count() > 1:  # one that hangs in a disk would keep the process for ever
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _run(args: argparse.Namespace) -> int:
    try:
        config = load(args.config)
        config = msgspec.structs.replace(config, log=_log_config(config.log, args))
        _set_up_logging(config.log)
        _raise_descriptor_limit()
        flush = sdk.start("kvd")
        stop_by = anyio.run(_serve, config, backend_options={"use_uvloop": True})
        flush(stop_by)
    except KvdError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvd",
        description="Own the KV cache of this machine's LLM inference processes.",
        epilog="Without --config it uses its defaults and says what they are. Example: "
        "kvd --config /etc/kvd/kvd.toml",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", choices=["text", "json"])
    parser.add_argument("--version", action="version", version=f"kvd {kvd.__version__}")
    return parser.parse_args()


def _log_config(config: LogConfig, args: argparse.Namespace) -> LogConfig:
    return LogConfig(args.log_level or config.level, args.log_format or config.format)


async def _serve(config: Config) -> float:
    """Until a signal; when the stop must be over (time.monotonic)."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with Daemon(config) as daemon:
            tiers = ", ".join(
                f"{tier.name} tier: up to {format_bytes(tier.capacity_bytes)} in "
                f"{daemon.directory if tier.kind == 'memory' else daemon.data_directory}"
                for tier in daemon.tier_status()
            )
            print(f"kvd {kvd.__version__} is ready on {daemon.endpoint}; {tiers}", flush=True)
            async for number in signals:
                logging.getLogger(kvd.__name__).info("%s: stopping", signal.Signals(number).name)
                break
            stop_by = time.monotonic() + config.grace_seconds
    return stop_by


def _raise_descriptor_limit() -> None:
    """Each client takes some, and the usual limit of 1024 is for programs that still use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(config: LogConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    handler.addFilter(StormFilter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler])


if __name__ == "__main__":
    main()
