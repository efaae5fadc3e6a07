"""The choice of a network for each device by measured predictions."""

import numpy as np
import pytest
from numpy.typing import NDArray

from partitioner.pilot.choice import choose, without_slow
from partitioner.pilot.linear import log_softmax

COUNT, CLASSES = 600, 3
TARGETS = np.arange(COUNT) % CLASSES


def answers(wrong: NDArray[np.bool_], sure: float = 2.0) -> NDArray[np.float64]:
    """Log-probabilities: the right class, but the next one where `wrong`."""
    return log_softmax(sure * np.eye(CLASSES)[(TARGETS + wrong) % CLASSES])


def share(part: slice) -> NDArray[np.bool_]:
    """Mask of the pictures in this part of a shuffled order."""
    found = np.zeros(COUNT, dtype=bool)
    found[np.random.default_rng(0).permutation(COUNT)[part]] = True
    return found


def test_the_best_candidate_alone_is_taken_for_one_device() -> None:
    by_row = {0: answers(share(slice(0, 200))), 1: answers(share(slice(0, 60)))}
    choice = choose({"n100": [0, 1]}, lambda _, row: by_row[row], TARGETS)
    assert choice.rows == {"n100": 1}
    assert choice.together == choice.alone["n100"] == pytest.approx(0.9)
    assert choice.without == {}


def test_candidates_that_err_elsewhere_are_better_together() -> None:
    """The second network errs a little more, but not where the first does."""
    by_row = {
        0: answers(share(slice(0, 120)), 2.0),
        1: answers(share(slice(0, 120)), 2.1),
        2: answers(share(slice(120, 250)), 2.0),
    }
    choice = choose({"n100": [0, 1], "laptop-cpu": [0, 1, 2]}, lambda _, row: by_row[row], TARGETS)
    assert choice.rows["laptop-cpu"] == 2
    assert choice.without["laptop-cpu"] == choice.alone["n100"]


@pytest.mark.parametrize(
    ("wrong", "taken"), [(slice(1, 66), {0, 1}), (slice(0, 70), {0}), (slice(0, 400), {0})]
)
def test_devices_of_one_picture_have_one_candidate_only_if_others_are_surely_worse(
    wrong: slice, taken: set[int]
) -> None:
    """A second network that errs where the first does, once or not at all less, and elsewhere."""
    by_row = {0: answers(share(slice(0, 60))), 1: answers(share(wrong))}
    allowed = {"n100": [0, 1], "laptop-cpu": [0, 1]}
    networks = {0: "vit", 1: "lite"}
    choice = choose(allowed, lambda _, row: by_row[row], TARGETS, (), networks)
    assert set(choice.rows.values()) == taken
    # The same without the rule, as for devices that see different pictures.
    plain = choose(allowed, lambda _, row: by_row[row], TARGETS)
    assert set(plain.rows.values()) == {0}


def test_devices_of_one_picture_share_the_best_cut_where_there_is_no_other_network() -> None:
    by_row = {0: answers(share(slice(0, 60))), 1: answers(share(slice(1, 66)))}
    allowed = {"n100": [0, 1], "laptop-cpu": [0, 1]}
    networks = {0: "vit", 1: "vit"}
    choice = choose(allowed, lambda _, row: by_row[row], TARGETS, (), networks)
    assert choice.rows == {"n100": 0, "laptop-cpu": 0}


def test_devices_take_what_they_are_allowed_and_see_their_own_pictures() -> None:
    sharp, dull = answers(share(slice(0, 30))), answers(share(slice(0, 300)))
    choice = choose(
        {"front": [0], "side": [1]},
        lambda device, row: sharp if device == "front" else dull,
        TARGETS,
    )
    assert choice.rows == {"front": 0, "side": 1}
    assert choice.alone == {"front": pytest.approx(0.95), "side": pytest.approx(0.5)}


def test_shares_are_measured_on_pictures_that_the_choice_did_not_see() -> None:
    """Of many candidates that guess, the best looks better than it is where it was chosen."""
    random = np.random.default_rng(1)
    by_row = {row: log_softmax(random.normal(size=(COUNT, CLASSES))) for row in range(200)}
    choice = choose({"n100": list(by_row)}, lambda _, row: by_row[row], TARGETS)
    seen = (by_row[choice.rows["n100"]].argmax(axis=1) == TARGETS).mean()
    assert seen > 0.36
    assert abs(choice.together - 1 / CLASSES) < 0.04


