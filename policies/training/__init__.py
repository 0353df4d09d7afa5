"""The training of policies: options, runs, checkpoints, logs, and the joint training with a cost model."""
