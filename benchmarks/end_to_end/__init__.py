"""One picture end to end: MDP against what a user would do instead, over real links.

namespaces     the client, a switch and three devices, each in a network namespace of its own
devices        what each of them may compute: a core and a share of it
processes      programs on them
leaving        how a run that is told to stop cleans up
split          who gets which part of the teacher, and what exchanging costs   (pure)
pieces, check  the teacher cut into stages and into parts of layers, as ONNX
prepare        models, measured speeds, profiles, plans and bundles of one run
serve          every rival's programs, started on their devices
speed, stage, part, http_server                            what runs on a device
setup, caller, outcomes                                    what runs at the client: its
                                                           orders, its work, its findings
rivals, mdp_rival, chain_rival, split_rival, http_rival    one way of asking each
report         what is kept, and its tables
"""
