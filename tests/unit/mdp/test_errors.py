"""The tree of errors and the exit codes that hang on it."""

import inspect

import pytest

from mdp import errors
from mdp.console import Interrupted

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.MDPError)
]


@pytest.mark.parametrize(
    ("kind", "parent", "exit_code"),
    [
        (errors.MDPError, Exception, 1),
        (errors.InputError, errors.MDPError, 2),
        (errors.PictureError, errors.InputError, 2),
        (errors.ConfigError, errors.MDPError, 2),
        (errors.LoginRefused, errors.ConfigError, 5),
        (errors.WireError, errors.MDPError, 1),
        (errors.AgentError, errors.MDPError, 2),
        (errors.AddressUnavailable, errors.AgentError, 5),
        (errors.InferenceError, errors.MDPError, 3),
        (errors.DeadlineExceeded, errors.InferenceError, 3),
        (errors.QuorumNotMet, errors.InferenceError, 3),
        (errors.TransferError, errors.MDPError, 3),
        (errors.PlanRefused, errors.MDPError, 4),
        (Interrupted, errors.MDPError, 130),
    ],
)
def test_place_in_the_tree(kind: type[errors.MDPError], parent: type, exit_code: int) -> None:
    assert kind.__bases__ == (parent,)
    assert kind.exit_code == exit_code


def test_the_docstring_draws_every_class() -> None:
    assert len(CLASSES) == 13
    for kind in CLASSES:
        assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", [errors.DeadlineExceeded, errors.QuorumNotMet])
def test_an_inference_error_carries_every_outcome(kind: type[errors.InferenceError]) -> None:
    outcomes = {"alpha": "late", "beta": "unreachable"}
    error = kind("no answer", outcomes)
    outcomes.clear()
    assert str(error) == "no answer"
    assert error.outcomes == {"alpha": "late", "beta": "unreachable"}
