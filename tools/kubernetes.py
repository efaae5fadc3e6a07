"""Kubernetes' programs from Debian's source package: python -m tools.kubernetes [FOLDER]

Debian 12's `kubernetes` is 1.20.2, with the modules that it needs, and golang-go builds it without
network; later releases of Debian have kubectl alone. The source lacks one file that the API server
needs, a description of all its types, which the source's own generator writes. Much processor time
and 1.3 GB; what was built before is not built again. FOLDER (runs/cluster) has the programs in bin,
and in src what may be removed then.
"""

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

from tools.engine import ROOT
from tools.prepare import MissingError, report, run

FOLDER = ROOT / "runs" / "cluster"
PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy"),
)
#: Without clouds' disks and load balancers, and without Docker: a third less to build.
TAGS = "providerless,dockerless"
SUITE, PACKAGE = "bookworm", "kubernetes"
_TAG = re.compile(rb"^// *\+k8s:openapi-gen=", re.MULTILINE)
_GENERATED = "pkg/generated/openapi"
#: Packages that tell the version.
_VERSIONED = ("component-base/version", "client-go/pkg/version")


def prepare(folder: Path) -> Path:
    """Build what is not there yet; the folder of programs. Raises MissingError."""
    programs = folder.resolve() / "bin"
    if not all((programs / name).is_file() for name in PROGRAMS):
        for tool in ("apt-get", "go"):
            if shutil.which(tool) is None:
                raise MissingError(f"{tool} is not installed")
        work = folder.resolve() / "src"
        work.mkdir(parents=True, exist_ok=True)
        _build(_unpack(work, _download(work)), work, programs)
    return programs


def _download(work: Path) -> Path:
    """The package's source, from the places that this system has its packages from."""
    if not (found := sorted(work.glob(f"{PACKAGE}_*.orig.tar.gz"))):
        listed = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(SIGNED_BY)",
                      "Created-By: Packages"])  # fmt: skip
        sources = [
            f"Types: deb-src\nURIs: {words[0]}\nSuites: {SUITE}\nComponents: main\n"
            + (f"Signed-By: {words[2]}\n" if words[2].startswith("/") else "")
            for line in sorted(set(listed.splitlines()))
            if (words := line.split()) and words[1:2] == [SUITE]
        ]
        if not sources:
            raise MissingError(f"this system has no packages of Debian's {SUITE}")
        (work / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (work / "one.sources").write_text("\n".join(sources))
        apt = ["apt-get", "--quiet", f"-oDir::Etc::sourcelist={work / 'one.sources'}",
               "-oDir::Etc::sourceparts=-", f"-oDir::State::lists={work / 'lists'}"]  # fmt: skip
        run([*apt, "update"])
        run([*apt, "source", "--download-only", PACKAGE], folder=work)
        found = sorted(work.glob(f"{PACKAGE}_*.orig.tar.gz"))
    return found[-1]


def _unpack(work: Path, source: Path) -> Path:
    """The source where Go expects it."""
    tree = work / "gopath" / "src" / "k8s.io" / "kubernetes"
    if not tree.exists():
        unfinished = work / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with tarfile.open(source) as packed:
            packed.extractall(unfinished, filter="tar")
        (inside,) = unfinished.iterdir()
        tree.parent.mkdir(parents=True, exist_ok=True)
        inside.rename(tree)
    return tree


def _build(tree: Path, work: Path, programs: Path) -> None:
    """Write the programs."""
    environment = os.environ | {
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOPATH": str(work / "gopath"),
        "GOCACHE": str(work / "cache"),
    }
    if not list((tree / _GENERATED).glob("zz_generated*")):
        generator = work / "openapi-gen"
        run(["go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"],
            folder=tree, environment=environment)  # fmt: skip
        boilerplate = "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"
        run([str(generator), "-i", ",".join(_described(tree)),
             "-p", f"k8s.io/kubernetes/{_GENERATED}", "-O", "zz_generated.openapi",
             "-h", boilerplate, "-r", str(work / "violations")],
            folder=tree, environment=environment)  # fmt: skip
    version = _version(work)
    places = [f"k8s.io/kubernetes/vendor/k8s.io/{one}" for one in _VERSIONED]
    major, minor, _ = version.split(".")
    named = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    set_ = [f"-X {place}.{key}={value}" for place in places for key, value in named.items()]
    flags = " ".join(["-s -w", *set_])
    made = work / "made"
    made.mkdir(exist_ok=True)
    build = ["go", "build", f"-tags={TAGS}", f"-ldflags={flags}", "-o", f"{made}/"]
    run([*build, *(f"./cmd/{one}" for one in PROGRAMS)], folder=tree, environment=environment)
    programs.mkdir(exist_ok=True)
    for one in PROGRAMS:
        (made / one).rename(programs / one)


def _version(work: Path) -> str:
    """The version of Kubernetes that the source's file name has."""
    (source, *_) = sorted(work.glob(f"{PACKAGE}_*.orig.tar.gz"))
    found = re.search(r"(\d+\.\d+\.\d+)\.orig\.tar", source.name)
    if found is None:
        raise MissingError(f"{source.name}: expected a version in its name")
    return found[1]


def _described(tree: Path) -> list[str]:
    """Packages whose types the description has."""
    found = set[str]()
    for top in ("pkg", "staging/src/k8s.io"):
        for path in (tree / top).rglob("*.go"):
            if _TAG.search(path.read_bytes()):
                place = path.parent.relative_to(tree).as_posix()
                found.add(place.replace("staging/src/", "vendor/", 1))
    examples = ("vendor/k8s.io/code-generator/", "vendor/k8s.io/sample-apiserver/")
    return sorted(f"k8s.io/kubernetes/{one}" for one in found if not one.startswith(examples))


def main() -> int:
    """Build, or say in one line what is missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    return report("make cluster-programs", lambda: str(prepare(folder)))


if __name__ == "__main__":
    sys.exit(main())
