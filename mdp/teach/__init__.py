"""Teaching a fleet: scenes of its classes, what was kept, builds of them, and their rollout."""
