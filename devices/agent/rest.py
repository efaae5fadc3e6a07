"""Answers how long the camera's picture has stood still."""

from devices.agent.replies import Replies
from devices.camera.frames import FrameBuffer, NoFrameError
from mdp.protocol.fields import MAX_MILLISECONDS
from mdp.protocol.rest import RestReply, RestRequest
from mdp.transport import Peer

NO_SOURCE = "this agent has no source (--source)"


def answer_rest(
    replies: Replies, peer: Peer, request: RestRequest, frames: FrameBuffer | None
) -> None:
    """Answer `request` at once: what is asked for was computed with the newest frame."""
    try:
        if frames is None:
            raise NoFrameError(NO_SOURCE)
        rest = frames.rest(within_ms=request.within_ms)
    except NoFrameError as error:
        replies.fail(peer.route, request.request_id, "no_frame", str(error))
        return
    reply = RestReply(
        request_id=request.request_id,
        frame=rest.number,
        age_ms=rest.age_ms,
        # Eleven days are as long as a message tells.
        still_ms=min(rest.still_ms, MAX_MILLISECONDS),
        changes=rest.changes,
    )
    replies.send(peer.route, reply)
