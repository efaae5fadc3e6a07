"""HTTP in front of fleets: the Open Inference Protocol v2, uploads, metrics and a page.

Needs the extra `gateway`. Nothing outside this package and `mdp gateway` imports it.
"""
