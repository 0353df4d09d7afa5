"""Models of HugeCTR of all its versions: rows of slots, rows together, room for rows."""

import json

import pytest

from autoshard.core import Optimizer
from autoshard.core.errors import InputError
from autoshard.formats import import_tables


def sparse(top, slot_num, **fields):
    return {"top": top, "slot_num": slot_num, "nnz_per_slot": 1, "is_fixed_length": True, **fields}


def embedding(bottom, *, layer=None, kind="DistributedSlotSparseEmbeddingHash", dim=16, **hparam):
    hparam = {"embedding_vec_size": dim, "combiner": "sum", **hparam}
    return {
        "type": kind,
        "bottom": bottom,
        "top": f"{bottom}_rows",
        "sparse_embedding_hparam": hparam,
        **(layer or {}),
    }


def model(inputs, *embeddings, data=None, gpus=(0,), optimizer="SGD"):
    return {
        "solver": {"batchsize": 512, "gpu": list(gpus)},
        "optimizer": {"type": optimizer},
        "layers": [{"type": "Data", "sparse": inputs, **(data or {})}, *embeddings],
    }


def imported(folder, document):
    path = folder / "model.json"
    path.write_text(json.dumps(document))
    return import_tables(path)


def shapes(tables):
    return [(table.num_embeddings, table.embedding_dim, len(table.features)) for table in tables.tables]


SIZES = [1000, 20, 3]
PER_SLOT = [(1000, 16, 1), (20, 16, 1), (3, 16, 1)]
ONE_HOT = "LocalizedSlotSparseEmbeddingOneHot"


@pytest.mark.parametrize(
    "document",
    [
        model([sparse("x", 3)], embedding("x", kind=ONE_HOT, vocabulary_size=1023, layer={"slot_size": SIZES})),
        model([sparse("x", 3)], embedding("x", vocabulary_size=1023), data={"slot_size_array": SIZES}),
        model([sparse("x", 3)], embedding("x", vocabulary_size=9999), data={"slot_size": SIZES}),
        model([sparse("x", 3)], embedding("x", workspace_size_per_gpu_in_mb=9, slot_size_array=SIZES)),
        model([sparse("x", 3)], embedding("x", kind="HybridSparseEmbedding", slot_size_array=SIZES)),
        model([sparse("x", 3)], embedding("x", slot_size_array=SIZES), data={"slot_size_array": [9, 9, 9]}),
        model([sparse("x", 3)], embedding("x", max_vocabulary_size_per_gpu=5000), data={"slot_size_array": SIZES}),
    ],
)
def test_slots_whose_rows_are_known_are_tables(document, tmp_path):
    assert shapes(imported(tmp_path, document)) == PER_SLOT


def test_sizes_of_the_data_layer_run_over_the_inputs(tmp_path):
    inputs = [sparse("wide", 2), sparse("deep", 3)]
    layers = [
        embedding("deep", workspace_size_per_gpu_in_mb=8),
        embedding("wide", workspace_size_per_gpu_in_mb=8, dim=1),
    ]
    found = imported(tmp_path, model(inputs, *layers, data={"slot_size_array": [101, 202, 11, 22, 33]}))
    assert shapes(found) == [(11, 16, 1), (22, 16, 1), (33, 16, 1), (101, 1, 1), (202, 1, 1)]


def test_slots_of_size_0_look_up_the_table_of_the_next_slot_with_rows(tmp_path):
    """A history of 3 items and their categories: all items share a table, and all categories another one."""
    inputs = [sparse("user", 1), sparse("items", 3), sparse("categories", 3)]
    layers = [embedding(name, workspace_size_per_gpu_in_mb=8, dim=18) for name in ("user", "items", "categories")]
    found = imported(tmp_path, model(inputs, *layers, data={"slot_size_array": [500, 0, 0, 300, 0, 0, 7]}))
    assert shapes(found) == [(500, 18, 1), (300, 18, 3), (7, 18, 3)]
    mixed = model([sparse("x", 4)], embedding("x", slot_size_array=[5, 0, 6, 7]))
    assert shapes(imported(tmp_path, mixed)) == [(5, 16, 1), (6, 16, 2), (7, 16, 1)]


@pytest.mark.parametrize(
    ("hparam", "gpus", "optimizer", "rows"),
    [
        ({"vocabulary_size": 1000}, [0, 1], "SGD", 1000),
        ({"max_vocabulary_size": 1000}, [0, 1], "SGD", 1000),
        ({"max_vocabulary_size_global": 1000, "workspace_size_per_gpu_in_mb": 9}, [0, 1], "SGD", 1000),
        ({"max_vocabulary_size_per_gpu": 1000}, [0, 1], "SGD", 2000),
        ({"max_vocabulary_size_per_gpu": 1000}, [[0, 1], [2, 3], [4]], "SGD", 5000),
        # A MiB holds 2^20 / (4 * 16) = 16,384 rows of weights; Adam holds each three times, AdaGrad twice.
        ({"workspace_size_per_gpu_in_mb": 3}, [0], "SGD", 3 * 16384),
        ({"workspace_size_per_gpu_in_mb": 3}, [0, 1], "Adam", 2 * 16384),
        ({"workspace_size_per_gpu_in_mb": 2}, [0], "AdaGrad", 16384),
    ],
)
def test_rows_together_are_one_table_and_told(hparam, gpus, optimizer, rows, tmp_path, caplog):
    found = imported(tmp_path, model([sparse("x", 3)], embedding("x", **hparam), gpus=gpus, optimizer=optimizer))
    assert shapes(found) == [(rows, 16, 3)]
    assert f"taken for one table of {rows} rows that 3 slots share" in caplog.text


