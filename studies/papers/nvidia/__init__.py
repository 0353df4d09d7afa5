"""NVIDIA's published step times of synthetic models, predicted from the published program and hardware alone.

The times are in the README of NVIDIA-Merlin/distributed-embeddings (examples/benchmarks/synthetic_models) since its
first commit, c6b2e2f of March 2022, so that is the program whose kernels are counted here: TensorFlow in NVIDIA's
container 22.02, Horovod, one embedding variable per table, Keras' Adagrad. No constant is fitted to the times.
"""

from studies.papers.nvidia.hardware import A100, Gpu
from studies.papers.nvidia.kernels import TensorFlowKernels
from studies.papers.nvidia.models import PUBLISHED_MS, SyntheticModel, synthetic_model
from studies.papers.nvidia.program import Prediction, predict, predict_all

__all__ = [
    "A100",
    "PUBLISHED_MS",
    "Gpu",
    "Prediction",
    "SyntheticModel",
    "TensorFlowKernels",
    "predict",
    "predict_all",
    "synthetic_model",
]
