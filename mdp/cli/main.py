"""`mdp`: classify pictures with a fleet, and manage the fleet."""

from mdp import console

#: Command -> its function or application, and its summary.
COMMANDS = {
    "demo": (
        "mdp.demo.command:demo",
        "Show four cameras round an item: cover one, unplug a board, put something else there.",
    ),
    "classify": (
        "mdp.cli.classify:classify",
        "Classify pictures; an unreadable one is an error, and the others follow.",
    ),
    "look": (
        "mdp.cli.watch:look",
        "Classify what the devices' own cameras see (`mdp-agent run --source`); no picture is "
        "sent.",
    ),
    "watch": (
        "mdp.cli.watch:watch_app",
        "Show what the devices' own cameras see, until Ctrl-C: a table, or lines to a pipe or "
        "file.",
    ),
    "record": (
        "mdp.cli.record:record_app",
        "Record what the devices' own cameras see, as pictures of scenes to train on.",
    ),
    "status": ("mdp.cli.doctor:status", "Show the status of every device of a fleet."),
    "doctor": (
        "mdp.cli.doctor:doctor",
        "Check files, connections, bundles and providers of a fleet.",
    ),
    "bench": (
        "mdp.cli.bench:bench",
        "Measure latency, overhead and throughput of a running fleet.",
    ),
    "gateway": (
        "mdp.cli.gateway:gateway",
        "Serve fleets over HTTP: the Open Inference Protocol, uploads, metrics and a page.",
    ),
    "mqtt": (
        "mdp.cli.mqtt:mqtt",
        "Publish what the devices' own cameras see, and every device's health, to an MQTT broker.",
    ),
    "keys": ("mdp.cli.keys:keys_app", "Make, rotate and revoke keys of clients and agents."),
    "bundle": ("mdp.cli.bundle:bundle_app", "Sign and verify bundles, and change those of agents."),
    "fleet": ("mdp.cli.fleet:fleet_app", "Make and change fleet files."),
}
app = console.new_app(
    "Classify a scene that several devices' cameras see, or pictures, on all devices at once.",
    "mdp",
    COMMANDS,
)


def main() -> None:
    """Entry point of `mdp`."""
    console.run(app, "mdp")
