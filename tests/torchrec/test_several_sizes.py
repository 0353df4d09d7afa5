"""Features with samples of their own (TorchRec's VBE): embedded and trained as by its modules on one process."""

import pytest

from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("has_inverse", [True, False])
def test_features_and_weights_are_those_of_the_unsharded_modules(has_inverse, is_weighted):
    from tests.torchrec.vbe_worker import differences

    results = on_ranks(differences, 2, has_inverse, is_weighted)
    assert max(difference for difference, _ in results) < 1e-5
    if has_inverse:
        said = "inverse_indices: feature 'user' has samples 0 to 1, got 9 (in the batch of process 1)"
        assert [told for _, told in results] == [said] * 2
