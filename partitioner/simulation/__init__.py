"""What a fleet would do: the product's own sessions, health and fusion, driven in virtual time."""
