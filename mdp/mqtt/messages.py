"""Topics and payloads: what is published, and Home Assistant's discovery of it. Pure.

Discovery is that of whole devices: https://www.home-assistant.io/integrations/mqtt/, "MQTT
discovery", Home Assistant 2024.11 and later.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, get_args
from zlib import crc32

import msgspec

from mdp import __version__
from mdp.client.status import DeviceStatus
from mdp.errors import InferenceError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.fusion.fuse import Mode
from mdp.protocol.messages import State, as_line
from mdp.requests.prediction import Prediction

#: Where Home Assistant looks unless it is told otherwise.
DISCOVERY_PREFIX = "homeassistant"
ONLINE, OFFLINE = "online", "offline"
#: Those that an agent says, and those that a client sees (`DeviceStatus.state`).
STATES = (*get_args(State), "UNREACHABLE", "REFUSED", "SILENT")
#: The longest state that Home Assistant keeps.
_MAX_STATE = 255
#: Labels, at most, that each have a sensor of their own.
_MOST_LABELS = 50
_MEASURED: Mapping[str, str] = {"state_class": "measurement"}
_DIAGNOSTIC: Mapping[str, str] = {"entity_category": "diagnostic"}
_PERCENT: Mapping[str, Any] = {
    **_MEASURED,
    "unit_of_measurement": "%",
    "suggested_display_precision": 1,
}
_MILLISECONDS: Mapping[str, Any] = {
    **_MEASURED,
    **_DIAGNOSTIC,
    "device_class": "duration",
    "unit_of_measurement": "ms",
    "suggested_display_precision": 1,
}


def slug(text: str) -> str:
    """`text` in the characters that Home Assistant allows in the topics of its discovery."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


def _distinct(text: str) -> str:
    """`slug` of a text with other characters, and a checksum of it."""
    return f"{slug(text)}_{crc32(text.encode()):08x}"


class Topics:
    """The topics of one fleet under `mdp/NAME`, and those of its devices."""

    def __init__(self, name: str, devices: Iterable[str]) -> None:
        """`name` as it stands in topics; `devices` are the entries of a fleet file."""
        self.name = name
        self.availability = f"mdp/{name}/availability"
        self.answer = f"mdp/{name}/answer"
        # Of another fleet on the same broker only its own process knows: `a.b` beside `a_b`.
        self.node = f"mdp_{name if slug(name) == name else _distinct(name)}"
        #: Device -> what stands for it in topics and identifiers, no two of them the same.
        names = list(devices)
        wanted = Counter(slug(name) for name in names)
        # The same whatever the order of a fleet file.
        self.slugs = {
            name: slug(name) if wanted[slug(name)] == 1 or slug(name) == name else _distinct(name)
            for name in names
        }

    @property
    def discovery_filter(self) -> str:
        """The filter that matches the discovery of this fleet's devices, also of former ones."""
        return f"{DISCOVERY_PREFIX}/device/{self.node}/+/config"

    def health(self, device: str) -> str:
        """Topic of a device's health."""
        return f"mdp/{self.name}/devices/{self.slugs[device]}"


def answer_payload(now: str, seen: Prediction | InferenceError) -> dict[str, Any]:
    """One look at what the cameras see, at the time `now`; without an answer, `error` says why."""
    if isinstance(seen, InferenceError):
        blank = (
            *("label", "probability", "mode", "expected_accuracy", "latency_ms"),
            *("known", "novelty", "known_rejected", "verdict"),
            *("normal", "anomaly", "good_rejected", "holds"),
            *("defects_missed", "defects_missed_least", "defects_missed_most"),
        )
        return {
            "time": now,
            **dict.fromkeys(blank),
            "used": [],
            "missing": seen.outcomes,
            "suspects": {},
            "blind_sides": [],
            "degraded": True,
            "error": as_line(str(seen)),
        }
    return {
        "time": now,
        "label": seen.label,
        "probability": seen.probability,
        "mode": seen.mode,
        "expected_accuracy": seen.expected_accuracy,
        "latency_ms": round(seen.latency_ms, 2),
        "used": seen.used,
        "missing": seen.missing,
        "suspects": seen.suspects,
        "degraded": seen.degraded,
        "error": None,
        "known": seen.known,
        "novelty": seen.novelty,
        "known_rejected": seen.known_rejected,
        "verdict": seen.verdict,
        "normal": seen.normal,
        "anomaly": seen.anomaly,
        "good_rejected": seen.good_rejected,
        "defects_missed": seen.defects_missed,
        "defects_missed_least": seen.defects_missed_least,
        "defects_missed_most": seen.defects_missed_most,
        "blind_sides": seen.blind_sides,
        "holds": seen.holds,
    }


