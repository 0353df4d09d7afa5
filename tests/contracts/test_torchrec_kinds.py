"""Every kind of table that `autoshard.torchrec.Planner` returns on CPUs is computed as the unsharded model computes it.

All kinds are trained by one launch of two processes (`torchrec_kinds.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # half a minute

NUM_PROCESSES = 2
#: Parts of names of the kinds that TorchRec 1.8 computes wrongly or fails on, and what is said of them.
REFUSED = {
    "data_parallel sequence": "computes wrong rows of data-parallel sequence tables on cpu",
    "table_column_wise sequence": "its sharder column_wise, data_parallel, row_wise, table_wise",
    "table_row_wise sequence": "its sharder column_wise, data_parallel, row_wise, table_wise",
    "grid_shard sequence": "its sharder column_wise, data_parallel, row_wise, table_wise",
    "grid_shard mean": "computes wrong means of grid_shard tables",
    "adam": "trains with sgd, rowwise_adagrad or adagrad on cpu",
    "BF16": "trains fp32, fp16 on cpu",
    "table_wise of 6 columns": "needs dimensions that are multiples of 4",
    "row_wise of 6 columns": "needs dimensions that are multiples of 4",
    "row_wise of one row": 'needs rows in every block; "t0" has 1 for 2 ranks; column_wise, ',
    "mean row_wise with table_wise": "splits means by rows only where all tables of a module are",
    "mean row_wise with mean table_wise": "splits means by rows only where all tables of a module are",
    "mean row_wise with column_wise": "splits means by rows only where all tables of a module are",
    "mean row_wise with mean column_wise": "splits means by rows only where all tables of a module are",
    "mean row_wise with data_parallel": "splits means by rows only where all tables of a module are",
    "mean row_wise with mean data_parallel": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with table_wise": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with mean table_wise": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with column_wise": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with mean column_wise": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with data_parallel": "splits means by rows only where all tables of a module are",
    "mean table_row_wise with mean data_parallel": "splits means by rows only where all tables of a module are",
    "shared mean and sum": "computes wrong means by rows of features that sums by rows look up, too",
    "deduplicated": "has a sharder with use_index_dedup, which TorchRec carries out on cuda only",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    worker, output = Path(__file__).with_name("torchrec_kinds.py"), folder / "outcomes.json"
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(folder / "rendezvous"), str(output)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(NUM_PROCESSES)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * NUM_PROCESSES, "\n".join(errors)
    return json.loads(output.read_text(encoding="utf-8"))


def refusal_of(kind):
    return next((text for name, text in REFUSED.items() if kind == name or kind.endswith(f" {name}")), None)


def test_plans_are_computed_as_the_unsharded_model_is(outcomes):
    wrong = {kind: found for kind, found in outcomes.items() if refusal_of(kind) is None and set(found) != {"equal"}}
    assert not wrong
    assert sum(set(found) == {"equal"} for found in outcomes.values()) > 80


def test_what_torchrec_computes_wrongly_is_refused_by_name(outcomes):
    refused = {kind: found for kind, found in outcomes.items() if refusal_of(kind) is not None}
    assert len(refused) > 30
    for kind, found in refused.items():
        assert all(text.startswith("refused: ") and refusal_of(kind) in text for text in found), (kind, found)
