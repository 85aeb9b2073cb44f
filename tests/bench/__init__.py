"""The benchmarks of kvd: `python -m tests.bench [PART]`, or `make bench PART=…`."""

import os

# Read when torch is imported. OpenMP's threads sleep while they wait: on a shared machine, spinning
# would take the core that the daemon wants.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
