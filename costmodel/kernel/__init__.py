"""The learned model of embedding kernels: features, network, training."""