def test_a_lazy_adam_has_room_for_fewer_rows(tmp_path):
    document = model([sparse("x", 3)], embedding("x", workspace_size_per_gpu_in_mb=4))
    document["optimizer"] = {"type": "Adam", "update_type": "LazyGlobal"}
    found = imported(tmp_path, document)
    assert shapes(found) == [(16384, 16, 3)]
    assert found.tables[0].optimizer is Optimizer.ADAM


def test_models_of_the_first_version_have_no_data_layer(tmp_path):
    old = embedding("", vocabulary_size=1603616, slot_num=1, kind="SparseEmbeddingHash", combiner=0)
    del old["bottom"]
    document = model([], old) | {"data": {"max_feature_num_per_sample": 100, "slot_num": 1}}
    found = imported(tmp_path, document | {"layers": [old]})
    assert (shapes(found), found.tables[0].pooling_factor) == ([(1603616, 16, 1)], 100.0)


def test_a_model_of_inference_has_the_batch_of_inference_and_no_optimizer_state(tmp_path):
    document = model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5]))
    del document["solver"], document["optimizer"]
    found = imported(tmp_path, document | {"inference": {"max_batchsize": 64}})
    assert (found.batch_size, found.tables[0].optimizer) == (64, Optimizer.SGD)


@pytest.mark.parametrize(
    ("document", "note"),
    [
        (
            model([sparse("x", 2, nnz_per_slot=4, is_fixed_length=False)], embedding("x", slot_size_array=[4, 5])),
            "layers[0].sparse[0].nnz_per_slot: the largest number of ids per sample is taken for the mean",
        ),
        (
            model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5], vocabulary_size=8)),
            "layers[1].sparse_embedding_hparam.vocabulary_size: has room for 8 of the slots' 9 rows",
        ),
        (
            model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5], evict=3)),
            "layers[1].sparse_embedding_hparam.evict: not read",
        ),
        (
            model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5])) | {"optimizer": None},
            "optimizer: is missing; the tables are taken to have no optimizer state",
        ),
        (
            model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5]), {"type": "InnerProduct"}),
            "layers: the dense layers are left out of the import",
        ),
    ],
)
def test_what_is_assumed_is_told(document, note, tmp_path, caplog):
    assert len(imported(tmp_path, document).tables) == 2
    assert note in caplog.text


def test_a_model_of_embeddings_alone_says_all_but_its_access(tmp_path, caplog):
    imported(tmp_path, model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5])))
    told = "dtype, access: taken for fp32, as HugeCTR holds weights, and for rows that are looked up alike"
    assert caplog.messages == [told]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            model([sparse("x", 2)], embedding("x", slot_size_array=[4, 5]), embedding("x", kind="EmbeddingCollection")),
            "layers[2].type: must be one of DistributedSlotSparseEmbeddingHash",
        ),
        (
            model([sparse("x", 3)], embedding("x", slot_size_array=[4, 5])),
            "slot_size_array: must hold a value for each slot of each input in turn, got 2 for 3 slots",
        ),
        (
            model([sparse("x", 3)], embedding("x"), data={"slot_size_array": [1, 2, 3, 4]}),
            "layers[0].slot_size_array: must hold a value for each slot",
        ),
        (
            model([sparse("x", 3)], embedding("x", slot_size_array=[4, 0, 0])),
            "slot_size_array: has size 0 for slot 1, and no later slot of the embedding has rows to share",
        ),
        (model([sparse("x", 3)], embedding("x", embedding_vec_size=[8, 8])), "embedding_vec_size: must be a whole"),
        (
            model([sparse("x", 3)], embedding("x", slot_size_array=[4, 5, 6]), optimizer="Ftrl"),
            "optimizer.type: must be one of SGD, AdaGrad, Adam",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused(document, message, tmp_path):
    with pytest.raises(InputError) as raised:
        imported(tmp_path, document)
    assert message in str(raised.value)


@pytest.mark.parametrize("line", ["import hugectr", "from hugectr import Solver", "import hugectr.tools as tools"])
def test_a_script_of_hugectr_is_refused_with_the_way_to_its_json(line, tmp_path):
    path = tmp_path / "dlrm.py"
    path.write_text(f"{line}\nmodel.add(hugectr.SparseEmbedding(embedding_vec_size=16))\n")
    with pytest.raises(InputError, match=r"script of HugeCTR, which is not run; have it call Model\.graph_to_json"):
        import_tables(path)
