"""One picture end to end: MDP against what a user would do instead, over real links.

namespaces     the client, a switch and three devices, each in a network namespace of its own
devices        what each of them may compute: a core and a share of it
processes      programs on them
split          who gets which part of the teacher, and what exchanging costs   (pure)
pieces         the teacher cut into stages and into parts of layers, as ONNX
prepare        models, profiles, plan and bundle of one run
serve          every rival's programs, started on their devices
stage, part, http_server                   what runs on a device
caller         what runs at the client: asks everybody in turns
mdp_rival, chain_rival, split_rival, http_rival   one way of asking each
numbers, report                            percentiles and ratios; tables
"""
