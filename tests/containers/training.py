"""The image `trainer` and the chart's job, by podman: `make training-image`, not `make test`.

The job's own command runs in two containers of one network, as in pods of two machines that share a
volume: confined as the chart confines them, the first met by its name. A third container trains the
same by itself. Skipped, with what the engine says, where no container can be run.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from mdp import __version__
from mdp.files import write_toml
from tests.support.chart_job import MEETING, pod_arguments
from tests.support.figures import Figures
from tests.support.models.runs import config_of, tiny_plan
from tests.support.models.trees import write_tree
from tests.support.patience import PATIENT_S
from tools.containers import TRAINING, BuiltImages, prepare
from tools.prepare import MissingError

# Not of fixtures: torch is fetched and installed as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(3 * PATIENT_S, func_only=True)
PART = "trainer"
#: As deploy/chart has them for a pod of the job.
CONFINED = ("--user=10001:10001", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", "--memory=8g")  # fmt: skip
#: Largest relative difference of a network's weights, as one vector.
TOLERANCE = 1e-3


@pytest.fixture(scope="session")
def built() -> BuiltImages:
    try:
        return prepare(TRAINING)
    except MissingError as error:
        pytest.skip(str(error))


class TrainingPods:
    """Containers of one network with a folder that all may write."""

    def __init__(self, built: BuiltImages, work: Path, stack: ExitStack) -> None:
        self._podman, self._image, self.work = built.podman, built.images["trainer"], work
        self._stack, self.network = stack, f"mdp-{work.parent.name}"
        self._podman.run("network", "create", self.network)
        stack.callback(self._tried, "network", "rm", "--force", self.network)

    def _tried(self, *words: str) -> subprocess.CompletedProcess[str]:
        podman = self._podman
        return subprocess.run(
            podman.command(*words), env=podman.environment, capture_output=True, text=True,
            timeout=PATIENT_S,
        )  # fmt: skip

    def start(self, name: str, entry: str, words: Sequence[str]) -> str:
        """Start a container of this name, which is met by it; returns podman's name of it."""
        made = f"{self.network}-{name}"
        self._podman.run(
            *("run", "--detach", f"--name={made}", f"--network={self.network}"),
            *(f"--network-alias={name}", f"--volume={self.work}:/work", *CONFINED),
            *("--env=OMP_NUM_THREADS=1", f"--entrypoint={entry}", self._image, *words),
        )
        self._stack.callback(self._tried, "rm", "--force", "--time=1", made)
        return made

    def end_of(self, made: str) -> str:
        """Standard output of a container that ended; fails unless it succeeded."""
        done = self._tried("wait", made)
        said = self._tried("logs", made)
        assert done.stdout.strip() == "0", said.stdout + said.stderr
        return said.stdout


@pytest.fixture
def pods(built: BuiltImages, tmp_path: Path) -> Iterator[TrainingPods]:
    work = tmp_path / "work"
    write_tree(work / "tree", each=40)
    write_toml(work / "plan.toml", tiny_plan())
    wanted = config_of("/work/tree")
    write_toml(work / "run.toml", msgspec.structs.replace(
        wanted, teacher_schedule=msgspec.structs.replace(wanted.teacher_schedule, epochs=2)
    ))  # fmt: skip
    for path in (work, *work.rglob("*")):
        shutil.chown(path, 10001, 10001)
    with ExitStack() as stack:
        yield TrainingPods(built, work, stack)


def words_of(run: str) -> list[str]:
    """Arguments of mdp-partition for a run folder."""
    where = ["--plan=/work/plan.toml", f"--run=/work/{run}", "--config=/work/run.toml"]
    return ["train", *where, "--threads=1", "--json"]


def as_vector(file: Path) -> np.ndarray:
    """All weights of a file."""
    found = load_file(file)
    return np.concatenate([found[name].ravel().astype(np.float64) for name in sorted(found)])


def test_image(built: BuiltImages, figures: Figures) -> None:
    image = built.images["trainer"]
    config = json.loads(built.podman.run("image", "inspect", image))[0]
    labels = config["Config"]["Labels"]
    assert config["User"] == "10001:10001"
    assert labels["org.opencontainers.image.title"] == "mdp-trainer"
    assert labels["org.opencontainers.image.version"] == __version__
    start = ("run", "--rm", "--network=none")
    assert built.podman.run(*start, image, "--version").endswith(__version__)
    bill = json.loads(built.podman.run(*start, "--entrypoint=cat", image, "/opt/mdp/sbom.cdx.json"))
    assert {"torch", "timm", "onnx"} <= {one["name"] for one in bill["components"]}
    figures.put(
        trainer_built_s=built.took_s["trainer"], trainer_added_mb=built.added_bytes["trainer"] / 1e6
    )


def test_pods_of_the_job_train_what_one_would(pods: TrainingPods, figures: Figures) -> None:
    begun_s = time.monotonic()
    first, second = (
        pods.start(
            MEETING[0] if rank == 0 else "photos-1.photos",
            "torchrun",
            pod_arguments(rank, ["mdp-partition", *words_of("photos.run")]),
        )
        for rank in (0, 1)
    )
    said = pods.end_of(first)
    assert json.loads(said) == {"run": "/work/photos.run", "members": 2}
    assert pods.end_of(second) == ""
    figures.put(trained_s=time.monotonic() - begun_s)
    alone = pods.start("alone", "mdp-partition", words_of("alone.run"))
    assert json.loads(pods.end_of(alone)) == {"run": "/work/alone.run", "members": 2}
    ours, theirs = ((pods.work / name) for name in ("photos.run", "alone.run"))
    networks = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert len(networks) >= 3
    for name in networks:
        one, other = as_vector(theirs / name), as_vector(ours / name)
        assert np.linalg.norm(one - other) < TOLERANCE * np.linalg.norm(one), name
