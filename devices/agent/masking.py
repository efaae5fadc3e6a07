"""The camera's mask for clients: who sees it, who may change it, and the file that keeps it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from devices.agent.replies import Replies
from devices.camera.frames import FrameBuffer
from mdp.errors import MDPError
from mdp.files import sync
from mdp.formats.mask import CameraMask, write_mask
from mdp.logs import BackgroundWriter
from mdp.pictures.masking import check_fits
from mdp.protocol.masking import MaskReply, MaskRequest
from mdp.protocol.messages import as_line
from mdp.transport import Audit, Peer

#: Changes that may wait for the disk.
MOST_WAITING = 4
NOT_RECORDED = (
    "this client's key may see no mask (`record = true` or `mask = true` in its .limits file)"
)
NOT_HERE = "only the owner of this device changes its mask (--allow-mask)"
FORBIDDEN = "this client's key may not change the mask (`mask = true` in its .limits file)"
NO_PICTURE = "the camera has given no picture yet that a mask could be compared with"
BUSY = "changes of the mask wait already"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAccess:
    """The rights to see and to change the mask, and where it is kept."""

    may_see: Callable[[str], bool]
    may_change: Callable[[str], bool]
    #: The name of a client's key.
    name_of: Callable[[str], str]
    #: The file that keeps what clients set; None: they may not.
    file: Path | None
    audit: Audit = lambda *_: None


class Masking:
    """Answers requests for the camera's mask, and applies the masks that clients set."""

    def __init__(
        self,
        access: MaskAccess,
        frames: FrameBuffer,
        replies: Replies,
        report: Callable[[str], None],
    ) -> None:
        self._access, self._frames, self._replies, self._report = access, frames, replies, report
        #: Closed with its `with` block, if anybody waits for it.
        self.worker: BackgroundWriter[tuple[Peer, MaskRequest]]
        self.worker = BackgroundWriter(self._change, "mask", MOST_WAITING)

    def receive(self, peer: Peer, request: MaskRequest) -> None:
        """Answer, change soon, or refuse now. For the thread at the socket; never waits."""
        access, client = self._access, peer.client
        if request.action == "tell":
            if access.may_see(client) or access.may_change(client):
                self._tell(peer, request)
            else:
                self._refuse(peer, request, NOT_RECORDED)
        elif access.file is None:
            self._refuse(peer, request, NOT_HERE)
        elif not access.may_change(client):
            access.audit("refuse", client, peer.address, f"mask: {FORBIDDEN}")
            self._refuse(peer, request, FORBIDDEN)
        elif self.worker.is_full:
            self._replies.fail(peer.route, request.request_id, "overloaded", BUSY)
        else:
            self.worker.put((peer, request))

    def _change(self, item: tuple[Peer, MaskRequest]) -> None:
        peer, request = item
        file, mask = self._access.file, request.mask
        assert file is not None
        try:
            self._check(mask)
            # On disk first: a device that starts again has the mask, or the client was told no.
            if mask is None:
                file.unlink(missing_ok=True)
                sync(file.parent)
            else:
                write_mask(file, mask)
            self._frames.set_mask(mask)
        except (MDPError, OSError) as error:
            self._refuse(peer, request, str(error))
            return
        what = "removes the mask" if mask is None else f"sets the mask: {_describe(mask)}"
        self._access.audit("mask", peer.client, peer.address, what)
        self._report(as_line(f"{self._access.name_of(peer.client) or 'a client'} {what}"))
        self._tell(peer, request)

    def _check(self, mask: CameraMask | None) -> None:
        """Raise MaskError unless the newest picture has the mask's shape."""
        if mask is not None:
            width, height = self._frames.source_size
            if not width:
                raise MDPError(NO_PICTURE)
            check_fits(mask, width, height)

    def _tell(self, peer: Peer, request: MaskRequest) -> None:
        width, height = self._frames.source_size
        reply = MaskReply(
            request_id=request.request_id,
            mask=self._frames.mask,
            width=width,
            height=height,
            settable=self._access.file is not None and self._access.may_change(peer.client),
        )
        self._replies.send(peer.route, reply)

    def _refuse(self, peer: Peer, request: MaskRequest, text: str) -> None:
        self._replies.fail(peer.route, request.request_id, "no_frame", text)


def _describe(mask: CameraMask) -> str:
    region = mask.region
    share = (region.right - region.left) * (region.bottom - region.top)
    return f"{share:.0%} of the picture is used, {len(mask.hidden)} boxes in it are hidden"
