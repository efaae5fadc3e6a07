"""Bundles in an OCI registry: a layer for each device's model, fetched by digest.

The protocol is that of the OCI distribution specification 1.1, the artifact that of ModelPack
(https://github.com/modelpack/model-spec). Nothing of this runs in an agent: a bundle is pulled into
a folder, which the agent reads as any other.
"""
