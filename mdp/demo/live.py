"""The live demo: items come by, four cameras look, and whoever watches may cover or unplug one."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdp.client.sync import Client
from mdp.demo.scenes import Scene, Scenes, blacken
from mdp.errors import InferenceError
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet
from mdp.testing.folder_cameras import FolderCameras

#: Seconds that an item stays, one of no class that was asked for, and between two looks.
ITEM_S, ASKED_FOR_S, LOOK_S = 1.8, 4.0, 0.3
#: From a look at pictures of before until the next one.
_AGAIN_S = 0.03
#: Every so many items, one of no class comes by.
_STRANGE_EVERY = 8
#: Lines of what happened that are kept.
_LINES = 30


@dataclass(frozen=True, slots=True)
class BeltItem:
    """The item before the cameras; `label` is None where it is of no class."""

    number: int
    label: str | None
    scene: Scene


@dataclass(slots=True)
class RightAnswers:
    """Items so far, and how many of them the fused answer and each camera alone got right."""

    items: int = 0
    fused: int = 0
    alone: Counter[str] = field(default_factory=Counter)


def items_of(scenes: Scenes) -> Iterator[BeltItem]:
    """Every item again and again, now and then one of no class."""
    number, strange = 0, 0
    while True:
        for place, (label, scene) in enumerate(scenes.known):
            number += 1
            yield BeltItem(number, label, scene)
            if scenes.unknown and place % _STRANGE_EVERY == _STRANGE_EVERY - 1:
                number += 1
                yield BeltItem(number, None, scenes.unknown[strange % len(scenes.unknown)])
                strange += 1


class LiveDemo:
    """The belt, its cameras and their agents, as whoever watches changes them.

    Its methods may be called by any thread; `run` belongs to one of its own.
    """

    def __init__(
        self,
        scenes: Scenes,
        cameras: FolderCameras,
        fleet: AgentFleet,
        client: Client,
        options: Callable[[str], Sequence[object]],
        *,
        deadline_ms: float,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`options` are those of a device's agent; `said` is told what happens, a line each."""
        self._scenes, self._cameras, self._fleet, self._client = scenes, cameras, fleet, client
        self._options, self._deadline_ms, self._said = options, deadline_ms, said
        self._shown_s = time.monotonic()
        self._lock = threading.Lock()
        #: Held while an agent is started or ended.
        self._plugging = threading.Lock()
        self._changed = threading.Event()
        self._covered: set[str] = set()
        self._unplugged: set[str] = set()
        self._strange = 0
        self._asked_for = False
        self._answer: Prediction | InferenceError | None = None
        self._suspects: set[str] = set()
        self._tally = RightAnswers()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._items = items_of(scenes)
        self._item = next(self._items)
        self._pictures: dict[str, bytes] = {}

    def run(self, ending: threading.Event) -> None:
        """Let items come by and look at them, until `ending`."""
        changes_s = 0.0
        while not ending.is_set():
            now_s = time.monotonic()
            if self._asked_for or now_s >= changes_s:
                changes_s = now_s + self._next_item()
            answer = self._look()
            with self._lock:
                if fresh := self._is_of_now(answer):
                    first, self._answer = self._answer is None, answer
                    if first:
                        self._count(answer)
                    self._note_suspects(answer)
            self._changed.wait(LOOK_S if fresh else _AGAIN_S)
            self._changed.clear()

    def cover(self, device: str, on: bool) -> None:
        """Cover a camera, or uncover it."""
        with self._lock:
            (self._covered.add if on else self._covered.discard)(device)
            self._show()
            camera = self._scenes.cameras[device]
            self._tell(f"camera {camera} is {'covered' if on else 'uncovered'}")
        self._changed.set()

    def plug(self, device: str, on: bool) -> None:
        """Kill a device's agent, as when its power is cut, or start it again."""
        with self._plugging:
            if on == (device not in self._unplugged):
                return
            if on:
                self._fleet.restart(device, *self._options(device))
            else:
                self._fleet.agents[device].kill()
            with self._lock:
                (self._unplugged.discard if on else self._unplugged.add)(device)
                self._tell(f"{device} is {'plugged in again' if on else 'unplugged'}")
        self._changed.set()

    def show_something_else(self) -> None:
        """Let the next item be one of no class."""
        with self._lock:
            self._asked_for = bool(self._scenes.unknown)
        self._changed.set()

    def picture(self, device: str) -> bytes:
        """The picture before a device's camera, as a file's content; raises KeyError."""
        with self._lock:
            return self._pictures[device]

    def snapshot(self) -> dict[str, Any]:
        """Everything that a page shows, for JSON."""
        with self._lock:
            answer = self._answer
            return {
                "item": {"number": self._item.number, "label": self._item.label},
                "cameras": [self._camera(device) for device in self._scenes.cameras],
                "answer": _to_json(answer),
                "deadline_ms": self._deadline_ms,
                "tally": {
                    "items": self._tally.items,
                    "fused": self._tally.fused,
                    "alone": dict(self._tally.alone),
                },
                "lines": list(self._lines),
            }

    def _next_item(self) -> float:
        """Put the next item before the cameras; returns the seconds that it stays."""
        with self._lock:
            if asked_for := self._asked_for:
                strange = self._scenes.unknown[self._strange % len(self._scenes.unknown)]
                self._strange += 1
                self._item = BeltItem(self._item.number, None, strange)
                self._asked_for = False
                self._tell("something else lies there")
            else:
                self._item = next(self._items)
            self._answer = None
            self._show()
        return ASKED_FOR_S if asked_for else ITEM_S

    def _show(self) -> None:
        seen = self._scenes.contents(self._item.scene)
        for device in self._covered:
            seen[device] = blacken(seen[device])
        self._pictures = seen
        self._cameras.put(seen)
        self._shown_s = time.monotonic()

    def _look(self) -> Prediction | InferenceError:
        try:
            return self._client.look(deadline_ms=self._deadline_ms)
        except InferenceError as error:
            return error

    def _is_of_now(self, answer: Prediction | InferenceError) -> bool:
        """Tell whether every frame of an answer was taken since the pictures changed last."""
        if isinstance(answer, InferenceError):
            return True
        since_ms = 1000 * (time.monotonic() - self._shown_s)
        return all(
            each.frame_age_ms is None or each.frame_age_ms < since_ms - answer.latency_ms
            for each in answer.members
        )

    def _count(self, answer: Prediction | InferenceError) -> None:
        # Only items of a class have a right answer by each camera alone.
        if self._item.label is None or isinstance(answer, InferenceError):
            return
        self._tally.items += 1
        self._tally.fused += answer.label == self._item.label
        for each in answer.members:
            self._tally.alone[each.device] += each.label == self._item.label

    def _note_suspects(self, answer: Prediction | InferenceError) -> None:
        now = set() if isinstance(answer, InferenceError) else set(answer.suspects)
        for device in sorted(now - self._suspects):
            self._tell(f"{device} disagrees with the others: its camera is suspected")
        for device in sorted(self._suspects - now - self._unplugged):
            self._tell(f"{device} agrees with the others again")
        self._suspects = now

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        self._said(line)

    def _camera(self, device: str) -> dict[str, Any]:
        answer = self._answer
        own, missing, suspect = None, None, None
        if isinstance(answer, InferenceError):
            missing = answer.outcomes.get(device)
        elif answer is not None:
            own = next(
                (
                    {"label": each.label, "probability": each.probability}
                    for each in answer.members
                    if each.device == device
                ),
                None,
            )
            missing, suspect = answer.missing.get(device), answer.suspects.get(device)
        return {
            "device": device,
            "camera": self._scenes.cameras[device],
            "covered": device in self._covered,
            "plugged": device not in self._unplugged,
            "own": own,
            "missing": missing,
            "suspect": suspect,
        }


def _to_json(answer: Prediction | InferenceError | None) -> dict[str, Any] | None:
    """The fused answer for JSON."""
    if answer is None:
        return None
    if isinstance(answer, InferenceError):
        return {"error": str(answer)}
    return {
        "label": answer.label,
        "probability": answer.probability,
        "known": answer.known,
        "used": answer.used,
        "expected_accuracy": answer.expected_accuracy,
        "pictures": answer.expected_accuracy_pictures,
        "known_rejected": answer.known_rejected,
        "latency_ms": answer.latency_ms,
        "suspects": sorted(answer.suspects),
    }
