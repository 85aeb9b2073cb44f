"""The benchmarks of kvd: `python -m tests.bench [PART]`, or `make bench PART=…`."""

import os

# Read when torch is imported. OpenMP's threads sleep while they wait: on a shared machine, spinning
# would take the core that the daemon wants.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A thread that torch did not start, as of continuous batching in transformers, has as many as there
# are cores until it asks, whatever set_num_threads said.
os.environ.setdefault("OMP_NUM_THREADS", "1")
