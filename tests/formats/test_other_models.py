"""Models of HugeCTR, NVIDIA's lists of synthetic models, and DLRM's command lines."""

import json

import pytest

from autoshard.core import Optimizer, Pooling
from autoshard.core.errors import InputError
from autoshard.formats import import_tables

HUGECTR = {
    "solver": {"batchsize": 512},
    "optimizer": {"type": "Adam"},
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "slot_size_array": [100, 20],
            "dense": {"top": "dense", "dense_dim": 13},
            "sparse": [
                {"top": "deep", "type": "DistributedSlot", "nnz_per_slot": [1, 3], "slot_num": 2},
                {"top": "wide", "type": "DistributedSlot", "max_feature_num_per_sample": 6, "slot_num": 4},
            ],
        },
        {
            "type": "LocalizedSlotSparseEmbeddingHash",
            "bottom": "deep",
            "top": "deep_embedding",
            "sparse_embedding_hparam": {
                "embedding_vec_size": 16,
                "combiner": "mean",
                "workspace_size_per_gpu_in_mb": 9,
            },
        },
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "wide",
            "top": "wide_embedding",
            "sparse_embedding_hparam": {"vocabulary_size": 1000, "embedding_vec_size": 1, "combiner": 0},
            "optimizer": {"type": "SGD"},
        },
        {"type": "InnerProduct", "bottom": "dense", "top": "fc1", "fc_param": {"num_output": 512}},
    ],
}
MODELS = """
from collections import namedtuple
EmbeddingConfig = namedtuple("EmbeddingConfig", ["num_tables", "nnz", "num_rows", "width", "shared"])
model_tiny = ModelConfig(name="Tiny", embedding_configs=[
    EmbeddingConfig(1, [1, 10], 10000, 8, True),
    EmbeddingConfig(2, nnz=[1, 2], num_rows=10, width=4, shared=False),
], mlp_sizes=[256, 128], num_numerical_features=10, interact_stride=None)
model_other = ModelConfig("Other", [EmbeddingConfig(1, [1], 2000000000, 256, False)], [4], 1, None)
models = {"tiny": model_tiny, "other": model_other}
raise SystemExit("a file that is parsed does not run")
"""
DLRM = (
    "python dlrm_s_pytorch.py --arch-sparse-feature-size=16 --arch-mlp-bot=13-64-16 --arch-mlp-top '512-256-1' "
    "--arch-embedding-size=1000-1-40 --num-indices-per-lookup 4 --mini-batch-size=2048 --optimizer rwsadagrad"
)


def shape(tables):
    return [
        (table.num_embeddings, table.embedding_dim, [feature.pooling_factor for feature in table.features])
        for table in tables.tables
    ]


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_model_of_hugectr_has_a_table_per_slot_or_one_for_all(tmp_path):
    found = import_tables(write(tmp_path, "model.json", HUGECTR))
    assert found.batch_size == 512
    assert shape(found) == [(100, 16, [1.0]), (20, 16, [3.0]), (1000, 1, [1.5] * 4)]
    assert [table.name for table in found.tables] == ["deep_embedding_0", "deep_embedding_1", "wide_embedding"]
    assert [table.pooling for table in found.tables] == [Pooling.MEAN, Pooling.MEAN, Pooling.SUM]
    assert [table.optimizer for table in found.tables] == [Optimizer.ADAM, Optimizer.ADAM, Optimizer.SGD]
    assert import_tables(tmp_path / "model.json", batch_size=64).batch_size == 64


def test_one_of_nvidias_models_is_parsed_not_run(tmp_path):
    path = write(tmp_path, "models.py", MODELS)
    found = import_tables(f"{path}:tiny")
    assert shape(found) == [(10000, 8, [1.0, 10.0]), *[(10, 4, [1.0]), (10, 4, [2.0])] * 2]
    assert found == import_tables(f"{path}:model_tiny")
    assert {table.optimizer for table in found.tables} == {Optimizer.ADAGRAD}
    assert len({feature.name for table in found.tables for feature in table.features}) == 6
    one = write(tmp_path, "one.py", 'm = ModelConfig("m", [EmbeddingConfig(1, [1], 5, 4, False)], [4], 1, None)')
    assert shape(import_tables(one, batch_size=8)) == [(5, 4, [1.0])]


def test_what_nvidias_lists_do_not_say_is_told(tmp_path, caplog):
    path = write(tmp_path, "models.py", MODELS)
    import_tables(f"{path}:tiny", batch_size=8)
    told = [
        "dtype, optimizer, access: taken for fp32, adagrad and zipf with alpha 1.05, as in the published benchmark",
        "mlp_sizes: the dense layers are left out of the import",
    ]
    assert caplog.messages == told
    caplog.clear()
    import_tables(f"{path}:tiny")
    assert caplog.messages == ["batch_size: taken for 65536, as the file does not say it", *told]


