"""The demonstration, and the models that it and the tests run offline."""

import os

# All of these are read when torch or transformers is imported, so they are set before that.
# A model is a folder here, never a download:
os.environ["HF_HUB_OFFLINE"] = "1"
# OpenMP's threads sleep while they wait. Spinning gains nothing for models of this size, and where
# other processes want the cores it made the same step ten times slower (measured):
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
