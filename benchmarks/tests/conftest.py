"""Fixtures that every test of a benchmark shares."""

import os
import signal

# Threads that sleep while they wait; read by OpenMP when torch is loaded, hence before any test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A script that runs the tests in the background has them, and every process they start, ignore
# Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
