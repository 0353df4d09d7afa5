"""Values on the wire: as many come back as were sent, and each within what its format can tell."""

import pytest
import torch

from autoshard.core import DType
from autoshard.runtime.engine.vectors.payload import wire_format

#: Largest error of a value of magnitude 1.
ERRORS = {DType.FP32: 0.0, DType.FP16: 1e-3, DType.BF16: 8e-3, DType.INT8: 2 / 255}


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_values_come_back(dtype, count):
    values = torch.linspace(-1, 1, count) if count != 1 else torch.tensor([0.5])
    wire = wire_format(dtype).encode(values)
    assert wire.numel() == wire_format(dtype).num_elements(count)
    back = wire_format(dtype).decode(wire, count)
    assert back.shape == values.shape
    assert (back.float() - values).abs().max() <= ERRORS[dtype] if count else True
