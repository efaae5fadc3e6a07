"""What a crew sends over the network, with torch.distributed."""

import os

# torch's store and gloo log a stack trace when a peer is lost, which is an event like others here.
# Read when torch is loaded; a value that is set already is kept.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
