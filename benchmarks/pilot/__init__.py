"""The pilot of networks with given weights: its predictions against the truth."""