def health_payload(status: DeviceStatus, latency_ms: float | None) -> dict[str, Any]:
    """The health of a device.

    `latency_ms` is the time of its latest answer, from request to reply.
    """
    return {
        "state": status.state,
        "usable": status.usable,
        "reason": status.reason,
        "provider": status.provider,
        "suspect": status.suspect,
        "latency_ms": None if latency_ms is None or not status.usable else round(latency_ms, 2),
        "temperature_c": status.temperature_c,
    }


def discovery(topics: Topics, fleet: Fleet, bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Topic -> payload of Home Assistant's discovery: one device for the fleet, one per entry."""
    node = topics.node
    found = {
        _config(topics, "fleet", ""): {
            **_common(topics, topics.answer),
            "device": {
                "identifiers": [node],
                "name": topics.name,
                "manufacturer": "MDP",
                "model": f"Fleet of {len(fleet.devices)}",
                "sw_version": bundle.digest[:12],
            },
            "components": _components(node, _fleet_entities(topics) | _label_entities(bundle)),
        }
    }
    assignments = bundle.manifest.plan.assignments
    for entry in fleet.devices:
        short = topics.slugs[entry.device]
        found[_config(topics, "device", short)] = {
            **_common(topics, topics.health(entry.device)),
            "device": {
                "identifiers": [f"{node}.{short}"],
                "name": f"{topics.name} {entry.device}",
                "manufacturer": "MDP",
                "model": assignments[entry.k].spec.words,
                "sw_version": bundle.digest[:12],
                "via_device": node,
            },
            "components": _components(f"{node}.{short}", _device_entities(topics, entry.device)),
        }
    return found


def entities_of(content: bytes) -> dict[str, str]:
    """Key -> platform of the entities of a discovery as published; none for what is no discovery.

    Those that it removes are left out.
    """
    try:
        components = msgspec.json.decode(content)["components"]
        return {key: str(one["platform"]) for key, one in components.items() if len(one) > 1}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def remove_former(payload: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    """A discovery that also removes `former` entities, key to platform, that it has no more.

    Home Assistant keeps one that is merely left out.
    """
    components = payload["components"]
    gone = {
        key: {"platform": platform} for key, platform in former.items() if key not in components
    }
    return {**payload, "components": {**components, **gone}}


def _config(topics: Topics, kind: str, short: str) -> str:
    # The fleet's own has a name that no device can have.
    place = f"{kind}-{short}" if short else kind
    return f"{DISCOVERY_PREFIX}/device/{topics.node}/{place}/config"


def _common(topics: Topics, state_topic: str) -> dict[str, Any]:
    return {
        "origin": {"name": "mdp", "sw_version": __version__},
        "availability_topic": topics.availability,
        "state_topic": state_topic,
    }


def _components(owner: str, entities: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    # A full stop is in no slug: device `b_c` of fleet `a` is not device `c` of fleet `a_b`.
    return {
        f"{owner}.{key}": {"unique_id": f"{owner}.{key}", **entity}
        for key, entity in entities.items()
    }


def _number(expression: str) -> str:
    """A template for a number that may be null, which Home Assistant shows as unknown."""
    value = f"value_json.{expression.split(' ')[0]}"
    return f"{{{{ value_json.{expression} if {value} is number else none }}}}"


def _text(key: str) -> str:
    return f"{{{{ (value_json.{key} | string)[:{_MAX_STATE}] }}}}"


def _attributes(topic: str, *keys: str) -> dict[str, str]:
    # Chosen ones: numbers that change with every answer would fill a database.
    listed = ", ".join(f"'{key}': value_json.{key}" for key in keys)
    template = f"{{{{ {{{listed}}} | tojson }}}}"
    return {"json_attributes_topic": topic, "json_attributes_template": template}


def _fleet_entities(topics: Topics) -> dict[str, dict[str, Any]]:
    return {
        "label": {
            "platform": "sensor",
            "name": "Label",
            "icon": "mdi:eye",
            "value_template": _text("label"),
            **_attributes(topics.answer, "used", "missing", "error"),
        },
        "unknown": {
            "platform": "binary_sensor",
            "name": "Unknown item",
            "icon": "mdi:help-circle",
            "value_template": "{{ 'ON' if value_json.known == false else 'OFF' }}",
        },
        "different": {
            "platform": "binary_sensor",
            "name": "Different from good ones",
            "icon": "mdi:alert-decagram",
            "device_class": "problem",
            # Nobody could inspect it: unknown, not fine.
            "value_template": "{{ none if value_json.normal is none"
            " else 'OFF' if value_json.normal else 'ON' }}",
            **_attributes(
                topics.answer,
                *("blind_sides", "defects_missed", "defects_missed_least", "defects_missed_most"),
            ),
        },
        "probability": {
            "platform": "sensor",
            "name": "Probability",
            "icon": "mdi:percent",
            "value_template": _number("probability * 100"),
            **_PERCENT,
        },
        "expected_accuracy": {
            "platform": "sensor",
            "name": "Expected accuracy",
            "icon": "mdi:bullseye-arrow",
            "value_template": _number("expected_accuracy * 100"),
            **_PERCENT,
            **_DIAGNOSTIC,
        },
        "mode": {
            "platform": "sensor",
            "name": "Mode",
            "device_class": "enum",
            "options": list(get_args(Mode)),
            "value_template": _text("mode"),
            **_DIAGNOSTIC,
        },
        "used": {
            "platform": "sensor",
            "name": "Devices in the answer",
            "icon": "mdi:check-network",
            "value_template": "{{ value_json.used | count }}",
            **_MEASURED,
            **_DIAGNOSTIC,
        },
        "missing": {
            "platform": "sensor",
            "name": "Devices missing",
            "icon": "mdi:close-network",
            "value_template": "{{ value_json.missing | count }}",
            **_MEASURED,
            **_DIAGNOSTIC,
        },
        "latency": {
            "platform": "sensor",
            "name": "Latency",
            "value_template": _number("latency_ms"),
            **_MILLISECONDS,
        },
        "problem": {
            "platform": "binary_sensor",
            "name": "Problem",
            "device_class": "problem",
            "value_template": "{{ 'ON' if value_json.degraded else 'OFF' }}",
        },
    }


def _label_entities(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """One sensor for each label, where several may hold and they are not too many to show."""
    labels = bundle.manifest.labels
    if not bundle.manifest.several or len(labels) > _MOST_LABELS:
        return {}
    return {
        f"label_{_distinct(label)}": {
            "platform": "binary_sensor",
            "name": label[:_MAX_STATE],
            "icon": "mdi:label",
            "value_template": _holds(label),
        }
        for label in labels
    }


def _holds(label: str) -> str:
    """A template that tells whether a label holds; without an answer it is unknown."""
    # A text of JSON is one of a template too; braces in it would end the template.
    # Characters beyond 16 bits stay as they are: of JSON's two escapes a template makes two.
    text = json.dumps(label, ensure_ascii=False)
    text = text.replace("{", "\\u007b").replace("}", "\\u007d")
    text = text.replace("%", "\\u0025")
    named = "value_json.holds | map('first') | list"
    return f"{{{{ none if value_json.holds is none else 'ON' if {text} in {named} else 'OFF' }}}}"


def _device_entities(topics: Topics, device: str) -> dict[str, dict[str, Any]]:
    return {
        "state": {
            "platform": "sensor",
            "name": "State",
            "device_class": "enum",
            "options": list(STATES),
            "value_template": _text("state"),
            **_DIAGNOSTIC,
            **_attributes(topics.health(device), "reason"),
        },
        "provider": {
            "platform": "sensor",
            "name": "Provider",
            "icon": "mdi:chip",
            "value_template": _text("provider"),
            **_DIAGNOSTIC,
        },
        "latency": {
            "platform": "sensor",
            "name": "Latency",
            "value_template": _number("latency_ms"),
            **_MILLISECONDS,
        },
        "temperature": {
            "platform": "sensor",
            "name": "Temperature",
            "device_class": "temperature",
            "unit_of_measurement": "°C",
            "value_template": _number("temperature_c"),
            **_MEASURED,
            **_DIAGNOSTIC,
        },
        "problem": {
            "platform": "binary_sensor",
            "name": "Problem",
            "device_class": "problem",
            "value_template": "{{ 'OFF' if value_json.usable else 'ON' }}",
        },
        "camera": {
            "platform": "binary_sensor",
            "name": "Camera",
            "device_class": "problem",
            "value_template": "{{ 'ON' if value_json.suspect else 'OFF' }}",
            **_DIAGNOSTIC,
            **_attributes(topics.health(device), "suspect"),
        },
    }
