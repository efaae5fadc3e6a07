"""The program of a device: an agent that serves one sub-model."""
