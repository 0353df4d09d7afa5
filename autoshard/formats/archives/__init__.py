"""Files of `torch.save`, read as data."""
