"""What a fleet sees and how its devices are, published over MQTT for Home Assistant and others."""
