"""One sub-model behind LitServe, an HTTP model server with FastAPI inside.

    python -P benchmarks/end_to_end/rivals/http_server.py --model model.onnx --port 8000

Runs with the packages of an environment of its own: litserve, onnxruntime, numpy and pillow;
nothing of MDP is imported. A request's body is a view, as JPEG or as raw pixels; the reply's body
are the stand-alone classifier's logits in fp32. Packing either into JSON would only make it slower.
"""

import argparse
import io
from typing import Annotated, Any

import litserve
import numpy as np
import onnxruntime
from fastapi import Body, Response
from PIL import Image

OUTPUT = "bag"
BINARY = "application/octet-stream"
IDLE_S = 3600


class Served(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, model: str, encoding: str) -> None:
        super().__init__()
        self._model, self._encoding = model, encoding

    def setup(self, device: str) -> None:
        """Load it, with the options that MDP's agents have."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(self._model, options, providers=providers)
        (entry,) = self._session.get_inputs()
        self._name, self._shape = entry.name, [1, *entry.shape[1:]]
        for _ in range(3):
            self.predict(np.zeros(self._shape, dtype=np.uint8))

    def decode_request(self, request: Annotated[bytes, Body(media_type=BINARY)]) -> Any:
        """Pixels `[1, S, S, 3]` of a body."""
        if self._encoding == "jpeg":
            return np.asarray(Image.open(io.BytesIO(request)))[None]
        return np.frombuffer(request, dtype=np.uint8).reshape(self._shape)

    def predict(self, pixels: Any) -> Any:
        """Logits `[1, C]`."""
        return self._session.run([OUTPUT], {self._name: pixels})[0]

    def encode_response(self, logits: Any) -> Response:
        return Response(content=logits.tobytes(), media_type=BINARY)


def main() -> None:
    parser = argparse.ArgumentParser(description="One sub-model behind LitServe.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--encoding", choices=("raw", "jpeg"), required=True)
    options = parser.parse_args()
    # One worker: a device has one sub-model, and less than one core.
    server = litserve.LitServer(
        Served(options.model, options.encoding),
        accelerator="cpu",
        workers_per_device=1,
        timeout=False,
    )
    server.run(
        host="0.0.0.0",
        port=options.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        # By default a connection ends after five seconds without a request: others have their turn.
        timeout_keep_alive=IDLE_S,
    )


if __name__ == "__main__":
    main()
