"""Trained models over REST: which there are, which is in use, and candidates that are tried in the shadow."""
