"""A fleet's answers and its devices' health, published over MQTT for Home Assistant and others."""
