"""Learned models of the rest of a step: collectives, dense layers, calibrated steps."""
