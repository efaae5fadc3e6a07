"""One client that is not ours asks a gateway all that it can: asked.py triton|kserve HOST:PORT.

Runs in an environment with that client and without MDP.
"""

import asyncio
import sys
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

MODEL = "colours"
#: Two red pictures and a green one.
PICTURES = np.zeros((3, 40, 60, 3), np.uint8)
PICTURES[:2, ..., 0] = PICTURES[2, ..., 1] = 200
LABELS = ["red", "red", "green"]
#: Devices of each of the three answers.
USED = ["alpha, beta, gamma"] * 3


def check(
    labels: NDArray[np.object_], probabilities: NDArray[np.float32], used: NDArray[np.object_]
) -> None:
    """Raise AssertionError for other answers."""
    assert [name.decode() if isinstance(name, bytes) else str(name) for name in used] == USED, used
    texts = [text.decode() if isinstance(text, bytes) else str(text) for text in labels[:, 0]]
    assert texts == LABELS, texts
    assert probabilities.shape == (3, 3)
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-3)


def triton(host: str) -> None:
    """tritonclient, with JSON and with binary tensors."""
    import tritonclient.http as http
    from tritonclient.utils import InferenceServerException

    client = http.InferenceServerClient(host)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert client.get_model_metadata(MODEL)["inputs"][0]["name"] == "images"
    for binary in (True, False):
        images = http.InferInput("images", list(PICTURES.shape), "UINT8")
        images.set_data_from_numpy(PICTURES, binary_data=binary)
        outputs = [
            http.InferRequestedOutput(name, binary_data=binary)
            for name in ("labels", "probabilities", "used")
        ]
        answer = client.infer(MODEL, [images], outputs=outputs, request_id="7")
        check(*(answer.as_numpy(name) for name in ("labels", "probabilities", "used")))
        response = answer.get_response()
        assert response["id"] == "7"
        assert response["parameters"]["degraded"] is False
    wrong = http.InferInput("input", [1, 2, 2, 3], "UINT8")
    wrong.set_data_from_numpy(np.zeros((1, 2, 2, 3), np.uint8))
    said = ""
    try:
        client.infer(MODEL, [wrong])
    except InferenceServerException as error:
        said = str(error)
    assert "expected one named 'images'" in said, said
    print(f"tritonclient {version('tritonclient')}: health, metadata, JSON, binary, errors")


async def kserve(host: str) -> None:
    """KServe's REST client, with JSON and with binary tensors."""
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    client, url = InferenceRESTClient(RESTConfig(protocol="v2")), f"http://{host}"
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, MODEL)
    for binary in (True, False):
        images = InferInput("images", list(PICTURES.shape), "UINT8")
        images.set_data_from_numpy(PICTURES, binary_data=binary)
        request = InferRequest(model_name=MODEL, infer_inputs=[images])
        answer = await client.infer(url, request, model_name=MODEL)
        outputs = {output.name: output.as_numpy() for output in answer.outputs}
        check(outputs["labels"], outputs["probabilities"], outputs["used"])
        assert answer.parameters["degraded"] is False
    await client.close()
    print(f"kserve {version('kserve')}: health, JSON, binary")


if __name__ == "__main__":
    if sys.argv[1] == "triton":
        triton(sys.argv[2])
    else:
        asyncio.run(kserve(sys.argv[2]))
