"""Virtual time: a plan's real steps on many processes of one machine, timed as if each had a machine of its own.

Processes take turns on the cores of this machine. A rank's clock goes on by the CPU time of its threads; at a
collective the clocks of its ranks meet, and go on at what a model of the wire gives for the bytes that are really
exchanged. So a step takes what its slowest ranks compute and what the wire takes, whatever else this machine does.

Source:
    Time-dilated and online simulation of parallel programs, as in SimGrid's SMPI: Clauss et al., "Single node on-line
    simulation of MPI applications with SMPI" (IPDPS 2011).
"""

from autoshard.runtime.virtual.group import BACKEND, VirtualMachine
from autoshard.runtime.virtual.wire import GLOO_WORK, Operation, Wire

__all__ = ["BACKEND", "GLOO_WORK", "Operation", "VirtualMachine", "Wire"]
