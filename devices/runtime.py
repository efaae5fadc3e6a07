"""Runtime: what executes a sub-model. OrtRuntime is the only place that serves with onnxruntime."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mdp.crop import Pixels
from mdp.errors import AgentError
from mdp.fusion import Contribution
from mdp.plan import Assignment

CPU = "CPUExecutionProvider"
#: Names of the exported graph's input and outputs.
INPUT, BOOST, BAG = "images", "boost", "bag"
#: Runs before READY: the first ones allocate memory and choose kernels.
WARM_UP_RUNS = 3


class Runtime(Protocol):
    """Executes one sub-model."""

    #: The execution provider that really runs it.
    provider: str
    #: Whether that is not the planned one.
    fallback: bool

    def warm_up(self) -> None:
        """Run until steady."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""


class OrtRuntime:
    """A sub-model in onnxruntime, with explicit threads that sleep when there is nothing to do."""

    def __init__(
        self,
        model: Path,
        assignment: Assignment,
        *,
        num_classes: int,
        threads: int | None = None,
        allow_fallback: bool = False,
    ) -> None:
        """Load `model`; raises AgentError if it is another model or the provider is not there."""
        ort = _onnxruntime()
        wanted = _choose_provider(ort, assignment.provider, allow_fallback)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or assignment.threads
        options.inter_op_num_threads = 1
        # Spinning would keep a small board's cores busy long after each answer.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(str(model), options, providers=[wanted])
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise AgentError(f"{model}: onnxruntime cannot load it: {error}") from error
        self._session.disable_fallback()
        self.provider: str = self._session.get_providers()[0]
        self.fallback = self.provider != assignment.provider
        if self.fallback and not allow_fallback:
            raise AgentError(_refusal(assignment.provider, [self.provider]))
        self._image_size = assignment.submodel.image_size
        self._check_signature(model, num_classes)

    def _check_signature(self, model: Path, num_classes: int) -> None:
        inputs = {i.name: (i.type, i.shape[1:]) for i in self._session.get_inputs()}
        size = self._image_size
        if inputs != {INPUT: ("tensor(uint8)", [size, size, 3])}:
            raise AgentError(
                f"{model}: expected one input {INPUT!r} of uint8 [N, {size}, {size}, 3], "
                f"got {inputs}"
            )
        outputs = {o.name: o.shape[-1] for o in self._session.get_outputs()}
        if outputs != {BOOST: num_classes, BAG: num_classes}:
            raise AgentError(
                f"{model}: expected outputs {BOOST!r} and {BAG!r} with {num_classes} classes, "
                f"got {outputs}"
            )

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""
        blank = np.zeros((1, self._image_size, self._image_size, 3), dtype=np.uint8)
        try:
            for _ in range(WARM_UP_RUNS):
                contribution = self.run(blank)
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise AgentError(f"the model cannot be run: {error}") from error
        if not (np.isfinite(contribution.boost).all() and np.isfinite(contribution.bag).all()):
            raise AgentError("the model gives logits that are not finite on a black picture")

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""
        boost, bag = self._session.run([BOOST, BAG], {INPUT: pixels})
        return Contribution(boost, bag)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise AgentError(
            "onnxruntime is not installed; an agent needs it: pip install 'mdp-edge[agent]'"
        ) from error
    return onnxruntime


def _choose_provider(ort: Any, planned: str, allow_fallback: bool) -> str:
    available = ort.get_available_providers()
    if planned in available:
        return planned
    if not allow_fallback:
        raise AgentError(_refusal(planned, available))
    return CPU


def _refusal(planned: str, available: list[str]) -> str:
    return (
        f"the plan asks for {planned}, this device has {', '.join(available)}; "
        "--allow-fallback accepts another one and says so in every status"
    )
