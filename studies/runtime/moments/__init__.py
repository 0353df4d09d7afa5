"""Replica groups and moment-scaled AdaGrad, executed: 2D Sec. 3 and 4.1 with the runtime's own engine."""
