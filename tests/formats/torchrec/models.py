"""Models that the tests import, as a user's module would hold them."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad

META = torch.device("meta")


class Model(torch.nn.Module):
    """Pooled tables below a part of the model, and sequence tables at its top."""

    def __init__(self):
        super().__init__()
        self.sparse = torch.nn.Module()
        self.sparse.bags = EmbeddingBagCollection(
            device=META,
            tables=[
                EmbeddingBagConfig(
                    name="user",
                    num_embeddings=1000,
                    embedding_dim=16,
                    feature_names=["user", "friend"],
                    pooling=PoolingType.MEAN,
                    data_type=DataType.FP16,
                ),
                EmbeddingBagConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["item"]),
            ],
        )
        self.history = EmbeddingCollection(
            device=META,
            tables=[EmbeddingConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["item"])],
        )
        for parameter in self.sparse.parameters():
            parameter._optimizer_classes = [RowWiseAdagrad]
        for parameter in self.history.parameters():
            parameter._optimizer_classes = [torch.optim.SGD]


def make():
    print("made")
    return Model()


def make_constrained():
    return Model(), {
        "user": ParameterConstraints(pooling_factors=[3.0, 0.5], sharding_types=["row_wise", "column_wise"])
    }


def make_towers():
    """Two modules, each with a table of the same name and a feature of the same name."""
    config = {"name": "t", "num_embeddings": 1000, "embedding_dim": 16, "feature_names": ["id"]}
    modules = {
        path: EmbeddingBagCollection(device=META, tables=[EmbeddingBagConfig(**config)]) for path in ("user", "item")
    }
    return torch.nn.ModuleDict(modules)


def make_nothing():
    return torch.nn.Linear(2, 2)


def fail():
    raise ValueError("no data here")


def make_without_torchrec():
    """As where torchrec is not installed."""
    raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")