def test_devices_of_a_group_have_the_same_candidate() -> None:
    """The one that is best for them together, though each has a better one alone."""
    by_device = {
        ("front", 0): answers(share(slice(0, 30))),
        ("front", 1): answers(share(slice(0, 300))),
        ("side", 0): answers(share(slice(300, 600))),
        ("side", 1): answers(share(slice(300, 330))),
        ("front", 2): answers(share(slice(0, 90))),
        ("side", 2): answers(share(slice(300, 390))),
    }
    allowed = {"front": [0, 1, 2], "side": [0, 1, 2], "top": [0]}

    def predictions(device: str, row: int) -> NDArray[np.float64]:
        return by_device[("front" if device == "top" else device, row)]

    cameras = {"front": "front", "side": "side", "top": "front"}
    own = choose(allowed, predictions, TARGETS, cameras=cameras)
    assert (own.rows["front"], own.rows["side"]) == (0, 1)
    shared = choose(allowed, predictions, TARGETS, [["front", "side"]], cameras=cameras)
    assert shared.rows == {"front": 2, "side": 2, "top": 0}


def test_devices_of_one_camera_have_different_networks_and_those_of_others_the_best() -> None:
    wrong = [share(slice(0, 60)), share(slice(60, 130)), share(slice(130, 500))]
    by_row = dict(enumerate(map(answers, wrong)))
    allowed = {"front-1": [0, 1, 2], "front-2": [0, 1, 2], "side": [0, 1, 2]}
    cameras = {"front-1": "front", "front-2": "front", "side": "side"}
    names = {0: "a", 1: "b", 2: "c"}
    groups = [["front-1", "side"], ["front-2"]]
    for some in ((), groups):
        choice = choose(
            allowed, lambda _, row: by_row[row], TARGETS, some, networks=names, cameras=cameras
        )
        assert {choice.rows["front-1"], choice.rows["front-2"]} == {0, 1}
    assert choice.rows["side"] == choice.rows["front-1"]


def test_cuts_of_one_network_do_not_crowd_out_all_others() -> None:
    """Twenty cuts that err alike are each better than two other networks, but not together."""
    by_row = dict.fromkeys(range(20), answers(share(slice(0, 100))))
    by_row |= {20: answers(share(slice(100, 210))), 21: answers(share(slice(210, 330)))}
    names = dict.fromkeys(range(20), "vit") | {20: "b", 21: "c"}
    rows = list(by_row)
    choice = choose(
        {"n100": rows, "laptop-cpu": rows}, lambda _, row: by_row[row], TARGETS, networks=names
    )
    assert {names[row] for row in choice.rows.values()} == {"vit", "b"}


def test_a_candidate_too_slow_to_be_trained_gives_way_to_one_that_then_errs_less() -> None:
    allowed, errors = {"a": [0, 1, 2], "b": [0]}, {0: 0.40, 1: 0.45, 2: 0.60}
    # Six epochs take away a quarter of the errors: 0.40 and 0.34 and 0.45.
    found = without_slow(allowed, errors, {0: 0.0, 1: 6.0, 2: 20.0})
    assert found == {"a": [1, 2], "b": [0]}
    # Where all are trained, or none, the frozen ones are compared as they are.
    assert without_slow(allowed, errors, {0: 6.0, 1: 8.0, 2: 20.0}) == {
        k: [*v] for k, v in allowed.items()
    }
    assert without_slow(allowed, errors, dict.fromkeys(errors, 0.1)) == {
        k: [*v] for k, v in allowed.items()
    }


def test_one_picture_of_every_class_is_enough_to_choose_by() -> None:
    targets = np.array([0, 1, 2])
    right, wrong = (log_softmax(sure * np.eye(3)[targets]) for sure in (2.0, -2.0))
    by_row = {0: wrong, 1: right, 2: right}
    choice = choose(
        {"n100": [0, 1, 2], "laptop-cpu": [0, 1, 2]},
        lambda _, row: by_row[row],
        targets,
        networks={0: "a", 1: "b", 2: "c"},
    )
    assert set(choice.rows.values()) == {1, 2}
    assert choice.together == 1
