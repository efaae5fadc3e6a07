"""A camera's mask: nothing of what it hides is in any byte that leaves the device."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from devices.cli.main import main as agent_main
from mdp.client.base import Options
from mdp.client.cameras import FleetCameras
from mdp.errors import WireError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_fleet
from mdp.formats.keys import load_pair, load_public
from mdp.formats.mask import CameraMask, PictureBox, read_mask, write_mask
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Buffer, FrameReply, FrameRequest, StatusRequest, decode, encode
from mdp.protocol.recording import PictureReply, PictureRequest
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import ClientKeys, Dealers, Received, public_key_of
from tests.support.command_lines import run_here
from tests.support.fleet import Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

WIDTH, HEIGHT = 96, 72
#: The left third is cut off, and the lower half of the right third is black.
MASK = CameraMask(
    width=1280, height=960, region=PictureBox(left=1 / 3), hidden=[PictureBox(left=2 / 3, top=0.5)]
)
#: Messages that are compared, of each kind.
MANY = 12


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """An agent whose camera shows pictures that differ in what MASK hides alone."""
    write_bundle(tmp_path / "bundle")
    folder = tmp_path / "camera"
    folder.mkdir()
    draws = np.random.default_rng(0)
    for number, secret in enumerate(("red", "green", "blue", "")):
        picture = colour_picture("green", HEIGHT, WIDTH)
        hidden = colour_picture(secret, HEIGHT, WIDTH) if secret else noise(draws)
        picture[:, : WIDTH // 3] = hidden[:, : WIDTH // 3]
        picture[HEIGHT // 2 :, WIDTH * 2 // 3 :] = hidden[HEIGHT // 2 :, WIDTH * 2 // 3 :]
        Image.fromarray(picture).save(folder / f"{number}.png")
    with Fleet(tmp_path, tmp_path / "bundle", keys=True) as fleet:
        (tmp_path / "client.limits").write_text("record = true\nmask = true\n")
        yield fleet


def noise(draws: np.random.Generator) -> Pixels:
    return draws.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)


def start(fleet: Fleet, *options: object) -> None:
    source = ("--source", f"folder:{fleet.folder / 'camera'}", "--source-fps", 50)
    fleet.start("alpha", *source, "--allow-record", *options)


class Ear:
    """A client that keeps every byte that an agent has sent it, as it was before encryption."""

    def __init__(self, fleet: Fleet) -> None:
        assert fleet.key is not None
        own = load_pair(fleet.key, public_key_of)
        agents = {"alpha": load_public(fleet.folder / "alpha.public")}
        keys = ClientKeys(public=own.public, secret=own.secret, agents=agents)
        self._dealers = Dealers({"alpha": fleet.agents["alpha"].address}, keys=keys)
        until(lambda: bool(self._dealers.poll(0.05) or self._dealers.connected), "a connection")
        self._digest = Bundle.open(fleet.bundle).digest
        self._asked = 0

    def replies(self, message: PictureRequest | FrameRequest | StatusRequest) -> Sequence[Buffer]:
        assert self._dealers.send("alpha", encode(message))
        while True:
            for event in self._dealers.poll(PATIENCE_S):
                if isinstance(event, Received):
                    return event.frames

    def pictures(self) -> set[bytes]:
        """The different pictures of many requests."""
        found: set[bytes] = set()
        seen: set[int] = set()
        while len(seen) < MANY:
            self._asked += 1
            wanted = PictureRequest(request_id=self._asked, within_ms=1000.0, side=256)
            envelope = decode(self.replies(wanted))
            # Else there were too many, or no frame yet.
            if isinstance(envelope.message, PictureReply):
                seen.add(envelope.message.frame)
                found.add(bytes(envelope.buffers[0]))
        return found

    def logits(self) -> set[bytes]:
        """The different answers of many looks."""
        found: set[bytes] = set()
        seen: set[int] = set()
        while len(seen) < MANY:
            self._asked += 1
            wanted = FrameRequest(
                request_id=self._asked, digest=self._digest, k=0, budget_ms=PATIENCE_S * 1e3,
                ago_ms=0.0, within_ms=1000.0,
            )  # fmt: skip
            envelope = decode(self.replies(wanted))
            if isinstance(envelope.message, FrameReply):
                seen.add(envelope.message.frame)
                found.add(bytes(envelope.buffers[0]))
        return found

    def close(self) -> None:
        self._dealers.close()


def test_nothing_that_is_masked_is_in_any_byte_that_leaves(fleet: Fleet) -> None:
    kept = fleet.folder / "mask.toml"
    start(fleet, "--mask", kept, "--allow-mask")
    ear = Ear(fleet)
    # Without a mask they do differ: else this test would find nothing.
    assert len(ear.pictures()) == 4
    assert len(ear.logits()) > 1
    path = fleet.write()
    with FleetCameras(read_fleet(path)[0], Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:
        until(lambda: bool(cameras.take().pictures), "a picture")
        told = cameras.set_mask("alpha", MASK)
        assert (told.mask, told.width, told.height, told.settable) == (MASK, WIDTH, HEIGHT, True)
    (picture,) = ear.pictures()
    pixels = np.asarray(Image.open(io.BytesIO(picture)))
    assert pixels.shape == (HEIGHT, WIDTH * 2 // 3, 3)
    assert pixels[HEIGHT // 2 + 16 :, WIDTH // 3 + 16 :].max() <= 4
    assert pixels[: HEIGHT // 2 - 8, :, 1].min() > 100
    assert len(ear.logits()) == 1
    ear.close()
    # It is there again after a restart, before the first picture.
    assert read_mask(kept) == MASK
    assert fleet.agents["alpha"].terminate() == 0
    start(fleet, "--mask", kept)
    ear = Ear(fleet)
    assert ear.pictures() == {picture}
    assert len(ear.logits()) == 1
    ear.close()


def refusal(cameras: FleetCameras, mask: CameraMask | None) -> str:
    with pytest.raises(WireError) as caught:
        cameras.set_mask("alpha", mask)
    return str(caught.value)


def test_who_may_change_it_and_what_is_refused(fleet: Fleet) -> None:
    kept = fleet.folder / "mask.toml"
    write_mask(kept, MASK)
    start(fleet, "--mask", kept, "--allow-mask", "--audit", fleet.folder / "audit.jsonl")
    path = fleet.write()
    with FleetCameras(read_fleet(path)[0], Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:
        until(lambda: bool(cameras.take().pictures), "a picture")
        other = CameraMask(width=1280, height=720)
        assert refusal(cameras, other) == (
            "alpha: a picture of 96x72: expected the shape of the mask's, 1280x720: "
            "draw the mask anew"
        )
        assert read_mask(kept) == MASK
        (fleet.folder / "client.limits").write_text("record = true\n")
        forbidden = "this client's key may not change the mask (`mask = true` in its .limits file)"
        until(lambda: may_not(cameras), "the right is gone")
        assert refusal(cameras, None) == f"alpha: {forbidden}"
        told, missing = cameras.masks()
        assert not missing
        assert (told["alpha"].mask, told["alpha"].settable) == (MASK, False)
    assert '"reason":"mask: ' in (fleet.folder / "audit.jsonl").read_text().replace('": "', '":"')


def may_not(cameras: FleetCameras) -> bool:
    told, _ = cameras.masks()
    return not told["alpha"].settable


def test_a_mask_of_another_shape_lets_no_picture_out(fleet: Fleet) -> None:
    kept = fleet.folder / "mask.toml"
    write_mask(kept, CameraMask(width=1280, height=720))
    start(fleet, "--mask", kept)
    agent = fleet.agents["alpha"]
    agent.wait_for(
        "no pictures: a picture of 96x72: expected the shape of the mask's, 1280x720: "
        "draw the mask anew"
    )
    path = fleet.write()
    with FleetCameras(read_fleet(path)[0], Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:
        scene = cameras.take()
        assert not scene.pictures
        assert "expected the shape of the mask's" in scene.missing["alpha"]


@pytest.mark.parametrize(
    ("options", "content", "expected"),
    [
        (("--mask", "mask.toml"), None, "mask.toml: "),
        (("--mask", "mask.toml"), "width = 9\n", "mask.toml: Object missing required field"),
        (("--mask", "mask.toml"), "width = 0\nheight = 9\n", "mask.toml: Expected `int` >= 1"),
        (("--allow-mask",), None, "--allow-mask: expected --mask FILE, --key and --clients"),
    ],
)
def test_masks_that_an_agent_does_not_start_with(
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    content: str | None,
    expected: str,
) -> None:
    monkeypatch.chdir(fleet.folder)
    if content is not None:
        Path("mask.toml").write_text(content)
    words = ("run", "--device", "alpha", "--bundle", "bundle", "--bind", "tcp://127.0.0.1:0")
    done = run_here(agent_main, "mdp-agent", *words, "--source", "folder:camera", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"mdp-agent: {expected}")
