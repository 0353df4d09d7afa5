"""What one process finds wrong with its batch is the same error on all of them, which go on with the next batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_PROCESSES = 2
#: By batch, what each way of looking it up is refused with.
EXPECTED = {
    "too few features": "lengths: must have one row per feature, 3, got 2",
    "negative lengths": "lengths: must be at least 0",
    "lengths of more ids": "lengths: add up to 12, but there are 11 ids",
    "lengths of fewer ids": "lengths: add up to 12, but there are 24 ids",
    "lengths of floats": "lengths: must be whole numbers of shape (features, batch), got torch.float32 of (3, 4)",
    "lengths in a row": "lengths: must be whole numbers of shape (features, batch), got torch.int64 of (12,)",
    "ids of floats": "ids: must be one row of whole numbers, got torch.float32 of (12,)",
    "ids of booleans": "ids: must be one row of whole numbers, got torch.bool of (12,)",
    "ids in a list": "ids: must be a tensor, got list",
    "sparse ids": "ids: must be a dense tensor, got torch.sparse_coo",
    "an id too large": "feature 'c': table 'tc' has rows 0 to 9, got id 10",
    "a negative id": "feature 'a': table 'ta' has rows 0 to 9, got id -1",
    "another device": "lengths: must be on cpu, got meta",
    "ids on another device": "ids: must be on cpu, got meta",
    "nothing": "batch: must be a BatchOfIds or a KeyedJaggedTensor, got NoneType",
    "a dict": "batch: must be a BatchOfIds or a KeyedJaggedTensor, got dict",
    "an error of its own": "loader: the file ends here",
    "keyed: missing feature": 'keys: has no feature "c", which the plan\'s tables look up',
    "keyed: weights": "weights: lookups are not weighted: leave them out, or plan tables that are weighted",
    "keyed: an id too large": "feature 'b': table 'tb' has rows 0 to 9, got id 10",
    "keyed: ids of floats": "ids: must be one row of whole numbers, got torch.float32 of (12,)",
    "keyed: lengths of fewer ids": "lengths: add up to 12, but there are 24 ids",
    "keyed: a length missing": "lengths: must be as many for each feature, got 11 for 3 features",
    "keyed: lengths of several sizes": (
        "lengths: must be 14, one for each sample of each feature, got 12 for 3 features"
    ),
    "keyed: inverse indices": "inverse_indices: feature 'c' has samples 0 to 3, got 4",
    "keyed: inverse indices of some": 'inverse_indices: must be there for feature "c", too',
    "ids without samples": "lengths: add up to 0, but there are 2 ids",
}
#: The same of weighted lookups.
EXPECTED_OF_WEIGHTS = {
    "no weights": "weights: must be there: lookups are weighted",
    "too few weights": "weights: must be one for each id, 12, got 11",
    "a weight that is no number": "weights: must be finite, got nan of feature 'b'",
}


@pytest.mark.parametrize("num_groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fault_of_one_process_is_the_same_error_on_all(tmp_path, num_groups):
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.faults_worker"]
    arguments = [str(NUM_PROCESSES), str(tmp_path), str(num_groups)]
    # The processes wait for each other for half an hour.
    subprocess.run([*command, *arguments], cwd=Path(__file__).parents[2], check=True, timeout=120)
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(NUM_PROCESSES))
    by_last = " (in the batch of process 1)"
    expected = {
        f"{name}, {way}": message + by_last
        for name, message in EXPECTED.items()
        for way in ("forward", "start", "distribute", "prefetch")
    }
    expected |= {
        f"{name}, {way}": message + by_last
        for name, message in EXPECTED_OF_WEIGHTS.items()
        for way in ("forward", "prefetch")
    }
    bad_rate = "learning_rate: must be a number of at least 0, got nan"
    ways = ("forward", "start", "distribute", "prefetch", "later")
    expected |= {f"a bad learning rate, {way}": bad_rate + by_last for way in ways}
    of_first = "feature 'a': table 'ta' has rows 0 to 9, got id -3 (in the batch of process 0)"
    expected |= {"on all, forward": of_first, "the first process's, forward": of_first}
    expected |= {f"model: {name}": EXPECTED[name] + by_last for name in ("keyed: missing feature", "nothing")}
    expected |= {"model: keyed: inverse indices": EXPECTED["keyed: inverse indices"] + by_last}
    assert first["refused"] == expected
    assert last["refused"] == expected
    assert first["wrong"] == last["wrong"] == []
    # The world, and the groups that were made for replicas, for the prefetching of two engines and for layers.
    assert first["groups"] == (4 if num_groups == 1 else 8)
