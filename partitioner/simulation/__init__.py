"""Simulation of a fleet: the product's own sessions, health and fusion, driven in virtual time."""
