"""Rules of Home Assistant's documentation for the discovery of a device (MQTT integration)."""

import re
from typing import Any

import jinja2

TOPIC = re.compile(r"homeassistant/device/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+/config")
DEVICE = {
    "configuration_url", "connections", "hw_version", "identifiers", "manufacturer", "model",
    "model_id", "name", "serial_number", "suggested_area", "sw_version", "via_device",
}  # fmt: skip
ORIGIN = {"name", "support_url", "sw_version"}
SHARED = {
    "availability", "availability_mode", "availability_template", "availability_topic",
    "command_topic", "encoding", "payload_available", "payload_not_available", "qos",
    "state_topic",
}  # fmt: skip
ENTITY = SHARED | {
    "default_entity_id", "device_class", "enabled_by_default", "entity_category", "entity_picture",
    "expire_after", "force_update", "icon", "json_attributes_template", "json_attributes_topic",
    "name", "platform", "unique_id", "value_template",
}  # fmt: skip
SENSOR = ENTITY | {
    "last_reset_value_template", "options", "state_class", "suggested_display_precision",
    "unit_of_measurement",
}  # fmt: skip
BINARY_SENSOR = ENTITY | {"off_delay", "payload_off", "payload_on"}
#: Units that go with a class of sensors; a measurement needs a unit or none of these classes.
UNITS = {"duration": {"d", "h", "min", "s", "ms", "μs"}, "temperature": {"°C", "°F", "K"}}
CLASSES = {"sensor": {"duration", "enum", "temperature"}, "binary_sensor": {"problem"}}


def check_discovery(topic: str, payload: dict[str, Any]) -> None:
    """Assert that Home Assistant takes this message as the discovery of a device."""
    assert TOPIC.fullmatch(topic), topic
    required = {"device", "origin", "components"}
    assert required <= payload.keys() <= required | SHARED
    assert payload["device"].keys() <= DEVICE
    assert payload["device"]["identifiers"]
    assert "name" in payload["origin"]
    assert payload["origin"].keys() <= ORIGIN
    assert payload["components"]
    for entity in payload["components"].values():
        _check_entity(entity)


def _check_entity(entity: dict[str, Any]) -> None:
    if entity.keys() == {"platform"}:
        # Removes what was announced before.
        assert entity["platform"] in CLASSES
        return
    allowed = {"sensor": SENSOR, "binary_sensor": BINARY_SENSOR}[entity["platform"]]
    assert {"platform", "unique_id"} <= entity.keys() <= allowed, entity
    assert entity.get("entity_category", "diagnostic") == "diagnostic"
    kind = entity.get("device_class")
    assert kind is None or kind in CLASSES[entity["platform"]]
    if kind == "enum":
        assert entity["options"]
        assert not entity.keys() & {"state_class", "unit_of_measurement"}
    else:
        assert "options" not in entity
    if kind in UNITS:
        assert entity["unit_of_measurement"] in UNITS[kind]


def states(config: dict[str, Any], payload: dict[str, Any]) -> dict[str, str]:
    """Name of each entity -> what it shows of a message; `None` is shown as unknown."""
    return {
        entity["name"]: jinja2.Environment(undefined=jinja2.StrictUndefined)
        .from_string(entity["value_template"])
        .render(value_json=payload)
        for entity in config["components"].values()
    }
