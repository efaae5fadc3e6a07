"""Builds of bundles: inputs are read, devices' networks planned, trained, exported, evaluated.

`bundle` is the way in, for both kinds: planned by what earlier trainings were worth and taught by a
teacher (`plan`, `train`), or chosen by measurement (`measured`). Every step skips what is done.
"""
