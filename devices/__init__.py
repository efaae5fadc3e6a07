"""What runs on a device: an agent that serves one sub-model."""
