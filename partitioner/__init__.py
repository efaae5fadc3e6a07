"""Tools that plan, train and write bundles."""

import os

# torch's store and gloo log C++ frames when a peer is lost, which is an event like others for a
# crew, and said in a line. torch reads this once, when it is loaded, which whatever follows here
# does; a value that is set already is kept.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
