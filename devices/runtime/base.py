"""Runtime: what executes a sub-model. OrtRuntime is the only place that serves with onnxruntime."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from devices.runtime.cuda import CUDA, ON_CUDA, TENSORRT, load_libraries, load_tensorrt, options_for
from mdp.errors import AgentError
from mdp.extras import install
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
from mdp.fusion.fuse import Contribution
from mdp.imports import silence_onnxruntime
from mdp.pictures.crop import Pixels

CPU = "CPUExecutionProvider"
#: Names of the exported graph's input and outputs.
INPUT, BOOST, BAG = "images", "boost", "bag"
#: The file's own word on how it was quantised, in its metadata; absent in bundles of 0.1.0.
PRECISION_KEY = "mdp_precision"
#: Why a provider that onnxruntime's build holds may give a session on the processor.
_NOT_STARTED = (
    "no such device, or its driver or libraries are missing (CUDA's come with "
    f"{install('agent-gpu')})"
)
#: Runs before READY: the first ones allocate memory and choose kernels.
WARM_UP_RUNS = 3


#: Name -> type and shape without the batch.
Signature = Mapping[str, tuple[str, list[object]]]


class NotHereError(AgentError):
    """The planned runtime, provider or precision cannot be had on this device."""

    def __init__(self, planned: str, here: str) -> None:
        super().__init__(
            f"the plan asks for {planned}, {here}; "
            "--allow-fallback accepts another one and says so in every status"
        )


class Runtime(Protocol):
    """Executes one sub-model."""

    #: What really runs it: an execution provider of onnxruntime, or OpenVINO's device, as in
    #: `openvino:CPU`.
    provider: str
    #: Whether that is not the planned one, or not in the planned runtime and precision.
    fallback: bool

    def warm_up(self) -> None:
        """Run until steady."""

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""


class OrtRuntime:
    """A sub-model in onnxruntime, with explicit threads that sleep when there is nothing to do."""

    def __init__(
        self,
        model: ModelFile,
        assignment: Assignment,
        *,
        num_classes: int,
        threads: int | None = None,
        allow_fallback: bool = False,
    ) -> None:
        """Load `model`; raises AgentError if it is another model, or what is planned not there."""
        ort = import_onnxruntime()
        instead = _instead(ort, assignment.provider, allow_fallback)
        wanted = _choose_provider(ort, assignment.provider, allow_fallback, instead)
        if wanted in ON_CUDA:
            load_libraries(ort)
        if wanted == TENSORRT:
            load_tensorrt()
        elsewhere = _planned_elsewhere(assignment)
        if elsewhere and not allow_fallback:
            raise NotHereError(elsewhere, "this is onnxruntime")

        def start(provider: str) -> Any:
            options = _options(ort, assignment, threads or assignment.threads)
            if provider == TENSORRT and not allow_fallback:
                # What TensorRT cannot compute of a graph would silently go to the processor.
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            told = options_for(provider, assignment.spec.precision, model.content)
            return _session(ort, model.content, options, (provider, told))

        try:
            self._session, why = _open(start, wanted, instead)
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise AgentError(f"{model.path}: onnxruntime cannot load it: {error}") from error
        self._session.disable_fallback()
        self.provider: str = self._session.get_providers()[0]
        self.fallback = self.provider != assignment.provider or bool(elsewhere)
        if self.fallback and not allow_fallback:
            raise NotHereError(
                assignment.provider, f"onnxruntime lists it here but cannot start it: {why}"
            )
        self._image_size = assignment.spec.image_size
        self._check(model.path, assignment, num_classes)

    def _check(self, model: Path, assignment: Assignment, num_classes: int) -> None:
        session = self._session
        inputs = {i.name: (i.type, i.shape[1:]) for i in session.get_inputs()}
        check_input(model, inputs, self._image_size, uint8="tensor(uint8)")
        check_outputs(model, {o.name: o.shape[-1] for o in session.get_outputs()}, num_classes)
        says = session.get_modelmeta().custom_metadata_map.get(PRECISION_KEY)
        check_precision(model, says, assignment)

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""
        run_until_steady(self.run, self._image_size)

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""
        boost, bag = self._session.run([BOOST, BAG], {INPUT: pixels})
        return Contribution(boost, bag)


def import_onnxruntime() -> Any:
    """onnxruntime; raises AgentError if it is not installed."""
    silence_onnxruntime()
    try:
        import onnxruntime
    except ImportError as error:
        raise AgentError(
            f"onnxruntime is not installed; an agent needs it: {install('agent')}"
        ) from error
    return onnxruntime


def _options(ort: Any, assignment: Assignment, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    spin = "1" if assignment.spin else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spin)
    if assignment.spin:
        # By itself it would go on, and keep a board's cores busy long after each answer.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def _open(start: Callable[[str], Any], provider: str, instead: str) -> tuple[Any, str]:
    """A session, and why it is on `instead` or the processor and not on `provider`, if it is.

    Providers that cannot start give a session on the processor by themselves, or an error as for a
    file that is no model: then the processor has to tell which it is.
    """
    why = _NOT_STARTED
    try:
        session = start(provider)
        if instead == CPU or session.get_providers()[0] == provider:
            return session, why
    except Exception as error:  # onnxruntime raises types of its own, without a common base
        if provider == CPU:
            raise
        why = " ".join(str(error).split())
    return _open(start, instead, CPU)[0], why


def _session(ort: Any, model: bytes, options: Any, chosen: tuple[str, dict[str, str]]) -> Any:
    # By itself it would print an error to standard output and try again without the options.
    session = ort.InferenceSession(model, options, providers=[chosen], enable_fallback=0)
    # It keeps them to start anew with other providers, which nothing here asks of it.
    session._model_bytes = None
    return session


def _choose_provider(ort: Any, planned: str, allow_fallback: bool, instead: str) -> str:
    available = ort.get_available_providers()
    if planned in available:
        return planned
    if not allow_fallback:
        raise NotHereError(planned, f"this device has {', '.join(available)}")
    return instead


def _instead(ort: Any, planned: str, allow_fallback: bool) -> str:
    """What is tried where the planned provider cannot be had."""
    same_gpu = planned == TENSORRT and CUDA in ort.get_available_providers()
    return CUDA if allow_fallback and same_gpu else CPU


def _planned_elsewhere(assignment: Assignment) -> str:
    """What the plan asks for that onnxruntime is not, or an empty text."""
    precision = assignment.spec.precision
    if assignment.runtime != "onnxruntime":
        return f"{assignment.runtime} in {precision}"
    return precision if precision == "bf16" else ""


def check_input(model: Path, inputs: Signature, image_size: int, *, uint8: str) -> None:
    """Raise AgentError unless `inputs` are the exported graph's; `uint8` in the runtime's words."""
    if inputs != {INPUT: (uint8, [image_size, image_size, 3])}:
        raise AgentError(
            f"{model}: expected one input {INPUT!r} of uint8 [N, {image_size}, {image_size}, 3], "
            f"got {inputs}"
        )


def check_outputs(model: Path, outputs: Mapping[str, object], num_classes: int) -> None:
    """Raise AgentError unless `outputs`, name -> classes, are the exported graph's."""
    if outputs != {BOOST: num_classes, BAG: num_classes}:
        raise AgentError(
            f"{model}: expected outputs {BOOST!r} and {BAG!r} with {num_classes} classes, "
            f"got {outputs}"
        )


def check_precision(model: Path, says: str | None, assignment: Assignment) -> None:
    """Raise AgentError if the file `says` that it has another precision than is planned."""
    planned = assignment.spec.precision
    # bf16 is how a runtime computes; the file's numbers stay fp32.
    if says is not None and says != ("fp32" if planned == "bf16" else planned):
        raise AgentError(f"{model}: expected a model in {planned}, as planned, got one in {says}")


def run_until_steady(run: Callable[[Pixels], Contribution], image_size: int) -> None:
    """Run a few times on a black picture; raises AgentError if the logits are not finite."""
    blank = np.zeros((1, image_size, image_size, 3), dtype=np.uint8)
    try:
        for _ in range(WARM_UP_RUNS):
            contribution = run(blank)
    except Exception as error:  # runtimes raise types of their own, without a common base
        raise AgentError(f"the model cannot be run: {error}") from error
    if not (np.isfinite(contribution.boost).all() and np.isfinite(contribution.bag).all()):
        raise AgentError("the model gives logits that are not finite on a black picture")
