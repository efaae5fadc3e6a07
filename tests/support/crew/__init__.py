"""Trainers of a crew whose network is a count of its batches."""
