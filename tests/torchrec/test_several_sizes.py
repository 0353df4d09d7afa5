"""Features with samples of their own (TorchRec's VBE): embedded and trained as by its modules on one process."""

import pytest

from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


def test_features_and_weights_are_those_of_the_unsharded_modules():
    from tests.torchrec.vbe_worker import KINDS, differences

    for results in on_ranks(differences, 2):
        assert results.keys() == set(KINDS)
        for (has_inverse, is_weighted), (difference, told) in results.items():
            assert difference < 1e-5, (has_inverse, is_weighted)
            said = "inverse_indices: feature 'user' has samples 0 to 1, got 9 (in the batch of process 1)"
            assert told == (said if has_inverse else ""), (has_inverse, is_weighted)
