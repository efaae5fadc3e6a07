"""The moments at which a scene has changed and rests again."""

from hypothesis import given
from hypothesis import strategies as st

from mdp.line.still import BlindSpells, CameraRest, StillTrigger

REST_MS = 300.0
CAMERAS = "abcd"


class PlayedCamera:
    """Moves and rests as it is told, frame by frame."""

    def __init__(self) -> None:
        self.still_ms, self.changes = 0.0, 0

    def passes(self, ms: float, moving: bool) -> None:
        if moving:
            self.changes += 1
            self.still_ms = 0.0
        else:
            self.still_ms += ms

    @property
    def rest(self) -> CameraRest:
        return CameraRest(self.still_ms, self.changes)


class PlayedLine:
    """Cameras that see the same line, asked every 50 ms."""

    STEP_MS = 50.0

    def __init__(self, cameras: str = CAMERAS) -> None:
        self.cameras = {name: PlayedCamera() for name in cameras}
        self.trigger, self.items = StillTrigger(REST_MS), 0

    def play(self, ms: float, moving: str = "", away: str = "") -> None:
        for _ in range(int(ms / self.STEP_MS)):
            for name, camera in self.cameras.items():
                camera.passes(self.STEP_MS, name in moving)
            told = {n: c.rest for n, c in self.cameras.items() if n not in away}
            self.items += self.trigger.saw(told) is not None


def test_an_item_is_found_once_it_rests() -> None:
    line = PlayedLine()
    line.play(2000)
    assert line.items == 0
    line.play(400, moving=CAMERAS)
    assert line.items == 0
    line.play(REST_MS - 50)
    assert line.items == 0
    line.play(100)
    assert line.items == 1
    line.play(60_000)
    assert line.items == 1
    line.play(50, moving=CAMERAS)
    line.play(1000)
    assert line.items == 2


def test_one_camera_makes_no_item_and_prevents_none() -> None:
    line = PlayedLine()
    line.play(1000)
    line.play(500, moving="b")  # a hand before it
    line.play(1000)
    assert line.items == 0
    for _ in range(10):
        line.play(200, moving=CAMERAS)
        line.play(1000, moving="c")  # a tree in the wind
    assert line.items == 10


def test_a_camera_that_lags_behind_counts_no_item_twice() -> None:
    line = PlayedLine()
    for _ in range(10):
        line.play(200, moving="abc")
        line.play(400, moving="d")
        line.play(1000)
    assert line.items == 10


def test_a_covered_camera_does_not_count_and_counts_again() -> None:
    line = PlayedLine()
    line.play(1000)
    for moving in ("bcd", "bcd", "bcd", "bd", "bc", "cd"):
        line.play(200, moving=moving)
        line.play(1000)
    assert line.items == 6
    # Two of four are not enough, where the fourth is there again.
    line.play(200, moving=CAMERAS)
    line.play(1000)
    assert line.items == 7
    line.play(200, moving="ab")
    line.play(1000)
    assert line.items == 7


def test_changes_of_other_times_do_not_add_up() -> None:
    line = PlayedLine()
    line.play(200)
    for camera in "abc":
        line.play(200, moving=camera)
        line.play(5000)
    assert line.items == 0


def test_a_camera_that_comes_back_counts_no_item() -> None:
    line = PlayedLine()
    line.play(1000)
    line.play(200, moving=CAMERAS, away="cd")
    line.play(1000, away="cd")
    assert line.items == 1
    # It has changed since it was last heard, as the others have, whose item is known.
    line.play(1000)
    assert line.items == 1
    line.cameras["a"] = PlayedCamera()
    line.cameras["b"] = PlayedCamera()
    line.cameras["c"] = PlayedCamera()
    line.play(3000)
    assert line.items == 1
    line.play(200, moving=CAMERAS)
    line.play(1000)
    assert line.items == 2


def test_nobody_there_is_no_item() -> None:
    trigger = StillTrigger()
    assert trigger.saw({}) is None
    assert trigger.saw({"a": CameraRest(1e6, 0)}) is None
    assert trigger.saw({"a": CameraRest(300.0, 1)}) == 0.0
    assert trigger.saw({}) is None


def test_the_moment_is_one_at_which_all_that_found_it_saw_it_rest() -> None:
    trigger = StillTrigger()
    assert trigger.saw(dict.fromkeys("abc", CameraRest(1e6, 0, 10.0))) is None
    rests = {
        "a": CameraRest(320.0, 2, 80.0),
        "b": CameraRest(400.0, 1, 40.0),
        # The next item moves before this one already, or it has stood still for long.
        "c": CameraRest(0.0, 5, 900.0),
    }
    assert trigger.saw(rests) == 80.0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8),  # steps of moving
            st.integers(8, 40),  # steps of resting
            st.sampled_from(("", "a", "d")),  # a camera that also moves while others rest
            st.sampled_from(("", "b")),  # a camera that is away
            st.integers(0, 4),  # steps by which one camera lags behind
        ),
        max_size=20,
    )
)
def test_each_item_that_rests_is_found_once(items: list[tuple[int, int, str, str, int]]) -> None:
    line = PlayedLine()
    line.play(1000)
    for moving, resting, noisy, away, lag in items:
        # Whoever is left without the two is more than half.
        noisy = "" if away else noisy
        line.play(moving * 50, CAMERAS, away)
        line.play(lag * 50, "c" if not (noisy or away) else noisy, away)
        line.play(resting * 50, noisy, away)
    assert line.items == len(items)


def test_cameras_without_new_frames_are_a_spell() -> None:
    blind = BlindSpells(REST_MS)
    new, old = dict.fromkeys("abc", 50.0), 900.0
    assert blind.saw({}, 0.0) is None
    assert blind.saw(new, 5.0) is None
    assert blind.saw(new, 5.1) is None
    # One camera that is late, or away, is none.
    assert blind.saw({**new, "a": old}, 5.6) is None
    assert blind.saw({"a": 50.0, "b": 50.0}, 6.1) is None
    # Two are; and so is a watcher that was held up.
    assert blind.saw({**new, "a": old, "b": old}, 6.2) is None
    assert blind.saw({"a": 50.0}, 7.0) is None
    assert blind.saw(new, 7.35) == 7.35 - 6.1
    assert blind.saw(new, 8.35) == 1.0
    assert blind.saw(new, 8.4) is None