def test_a_published_list_is_the_bundled_one(tmp_path):
    """Tiny V3 of config_v3.py has the tables of the bundled nvidia-tiny."""
    groups = ["1, [1, 10], 10000, 8, True", "1, [1, 10], 1000000, 16, True", "1, [1, 10], 25000000, 16, True"]
    groups += ["1, [1], 25000000, 16, False", "16, [1], 10, 8, False", "10, [1], 1000, 8, False"]
    groups += ["4, [1], 10000, 8, False", "2, [1], 100000, 16, False", "19, [1], 1000000, 16, False"]
    configs = ", ".join(f"EmbeddingConfig({group})" for group in groups)
    path = write(tmp_path, "config_v3.py", f"tiny = ModelConfig('Tiny V3', [{configs}], [256, 128], 10, None)")
    bundled = import_tables("nvidia-tiny")
    assert shape(import_tables(path)) == shape(bundled)
    assert [table.access for table in import_tables(path).tables] == [table.access for table in bundled.tables]


def test_a_command_line_of_dlrm_describes_tables_and_dense_layers(tmp_path):
    found = import_tables(DLRM)
    # Ids per sample: round(max(1, 4 r)) for an even r has the mean 4 / 2 + 1 / 8; a table of one row has one id.
    assert shape(found) == [(1000, 16, [2.125]), (1, 16, [1.0]), (40, 16, [2.125])]
    assert found.batch_size == 2048
    assert found.tables[0].optimizer is Optimizer.ROWWISE_ADAGRAD
    assert (found.dense.num_dense_features, found.dense.bottom_mlp, found.dense.top_mlp) == (
        13,
        (64, 16),
        (512, 256, 1),
    )
    assert shape(import_tables(f"{DLRM} --num-indices-per-lookup-fixed"))[0][2] == [4.0]
    assert shape(import_tables(f"{DLRM} --data-generation=dataset"))[0][2] == [1.0]
    script = write(tmp_path, "train.sh", "#!/bin/bash\n# DLRM\n" + DLRM.replace(" --arch-mlp", " \\\n  --arch-mlp"))
    assert import_tables(script, "dlrm-command") == found


def test_the_mean_of_drawn_lookups_is_that_of_dlrms_draw():
    import numpy as np

    drawn = np.round(np.maximum(1.0, np.random.default_rng(0).random(400_000) * 7))
    found = import_tables(f"{DLRM.replace('lookup 4', 'lookup 7')}")
    assert found.tables[0].features[0].pooling_factor == pytest.approx(drawn.mean(), abs=0.02)


def without(document, *path):
    copy = json.loads(json.dumps(document))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return copy


HPARAM = ("layers", 1, "sparse_embedding_hparam")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", {**HUGECTR, "optimizer": {"type": "Ftrl"}}, "optimizer.type: must be one of SGD, AdaGrad, Adam"),
        ("m.json", without(HUGECTR, "solver"), "solver.batchsize: is missing"),
        ("m.json", {**HUGECTR, "layers": HUGECTR["layers"][:1]}, "layers: must hold an embedding"),
        ("m.json", {**HUGECTR, "layers": HUGECTR["layers"][1:]}, "layers[0].bottom: must be a sparse input"),
        (
            "m.json",
            without(HUGECTR, *HPARAM, "embedding_vec_size"),
            "layers[1].sparse_embedding_hparam.embedding_vec_size",
        ),
        (
            "m.json",
            without(without(HUGECTR, "layers", 0, "slot_size_array"), *HPARAM, "workspace_size_per_gpu_in_mb"),
            "layers[1].sparse_embedding_hparam: must say the rows of its tables: one of slot_size_array",
        ),
        (
            "m.json",
            without(HUGECTR, "layers", 0, "sparse", 0, "slot_num"),
            "layers[0].sparse[0].slot_num: must be",
        ),
        ("m.py:none", MODELS, 'holds no model "none"; name one of model_tiny, model_other, tiny, other'),
        ("m.py", MODELS, "holds several models"),
        ("m.py", "x = 1", "must assign a ModelConfig"),
        ("m.py", "x = (", "is no Python file"),
        ("m.py", "x = ModelConfig('x', [EmbeddingConfig(f(), [1], 2, 4, True)])", "ModelConfig.embedding_configs[0]"),
        ("m.py", "x = ModelConfig('x', [EmbeddingConfig(1, [1], 2, 4)])", "embedding_configs[0].shared: is missing"),
        ("m.sh", "echo python dlrm_s_pytorch.py", "holds no command of dlrm_s_pytorch.py or dlrm_main.py"),
        ("m.sh", f"{DLRM} 'open", "is no command line: no closing quotation"),
        ("m.sh", f"{DLRM} --qr-flag", "--qr-flag: makes quotient-remainder tables"),
        ("m.sh", DLRM.replace("-40", "-x"), '--arch-embedding-size: must be whole numbers with "-" between them'),
        ("m.sh", f"{DLRM} --optimizer=lamb".replace("--optimizer rwsadagrad ", ""), "--optimizer: must be one of sgd"),
        ("m.sh", "dlrm_s_pytorch.py --mini-batch-size", "--mini-batch-size: expected one argument"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    file, _, model = name.partition(":")
    path = write(tmp_path, file, content)
    with pytest.raises(InputError) as raised:
        import_tables(f"{path}:{model}" if model else path, "dlrm-command" if file == "m.sh" else None)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
