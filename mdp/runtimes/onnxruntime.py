"""onnxruntime: sub-models on any of its execution providers, any other model on the processor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdp.errors import AgentError
from mdp.extras import install
from mdp.formats.model_file import ModelFile
from mdp.fusion.fuse import Contribution
from mdp.imports import silence_onnxruntime
from mdp.pictures.crop import Pixels
from mdp.runtimes import base
from mdp.runtimes.cuda import CUDA, ON_CUDA, TENSORRT, load_libraries, load_tensorrt, options_for

#: Why a provider in onnxruntime's build may fall back to the processor.
_NOT_STARTED = (
    "no such device, or its driver or libraries are missing (CUDA's come with "
    f"{install('agent-gpu')})"
)


class OrtRuntime:
    """A sub-model in onnxruntime, with a fixed number of threads."""

    def __init__(
        self,
        model: ModelFile,
        execution: base.Execution,
        *,
        num_classes: int,
        allow_fallback: bool = False,
    ) -> None:
        """Load `model`; raises AgentError for another model, or if the planned way is missing."""
        ort = import_onnxruntime()
        instead = _instead(ort, execution.provider, allow_fallback)
        wanted = _choose_provider(ort, execution.provider, allow_fallback, instead)
        if wanted in ON_CUDA:
            load_libraries(ort)
        if wanted == TENSORRT:
            load_tensorrt()
        elsewhere = _other_runtime(execution)
        if elsewhere and not allow_fallback:
            raise base.NotHereError(elsewhere, "this is onnxruntime")

        def start(provider: str) -> Any:
            options = _options(ort, execution.threads, execution.spin)
            if provider == TENSORRT and not allow_fallback:
                # Nodes that TensorRT cannot compute would silently run on the processor.
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            chosen = provider, options_for(provider, execution.precision, model.content)
            return _session(ort, model.content, options, chosen)

        try:
            self._session, why = _open(start, wanted, instead)
        except Exception as error:  # onnxruntime raises types of its own, without a common base
            raise AgentError(f"{model.path}: onnxruntime cannot load it: {error}") from error
        self._session.disable_fallback()
        self.provider: str = self._session.get_providers()[0]
        self.fallback = self.provider != execution.provider or bool(elsewhere)
        if self.fallback and not allow_fallback:
            raise base.NotHereError(
                execution.provider, f"onnxruntime lists it here but cannot start it: {why}"
            )
        self._image_size = execution.image_size
        self._check(model.path, execution, num_classes)

    def _check(self, model: Path, execution: base.Execution, num_classes: int) -> None:
        session = self._session
        self._outputs = base.check_graph(
            model,
            execution,
            num_classes,
            inputs={i.name: (i.type, i.shape[1:]) for i in session.get_inputs()},
            outputs={o.name: o.shape[-1] for o in session.get_outputs()},
            precision=session.get_modelmeta().custom_metadata_map.get(base.PRECISION_KEY),
            uint8="tensor(uint8)",
        )

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""
        base.run_until_steady(self.run, self._image_size)

    def run(self, pixels: Pixels) -> Contribution:
        """Each head's outputs for crops `[N, image_size, image_size, 3]`, as Runtime says."""
        values = self._session.run(self._outputs, {base.INPUT: pixels})
        return base.contribution_of(self._outputs, values)


def open_session(model: Path, *, threads: int = 1, spin: bool = False) -> Any:
    """An onnxruntime session of any model on the processor; raises AgentError if it is none.

    By its path, so that external tensors are read too: not for untrusted models.
    """
    ort = import_onnxruntime()
    try:
        return _session(ort, str(model), _options(ort, threads, spin), (base.CPU, {}))
    except Exception as error:  # onnxruntime raises types of its own, without a common base
        raise AgentError(f"{model}: onnxruntime cannot load it: {error}") from error


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


def _options(ort: Any, threads: int, spin: bool) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    if spin:
        # By default threads go on spinning, and keep a board's cores busy after each answer.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options


def _open(start: Callable[[str], Any], provider: str, instead: str) -> tuple[Any, str]:
    """A session on `provider`, else on `instead` or the processor, and why.

    A provider that cannot start falls back to the processor, or raises the same error as for a file
    that is no model; a session on the processor tells the two apart.
    """
    why = _NOT_STARTED
    try:
        session = start(provider)
        if instead == base.CPU or session.get_providers()[0] == provider:
            return session, why
    except Exception as error:  # onnxruntime raises types of its own, without a common base
        if provider == base.CPU:
            raise
        why = " ".join(str(error).split())
    return _open(start, instead, base.CPU)[0], why


def _session(ort: Any, model: bytes | str, options: Any, chosen: tuple[str, dict[str, str]]) -> Any:
    # By default it prints errors to standard output and retries without the options.
    session = ort.InferenceSession(model, options, providers=[chosen], enable_fallback=0)
    # Kept for a restart with other providers, which is not used here.
    session._model_bytes = None
    return session


def _choose_provider(ort: Any, planned: str, allow_fallback: bool, instead: str) -> str:
    available = ort.get_available_providers()
    if planned in available:
        return planned
    if not allow_fallback:
        raise base.NotHereError(planned, f"this device has {', '.join(available)}")
    return instead


def _instead(ort: Any, planned: str, allow_fallback: bool) -> str:
    """The provider to try if the planned one is missing."""
    same_gpu = planned == TENSORRT and CUDA in ort.get_available_providers()
    return CUDA if allow_fallback and same_gpu else base.CPU


def _other_runtime(execution: base.Execution) -> str:
    """The planned runtime or precision that is not onnxruntime's; empty if there is none."""
    if execution.runtime != "onnxruntime":
        return f"{execution.runtime} in {execution.precision}"
    return execution.precision if execution.precision == "bf16" else ""
