"""Threads that sleep while they wait: the tests may share the cores with anyone."""

import os

# Read by OpenMP when torch is loaded, hence before any test module imports it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
