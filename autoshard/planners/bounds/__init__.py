"""Lower bounds: what no plan of a space can be below.

`step_relaxation` bounds steps of a planner space by a linear relaxation, `kernel_relaxation` the slowest rank's kernels
of whole tables on single ranks. Both rest on linear functions that no price is below: those of kernel models
(`core.costs.KernelFloor`), and those of collectives (`moving_floor`).
"""
