"""What processes of tests have in common: imported once, in the process that they are forked from (`tests.ranks`).

Each of them would import it anew otherwise, and look through all of it for cycles.
"""

import gc
import importlib

_NAMES = (
    *("autoshard.runtime.processes.session", "torchrec", "torch.distributed.checkpoint", "safetensors.torch"),
    # Arrow imports pandas where it is installed.
    *("pyarrow.parquet", "pyarrow.dataset", "pyarrow.pandas_compat", "pandas"),
    "pytest",
)

for name in _NAMES:
    importlib.import_module(name)
gc.collect()
gc.freeze()
