"""What else a user could put on the same devices, re-implemented small, trained alike.

Every rival is one function of a `Ground`: the same pictures, variants, teacher's answers, shapes,
optimiser and number of epochs per member as ours, and the same loop
(`partitioner.training.loop.fit`).
"""
