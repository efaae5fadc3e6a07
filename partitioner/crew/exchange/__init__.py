"""What a crew sends over the network, with torch.distributed."""
