"""The newest vectors of a trainer's neighbours, which they send while it trains.

Nobody waits for anybody: a thread for each neighbour sends the newest of what is published, over
the group in which all last met, and another receives what comes.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch
from torch import Tensor

from mdp.errors import MDPError
from partitioner.crew.averaging.mean import Meeting
from partitioner.training.distributed import PATIENCE

#: The number that comes instead of a vector where no more do.
_NO_MORE = -1


class NewestVectors:
    """One trainer's lines to its neighbours, until it meets all again.

    meeting: the last one of all, with its number. size_bytes: of an encoded vector.

    on_receipt: called by a thread with the neighbour and the number of a vector that has come, or
    None where the neighbour is lost; the thread ends with an MDPError of it.
    """

    def __init__(
        self,
        meeting: Meeting,
        number: int,
        neighbours: Sequence[int],
        size_bytes: int,
        on_receipt: Callable[[int, int | None], None],
    ) -> None:
        self._meeting, self.number, self._size_bytes = meeting, number, size_bytes
        self._on_receipt = on_receipt
        self._lock = threading.Lock()
        self._received: dict[int, dict[int, Tensor]] = {rank: {} for rank in neighbours}
        self._waiting: dict[int, SimpleQueue[tuple[int, Tensor | None]]] = {
            rank: SimpleQueue() for rank in neighbours
        }
        #: Bytes sent, by neighbour; the last of them after the end.
        self.sent_bytes = dict.fromkeys(neighbours, 0)
        self._ended = False
        for rank in neighbours:
            for target in (self._send, self._receive):
                name = f"crew-neighbour-{rank}"
                threading.Thread(target=target, args=(rank,), name=name, daemon=True).start()

    def publish(self, number: int, data: Tensor) -> None:
        """Send an encoded vector to every neighbour, unless a newer one comes before its turn."""
        for waiting in self._waiting.values():
            waiting.put((number, data))

    def take(self, rank: int, number: int) -> Tensor:
        """The vector of a neighbour that has come under this number; older ones are dropped."""
        with self._lock:
            received = self._received[rank]
            for older in [one for one in received if one < number]:
                del received[older]
            return received[number]

    def end(self) -> None:
        """Tell the neighbours that no more comes; what still comes is dropped."""
        with self._lock:
            self._ended = True
            self._received.clear()
        for waiting in self._waiting.values():
            waiting.put((_NO_MORE, None))

    def _send(self, rank: int) -> None:
        place, waiting = self._meeting.members.index(rank), self._waiting[rank]
        data: Tensor | None = torch.empty(0)
        with suppress(RuntimeError):  # of gloo: the neighbour is lost
            while data is not None:
                number, data = waiting.get()
                while not waiting.empty():
                    number, data = waiting.get()
                head = torch.tensor([number])
                for message in [head] if data is None else [head, data]:
                    self._meeting.group.send([message], place, self.number).wait(PATIENCE)
                    self.sent_bytes[rank] += message.nbytes

    def _receive(self, rank: int) -> None:
        place = self._meeting.members.index(rank)
        with suppress(MDPError):
            while True:
                number, data = self._next(place)
                if number == _NO_MORE:
                    return
                with self._lock:
                    is_wanted = not self._ended
                    if is_wanted and data is not None:
                        self._received[rank][number] = data
                if is_wanted:
                    self._on_receipt(rank, None if data is None else number)
                if data is None:
                    return

    def _next(self, place: int) -> tuple[int, Tensor | None]:
        """The next number and vector of a neighbour; without a vector where it is lost."""
        head, data = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        try:
            self._meeting.group.recv([head], place, self.number).wait(PATIENCE)
            if int(head) != _NO_MORE:
                data = torch.empty(self._size_bytes, dtype=torch.uint8)
                self._meeting.group.recv([data], place, self.number).wait(PATIENCE)
        except RuntimeError:  # of gloo
            return 0, None
        return int(head), data
