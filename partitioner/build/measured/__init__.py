"""A build by measurement: networks with given weights are cut, chosen, and taught new classes."""
