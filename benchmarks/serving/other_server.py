"""LitServe or MLServer with a stub model: other_server.py litserve|mlserver PORT [scaled].

Runs in an environment with both and without MDP. The model decodes, where it gets a JPEG file, and
returns ready logits. `scaled` decodes larger files at a smaller scale.
"""

import asyncio
import base64
import io
import sys
from typing import Any

import numpy as np
from fastapi import Request
from litserve import LitAPI, LitServer
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse
from PIL import Image

SIDE = 224
LABELS = ["red", "green", "blue"]
LOGITS = np.array([3.0, 0.0, 0.0], np.float32)


def label_of(content: bytes) -> str:
    """The stub's answer to pixels `[SIDE, SIDE, 3]` or a JPEG file of any size."""
    if len(content) == SIDE * SIDE * 3:
        pixels = np.frombuffer(content, np.uint8).reshape(SIDE, SIDE, 3)
    else:
        file = Image.open(io.BytesIO(content))
        if "scaled" in sys.argv:
            file.draft("RGB", (SIDE, SIDE))
        picture = file.convert("RGB")
        if picture.size != (SIDE, SIDE):
            picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
    assert pixels.shape == (SIDE, SIDE, 3)
    return LABELS[int(LOGITS.argmax())]


class LitStub(LitAPI):  # type: ignore[misc]
    """A multipart upload in, JSON out."""

    def setup(self, device: str) -> None:
        """Nothing."""

    def decode_request(self, request: Request, **kwargs: Any) -> bytes:
        """The file."""
        return bytes(request["picture"].file.read())

    def predict(self, x: bytes, **kwargs: Any) -> str:
        """Its label."""
        return label_of(x)

    def encode_response(self, output: str, **kwargs: Any) -> dict[str, str]:
        """JSON."""
        return {"label": output}


class MlStub(MLModel):  # type: ignore[misc]
    """The Open Inference Protocol, which it reads as JSON alone: pixels or a file in base64."""

    async def predict(self, payload: Any) -> Any:
        """The label."""
        content = base64.b64decode(payload.inputs[0].data.root[0])
        output = StringCodec.encode_output("labels", [label_of(content)])
        return InferenceResponse(model_name=self.name, outputs=[output])


def litserve(port: int) -> None:
    """One worker, as its defaults have it."""
    server = LitServer(LitStub(api_path="/classify"), accelerator="cpu")
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)


def mlserver(port: int) -> None:
    """The model in the server's own process."""
    settings = Settings(
        host="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_port=port + 2,
        parallel_workers=0, debug=False,
    )  # fmt: skip
    model = ModelSettings(name="colours", implementation="other_server.MlStub")
    asyncio.run(MLServer(settings).start([model]))


if __name__ == "__main__":
    {"litserve": litserve, "mlserver": mlserver}[sys.argv[1]](int(sys.argv[2]))
