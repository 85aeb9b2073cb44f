"""The `kvd-ctl` command.

Exit status 0; 1, with a line on stderr, where kvd does not answer or refuses; 2 for usage; 130 for
Ctrl-C.
"""

import logging
import sys

from kvd_ctl import INTERRUPTED

try:
    # Their commands are there when they are imported, and in this order in the help.
    from kvd_ctl import asking, changing, machine  # noqa: F401
    from kvd_ctl.app import NAME, app
except ModuleNotFoundError as error:
    sys.exit(f"kvd-ctl: {error}: install kvd[ctl]")
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)


def main() -> None:
    """Entry point of the `kvd-ctl` script."""
    # What the client library would log, the error says.
    logging.getLogger("kvd_client").addHandler(logging.NullHandler())
    try:
        app(prog_name=NAME)
    except OSError as error:  # as of a full disk, where the output goes
        sys.exit(f"kvd-ctl: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
