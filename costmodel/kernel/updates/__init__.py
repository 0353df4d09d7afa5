"""What an update of the learned model takes: a batch and its loss; and how fast updates are."""
