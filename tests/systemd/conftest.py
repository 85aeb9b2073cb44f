"""A box with a real systemd, into which kvd is installed as a service, once for a module."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.support import eventually

ROOT = Path(__file__).parent.parent.parent
BOX = Path(__file__).with_name("systemd-box")
CANNOT_RUN_HERE = 77

UNITS = "/etc/systemd/system"
DROP_IN = f"{UNITS}/kvd.service.d/test.conf"
SOURCE = Path("/opt/kvd/source")
CONFIGURATION = "/etc/kvd/kvd.toml"


def places() -> dict[Path, Path]:
    """Where we import from, and where a box has that: the checkout as a whole, for its links.

    An editable install may find our packages by a hook instead of by the path.
    """
    packages = [ROOT, ROOT / "plugins", ROOT / "clients"]
    found = packages + [Path(place).resolve() for place in sys.path if Path(place).is_dir()]
    ours = [place for place in found if not place.is_relative_to(sys.base_prefix)]
    return {
        place: SOURCE / place.relative_to(ROOT)
        if place.is_relative_to(ROOT)
        else Path(f"/opt/kvd/lib/{number}")
        for number, place in enumerate(ours)
    }


# An environment as an operator would make it, out of what these tests run in.
BINARIES = "/opt/kvd/venv/bin"
PYTHON = f"{BINARIES}/python"
MAKE_ENVIRONMENT = f"""
set -e
echo /opt/kvd/python/lib > /etc/ld.so.conf.d/kvd.conf
ldconfig
cd /opt/kvd
python/bin/python3.{sys.version_info.minor} -m venv --without-pip venv
cd venv/lib/*/site-packages
printf '%s\\n' {" ".join(map(str, places().values()))} > kvd.pth
cd /opt/kvd
for package in kvd kvd_ctl kvd_infer; do
    script=venv/bin/${{package/_/-}}
    printf '#!{PYTHON}\\nfrom %s.__main__ import main\\nmain()\\n' $package > $script
    chmod +x $script
done
"""

# The user of an engine, who is in group kvd.
ENGINE = "engine"
PROLOGUE = """
from kvd import systemd
from kvd_client import *
from tests.e2e.support import *
"""

# Programs of its, and what the second says where all is there.
STORE = """
with Client(timeout=30.0) as client:
    store(client.open(IDENTITY, LAYOUT), tokens_of(1, 4))
"""
MATCH = """
with Client(timeout=30.0) as client:
    assert client.wait_attached(30.0)
    with client.open(IDENTITY, LAYOUT).match(tokens_of(1, 4)) as lease:
        print(lease.num_tokens, holds(lease, tokens_of(1, 4)))
"""
ALL = "16 True"


class Box:
    """A machine of its own, with systemd; what is run there is run by root."""

    def __init__(self, *more: str) -> None:
        """With `more` options of systemd-box."""
        outside = {p: seen for p, seen in places().items() if not p.is_relative_to(ROOT)}
        binds = {sys.base_prefix: "/opt/kvd/python", ROOT: SOURCE} | outside
        options = [
            option for place, seen in binds.items() for option in ("--bind", f"{place}:{seen}")
        ]
        self._process = subprocess.Popen(
            ["bash", BOX, *more, *options, ROOT, "--", sys.executable, "-m", "tests.systemd.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._num_engines = 0

    def try_(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command; how it ended."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # what it says instead is read
            print(json.dumps(args), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            self._did_not_start()
        return subprocess.CompletedProcess(args, *json.loads(line))

    def run(self, *args: str) -> str:
        """Run a command that succeeds; its output."""
        done = self.try_(*args)
        assert done.returncode == 0, (done, self.try_("journalctl", "--no-pager", "-n", "50"))
        return done.stdout.strip()

    def ctl(self, *args: str) -> str:
        """Run the `kvd-ctl` of the installed kvd."""
        return self.run(f"{BINARIES}/kvd-ctl", *args)

    def engine(self, code: str) -> str:
        """Run a program as an ordinary user; its output."""
        return self.run("runuser", "-u", ENGINE, "--", PYTHON, "-c", PROLOGUE + code)

    def start_engine(self, code: str) -> str:
        """Start such a program, of which `ended` tells; returns when it says that it is ready."""
        self._num_engines += 1
        unit = f"engine-{self._num_engines}.service"
        program = f"/run/{unit}.py"
        self.write(program, PROLOGUE + code)
        options = ["--property=Type=notify", "--remain-after-exit", f"--uid={ENGINE}"]
        self.run("systemd-run", "--unit", unit, *options, PYTHON, program)
        return unit

    def ended(self, unit: str) -> None:
        """Wait until a program of `start_engine` has succeeded."""
        eventually(lambda: self.show("SubState", unit) != "running", patience=100.0)
        assert self.show("Result", unit) == "success", self.run("journalctl", "--unit", unit)

    def show(self, name: str, unit: str = "kvd.service") -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit)

    def write(self, path: str, text: str) -> None:
        """Make a file, and the directories above it."""
        command = 'printf %s "$1" | install -D --mode=644 /dev/stdin "$0"'
        self.run("bash", "-c", command, path, text)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def _did_not_start(self) -> None:
        complaint = self._process.stderr.read()
        if self._process.wait() == CANNOT_RUN_HERE:
            pytest.skip(complaint)
        raise AssertionError(complaint)


@pytest.fixture(scope="module")
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """With the options that its module has as BOX_OPTIONS."""
    box = Box(*getattr(request.module, "BOX_OPTIONS", ()))
    try:
        box.run("bash", "-c", MAKE_ENVIRONMENT)
        box.ctl("install")
        box.run("useradd", "--groups", "kvd", ENGINE)
        yield box
    finally:
        box.close()


@pytest.fixture
def service_with(box: Box) -> Iterator[Callable[[str], Box]]:
    """Starts the service with more in its section: `service_with("WatchdogSec=2s")`."""

    def start(lines: str) -> Box:
        box.write(DROP_IN, f"[Service]\n{lines}\n")
        box.run("systemctl", "daemon-reload")
        box.run("systemctl", "reset-failed")
        box.run("systemctl", "restart", "kvd.service")
        return box

    yield start
    box.run("rm", DROP_IN)
    box.run("systemctl", "daemon-reload")


@pytest.fixture
def service(box: Box) -> Box:
    """A box whose kvd runs, whatever the test before it did."""
    box.run("systemctl", "reset-failed")
    box.run("systemctl", "start", "kvd.service")
    return box
