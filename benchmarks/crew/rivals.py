"""torchft and hivemind on the played training and the links of `benchmarks.crew.net`.

    sudo python -m benchmarks.crew.rivals PYTHON

PYTHON has torchft-nightly 2026.10.26 and hivemind 1.1.12 installed (`pip install torchft-nightly
hivemind`), and is no environment of this project. torchft: LocalSGD, a mean of parameters in fp32
every 16 own steps. hivemind: Optimizer with local updates, rounds of 16 steps of all, parameters
in fp16, averaged in background, 3 s to find each other (its default is 15); its codecs of 8 bits
raise TypeError with NumPy 2.4. Neither averages moments. Adds to benchmarks/results/crew-net.json.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.crew.net import LAYERS, PICTURES, RESULT, STEP_S, TRAINERS, WIDTH, namespaces
from benchmarks.harness.results import read_result
from mdp.files import write_json

#: Own steps between means, and of the training.
EVERY, STEPS = 16, 96
#: What both share: a network whose step takes the time of a played one, and a start together.
_COMMON = f"""
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
host = f"10.77.0.{{rank + 1}}"
torch.set_num_threads(1)
torch.manual_seed(7)
network = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
network.requires_grad_(True)

def step(optimiser):
    optimiser.zero_grad()
    time.sleep({STEP_S})
    network(torch.ones(1, {WIDTH})).square().mean().backward()
    optimiser.step()

def together():
    (folder / f"ready-{{rank}}").touch()
    while len(list(folder.glob("ready-*"))) < {TRAINERS}:
        time.sleep(0.05)

def end(first_s, steps):
    said = {{"first_s": first_s, "end_s": time.monotonic(), "steps": steps}}
    (folder / f"said-{{rank}}.json").write_text(json.dumps(said))
    time.sleep(5)
    os._exit(0)
"""
_TORCHFT = f"""
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
if rank == 0:
    lighthouse = LighthouseServer(bind="10.77.0.1:29700", min_replicas={TRAINERS})
together()
optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4)
store = TCPStore(host, 29701, 1, True, wait_for_workers=False)
a_minute = timedelta(seconds=60)
manager = Manager(
    pg=ProcessGroupGloo(timeout=a_minute), min_replica_size={TRAINERS},
    load_state_dict=lambda all: network.load_state_dict(all), state_dict=network.state_dict,
    replica_id=f"r{{rank}}", store_addr=host, store_port=29701, rank=0, world_size=1,
    lighthouse_addr="http://10.77.0.1:29700", port=29702, hostname=host, timeout=a_minute,
    quorum_timeout=a_minute, use_async_quorum=False,
)
with LocalSGD(manager, network, optimiser, sync_every={EVERY}):
    for _ in range({EVERY}):  # the first mean connects them
        step(optimiser)
    first_s = time.monotonic()
    for _ in range({STEPS}):
        step(optimiser)
    assert manager.num_participants() == {TRAINERS}
    end(first_s, {STEPS})
"""
_HIVEMIND = f"""
import hivemind
from hivemind.compression import Float16Compression
known = folder / "address"
listens = [f"/ip4/{{host}}/tcp/29800"]
if rank == 0:
    dht = hivemind.DHT(host_maddrs=listens, start=True)
    (folder / "new").write_text(str(dht.get_visible_maddrs()[0]))
    (folder / "new").rename(known)
else:
    while not known.exists():
        time.sleep(0.1)
    dht = hivemind.DHT(initial_peers=[known.read_text()], host_maddrs=listens, start=True)
optimiser = hivemind.Optimizer(
    dht=dht, run_id="net", target_batch_size={EVERY * PICTURES * TRAINERS},
    batch_size_per_step={PICTURES}, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
    params=network.parameters(), use_local_updates=True, matchmaking_time=3.0,
    state_averaging_compression=Float16Compression(),
    averager_opts={{"target_group_size": {TRAINERS}}},
)
together()
first_s, steps = time.monotonic(), 0
while optimiser.local_epoch < {STEPS // EVERY}:
    step(optimiser)
    steps += 1
end(first_s, steps)
"""
RIVALS = {"torchft, ring, fp32": _TORCHFT, "hivemind, fp16, in background": _HIVEMIND}


def time_training(python: str, program: str) -> float:
    """Seconds of a step of all trainers."""
    with tempfile.TemporaryDirectory() as name, namespaces(TRAINERS) as machines:
        folder = Path(name)
        (folder / "trainer.py").write_text(_COMMON + program)
        # torchft's groups listen on what the host's name says.
        own = 'hostname "$0"; exec "$@"'
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", machine, "unshare", "--uts", "sh", "-c", own,
                 f"10.77.0.{rank + 1}", python, "-W", "ignore", folder / "trainer.py", folder,
                 str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stderr=(folder / f"log-{rank}").open("wb"),
            )
            for rank, machine in enumerate(machines)
        ]  # fmt: skip
        try:
            if any(process.wait(240) for process in started):
                raise SystemExit("a trainer failed")
        finally:
            for process in started:
                process.kill()
        logs = "".join((folder / f"log-{rank}").read_text() for rank in range(TRAINERS))
        if partial := re.findall(r"received \d+\.\d% .*", logs):  # hivemind goes on without them
            raise SystemExit(f"a mean was not of all: {partial[0]}")
        said: list[dict[str, Any]] = [
            json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(TRAINERS)
        ]
    took = max(one["end_s"] for one in said) - min(one["first_s"] for one in said)
    return float(took * TRAINERS / sum(one["steps"] for one in said))


def main() -> None:
    python = sys.argv[1]
    result = read_result(RESULT.stem) | {"rivals": {}}
    for name, program in RIVALS.items():
        took = time_training(python, program)
        result["rivals"][name] = round(TRAINERS * STEP_S / took, 2)
        print(name, round(took, 3), result["rivals"][name], flush=True)
        write_json(RESULT, result)


if __name__ == "__main__":
    main()
