"""Exchange of a crew over the network, with torch.distributed."""
