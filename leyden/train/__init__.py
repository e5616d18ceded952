"""Training: data, losses, optimisers and recipes around the one network that also serves."""
