"""Patience of tests whose processes are containers, or emulated."""

#: Seconds, beside other work; nothing waits so long unless it fails.
PATIENT_S = 600.0
