"""Runs the application until a signal ends it."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import uvicorn

from kvd_client import BadRequest

if TYPE_CHECKING:
    from types import FrameType

    from kvd_infer.router import Router
    from kvd_infer.server.app import Service

# When all requests are over: for those who do not read their answers.
CLOSE_SECONDS = 5


class Server(uvicorn.Server):
    """Stops in two steps, so that requests under way end and others are told to go elsewhere.

    The first signal has the router take no more and go on for `grace` seconds with what it has; a
    second one ends that too. When the router is closed, the server is.
    """

    def __init__(self, service: Service, router: Router, grace: float) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                access_log=False,
                log_config=None,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._service = service
        self._router = router
        self._grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        grace = 0.0 if self._service.is_stopping else self._grace
        self._service.is_stopping = True
        threading.Thread(target=self._stop, args=(grace,), name="kvd-stop").start()

    def _stop(self, grace: float) -> None:
        self._router.close(grace)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Raises BadRequest where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise BadRequest(f"cannot listen on {host} port {port}: {error}") from error
