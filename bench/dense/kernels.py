"""Parts of the runtime's dense model as kernels that can be timed.

Shape suffixes: B samples of a local batch, D columns.
"""

from __future__ import annotations

import torch
from torch import nn

from autoshard.core import DenseLayers, DType
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.training.dense import DenseModel


class DenseKernel:
    """One part of the dense model, with inputs and the gradient of its outputs.

    The backward pass computes the gradients of weights and biases, and of the inputs unless they are data. It gives
    their memory back, as a training step does, and takes no optimizer step.

    Args of the constructor:
        shape: What to run.
        device: Where.
        seed: Of weights and inputs.
    """

    is_idle = False

    def __init__(self, shape: DenseShape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        self.module = _module(shape, device, seed)
        dtype, generator = TORCH_DTYPES[shape.dtype], torch.Generator(device).manual_seed(seed)
        input_widths = shape.widths[:1] if shape.kind.is_mlp else shape.widths
        self.inputs = [
            torch.randn(shape.batch_size, width, generator=generator, device=device, dtype=dtype)
            for width in input_widths
        ]
        if shape.kind != DenseKind.BOTTOM_MLP:
            for input_BD in self.inputs:
                input_BD.requires_grad_()
        self.gradient_BD = torch.randn(
            shape.batch_size, shape.output_width, generator=generator, device=device, dtype=dtype
        )
        self._wanted = [leaf for leaf in (*self.inputs, *self.module.parameters()) if leaf.requires_grad]

    def forward(self) -> torch.Tensor:
        """The outputs, shape (B, D)."""
        return self.module(*self.inputs)

    def gradients(self, output_BD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the inputs, unless they are data, and of the parameters, in order."""
        return torch.autograd.grad(output_BD, self._wanted, self.gradient_BD)

    def backward(self, output_BD: torch.Tensor) -> None:
        """Computes all gradients and lets go of them."""
        self.gradients(output_BD)


def kernel_bytes(shape: DenseShape) -> int:
    """Bytes that a kernel holds, and at most needs while it runs: weights, gradients, activations, inputs, outputs."""
    activations = sum(shape.widths) + shape.output_width
    if shape.kind == DenseKind.DOT:
        activations += sum(shape.widths) + shape.num_vectors**2
    # Each activation once before and once after its ReLU, and their gradients.
    return shape.dtype.num_bytes * (2 * shape.num_parameters + 4 * shape.batch_size * activations)


def runnable_dtypes(device: torch.device) -> tuple[DType, ...]:
    """The number formats that torch runs all parts in on a device."""
    return tuple(dtype for dtype in DENSE_DTYPES if _runs(dtype, device))


def _runs(dtype: DType, device: torch.device) -> bool:
    shapes = [
        DenseShape(kind=DenseKind.TOP_MLP, batch_size=2, widths=(8, 4, 1), dtype=dtype),
        *(DenseShape.interaction(2, 2, 8, kind=kind, dtype=dtype) for kind in (DenseKind.DOT, DenseKind.CONCAT)),
    ]
    try:
        for kernel in (DenseKernel(shape, device) for shape in shapes):
            kernel.backward(kernel.forward())
    except RuntimeError as error:
        # Torch says so of an operator without a kernel for a type, and of a type that the device's libraries refuse.
        if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
            return False
        raise
    return True


def _module(shape: DenseShape, device: torch.device, seed: int) -> nn.Module:
    """The part, taken out of the runtime's model, so that what is measured is what is trained."""
    if not shape.kind.is_mlp:
        return _interaction(shape, seed).to(device)
    if shape.kind == DenseKind.BOTTOM_MLP:
        layers = DenseLayers(num_dense_features=shape.widths[0], bottom_mlp=shape.widths[1:], top_mlp=(1,))
        feature_dims: list[int] = []
    else:
        # Concatenation gives any number of columns to the top: one of the bottom's, all others a feature's.
        layers = DenseLayers(
            num_dense_features=1, bottom_mlp=(1,), top_mlp=shape.widths[1:], interaction=DenseKind.CONCAT
        )
        feature_dims = [shape.widths[0] - 1] if shape.widths[0] > 1 else []
    with torch.device("meta"):  # torch's own initial weights would take longer than measuring
        model = DenseModel(layers, feature_dims, seed)
    part = model.bottom if shape.kind == DenseKind.BOTTOM_MLP else model.top
    part = part.to_empty(device=device).to(TORCH_DTYPES[shape.dtype])
    _initialise(part, torch.Generator(device).manual_seed(seed))
    return part


def _interaction(shape: DenseShape, seed: int) -> nn.Module:
    width, pooled_width = shape.widths
    is_dot = shape.kind == DenseKind.DOT
    model = DenseModel(
        DenseLayers(num_dense_features=1, bottom_mlp=(width,), top_mlp=(1,), interaction=str(shape.kind)),
        [width] * (pooled_width // width) if is_dot else [pooled_width],
        seed,
    )
    # What is left interacts and passes the result on: the bottom perceptron is the caller's, the top one does nothing.
    model.bottom, model.top = nn.Sequential(), nn.Sequential()
    return model


def _initialise(part: nn.Module, generator: torch.Generator) -> None:
    """He's weights: values keep their size through 20 layers, so that fp16 neither over- nor underflows."""
    with torch.no_grad():
        for layer in part.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
