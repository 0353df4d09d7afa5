from dataclasses import replace
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import DenseLayers, DType
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape, dense_shapes
from autoshard.core.errors import FormatError, InvalidOptionError, SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import devices_in
from tests import builders as make

TOP = DenseShape(kind=DenseKind.TOP_MLP, batch_size=512, widths=(479, 1024, 1))


NOON = make.dense_sample().collected_at


def sample_of(shape=TOP, minute=0, **fields):
    return make.dense_sample(shape, **{"collected_at": NOON + timedelta(minutes=minute), **fields})


sizes = st.integers(1, 10**6)
shapes = st.one_of(
    st.builds(
        DenseShape,
        kind=st.just(DenseKind.BOTTOM_MLP),
        batch_size=sizes,
        widths=st.lists(sizes, min_size=2, max_size=22).map(tuple),
        dtype=st.sampled_from(DENSE_DTYPES),
    ),
    st.builds(
        DenseShape.interaction,
        sizes,
        st.integers(1, 1000),
        sizes,
        kind=st.sampled_from([DenseKind.DOT, DenseKind.CONCAT]),
        dtype=st.sampled_from(DENSE_DTYPES),
    ),
)
samples = st.builds(
    sample_of,
    shapes,
    st.integers(0, 10**6),
    forward_ms=st.floats(1e-6, 1e6),
    is_noisy=st.booleans(),
    sm_clock_mhz=st.floats(0, 3000),
    throttle_reasons=st.sampled_from(["", "hw_slowdown,sw_power_cap"]),
)


@given(written=st.lists(samples, min_size=1, max_size=5, unique=True))
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read(written, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    file = DENSE_SAMPLES.write(store, written)
    assert DENSE_SAMPLES.read(store) == tuple(sample.identified() for sample in written)
    assert DENSE_SAMPLES.read_file(file) == DENSE_SAMPLES.read(store)
    assert damaged_samples(DENSE_SAMPLES.read(store)) == ()


def test_dense_samples_lie_beside_the_others(tmp_path):
    file = DENSE_SAMPLES.write(tmp_path, [sample_of()])
    assert file.parent == tmp_path / "dense" / "device=cpu"
    assert file.name.startswith("part-20260102T120000123456-")
    assert list(file.parent.iterdir()) == [file]
    assert DENSE_SAMPLES.devices(tmp_path) == ("cpu",)
    assert devices_in(tmp_path) == ()  # those of embeddings


def test_the_same_sample_gets_the_same_id_and_is_read_once(tmp_path):
    sample = sample_of()
    assert sample.identified().identified() == sample.identified()
    assert sample.identified().sample_id != sample_of(forward_ms=1.25).identified().sample_id
    DENSE_SAMPLES.write(tmp_path, [sample])
    DENSE_SAMPLES.write(tmp_path, [sample, sample_of(minute=1)])
    assert [one.collected_at.minute for one in DENSE_SAMPLES.read(tmp_path)] == [0, 1]


def test_a_changed_sample_is_found():
    honest, changed = sample_of().identified(), replace(sample_of(minute=1).identified(), backward_ms=0.5)
    assert damaged_samples([honest, changed]) == (changed,)


def test_drift_is_divided_out():
    quick = [sample_of()] * 3
    slow = [sample_of(forward_ms=4.0, backward_ms=8.0, reference_forward_ms=2.0, reference_backward_ms=4.0)] * 2
    forward_ms, backward_ms = corrected_ms([*quick, *slow])
    np.testing.assert_allclose(forward_ms, 2.0)
    np.testing.assert_allclose(backward_ms, 4.0)


def test_devices_are_kept_apart(tmp_path):
    with pytest.raises(SampleStoreError, match="holds no samples of dense layers"):
        DENSE_SAMPLES.read(tmp_path)
    DENSE_SAMPLES.write(tmp_path, [sample_of()])
    DENSE_SAMPLES.write(tmp_path, [sample_of(device="h200")])
    assert {sample.device for sample in DENSE_SAMPLES.read(tmp_path, "h200")} == {"h200"}
    with pytest.raises(SampleStoreError, match="several devices; name one of: cpu, h200"):
        DENSE_SAMPLES.read(tmp_path)
    with pytest.raises(SampleStoreError, match='no samples of dense layers of device "a100"; it holds: cpu, h200'):
        DENSE_SAMPLES.read(tmp_path, "a100")


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "dense").write_text("no folder")
    with pytest.raises(SampleStoreError, match="cannot be written"):
        DENSE_SAMPLES.write(tmp_path, [sample_of()])


def with_column(name, value):
    def change(table):
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        return table.set_column(index, field, pa.array([value], field.type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["forward_ms"]), "forward_ms: column is missing"),
        (lambda table: table.append_column("extra", [[1]]), "extra: column is missing, there twice or not"),
        (
            lambda table: table.replace_schema_metadata({b"autoshard.schema": b"autoshard.dense-samples/9"}),
            "schema: must be autoshard.dense-samples/2, got autoshard.dense-samples/9",
        ),
        (lambda table: table.replace_schema_metadata(None), "got none"),
        (with_column("forward_ms", float("nan")), "forward_ms: must be a number in [1e-06, 1e+08], got "),
        (with_column("backward_ms", -1.0), "backward_ms: must be a number in [1e-06, 1e+08], got "),
        (with_column("forward_ms", 0.0), "forward_ms: must be a number in [1e-06, 1e+08], got 0"),
        (with_column("num_rounds", 0), "num_rounds: must be above 0"),
        (with_column("device", None), "device: must not be null"),
        (with_column("widths", None), "widths: must not be null"),
        (with_column("widths", [479, None, 1]), "widths: must not be null"),
        (with_column("widths", [479]), "widths: must be two or more numbers above 0, got [479]"),
        (with_column("widths", [479, 2]), "widths: of a top perceptron must end in 1"),
        (with_column("batch_size", 0), "batch_size: must be at least 1, got 0"),
        (with_column("kind", "cross"), 'kind: must be one of bottom_mlp, top_mlp, dot, concat; got "cross"'),
        (with_column("dtype", "int8"), 'dtype: must be one of fp32, fp16, bf16, got "int8"'),
        (with_column("dtype", "fp64"), "dtype: must be one of"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(change, message, tmp_path):
    file = DENSE_SAMPLES.write(tmp_path, [sample_of()])
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(FormatError) as raised:
        DENSE_SAMPLES.read(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("num_bytes", [0, 100, -100])
def test_a_damaged_file_is_an_error_that_names_it(num_bytes, tmp_path):
    file = DENSE_SAMPLES.write(tmp_path, [sample_of()])
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(FormatError, match="is no Parquet file, or is damaged") as raised:
        DENSE_SAMPLES.read(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")


def test_operations_are_counted_as_stated():
    # MLPerf's bottom perceptron: 2 (13·512 + 512·256 + 256·128) per sample; data need no gradient.
    bottom = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=10, widths=(13, 512, 256, 128))
    assert bottom.forward_flops == 10 * 340_992
    assert bottom.backward_flops == 10 * (2 * 340_992 - 2 * 13 * 512)
    assert TOP.backward_flops == 2 * TOP.forward_flops == 4 * 512 * (479 * 1024 + 1024)
    dot = DenseShape.interaction(10, 26, 128)
    assert dot.output_width == 128 + 27 * 26 // 2 == 479
    # The vectors side by side, products of all pairs, and the output.
    assert dot.num_outputs == 27 * 128 + 27**2 + 479
    assert (bottom.num_outputs, TOP.num_outputs) == (512 + 256 + 128, 1024 + 1)
    assert (dot.forward_flops, dot.backward_flops) == (10 * 2 * 27 * 27 * 128, 10 * 4 * 27 * 27 * 128)
    concat = DenseShape.interaction(10, 26, 128, kind=DenseKind.CONCAT)
    assert (concat.forward_flops, concat.backward_flops, concat.output_width) == (0, 0, 27 * 128)
    sample = sample_of()
    assert sample.forward_flops_per_s == pytest.approx(TOP.forward_flops / 2e-3)
    assert sample.backward_flops_per_s == pytest.approx(TOP.backward_flops / 4e-3)


def test_a_square_perceptron_needs_params_six_operations_per_weight_less_the_data_gradient():
    # PARAM counts 2 per weight and sample forward and 4 backward, the first layer's inputs included.
    square = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=128, widths=(1024,) * 21)
    weights = 20 * 1024 * 1024
    assert square.forward_flops + square.backward_flops == 128 * (6 * weights - 2 * 1024 * 1024)
    assert square.num_parameters == weights + 20 * 1024


def test_a_models_dense_part_is_three_shapes():
    layers = DenseLayers(num_dense_features=13, bottom_mlp=(512, 256, 128), top_mlp=(1024, 1024, 512, 256, 1))
    bottom, dot, top = dense_shapes(layers, [128] * 26, 2048, DType.BF16)
    assert (bottom.kind, bottom.widths) == (DenseKind.BOTTOM_MLP, (13, 512, 256, 128))
    assert dot == DenseShape.interaction(2048, 26, 128, dtype=DType.BF16)
    assert (top.kind, top.widths) == (DenseKind.TOP_MLP, (479, 1024, 1024, 512, 256, 1))
    assert {shape.batch_size for shape in (bottom, dot, top)} == {2048}
    _, concat, top = dense_shapes(layers, [128, 64], 2048)
    assert (concat.kind, concat.widths, top.widths[0]) == (DenseKind.CONCAT, (128, 192), 320)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"dtype": DType.INT8}, "dtype"),
        ({"widths": (4,)}, "widths"),
        ({"widths": (4, 0, 1)}, "widths"),
        ({"widths": (4, 2)}, "widths"),
        ({"kind": DenseKind.DOT, "widths": (4, 8, 8)}, "widths"),
        ({"kind": DenseKind.DOT, "widths": (4, 10)}, "widths"),
    ],
)
def test_shapes_that_cannot_be_run_are_refused(changed, field):
    with pytest.raises(InvalidOptionError) as raised:
        replace(TOP, **changed)
    assert raised.value.field == field


def test_samples_of_the_first_version_know_their_machine_by_its_name(tmp_path):
    told = sample_of(core="amd-25-17-avx512", cache_bytes=2**25)
    assert (told.machine.core, told.machine.cache_bytes) == ("amd-25-17-avx512", 2**25)
    file = DENSE_SAMPLES.write(tmp_path, [sample_of()])
    (new,) = DENSE_SAMPLES.read_file(file)
    table = pq.read_table(file, partitioning=None).drop_columns(list(MACHINE_COLUMNS))
    pq.write_table(table.replace_schema_metadata({b"autoshard.schema": b"autoshard.dense-samples/1"}), file)
    assert DENSE_SAMPLES.read_file(file) == (new,)
    assert damaged_samples([new]) == ()
    assert new.machine == MeasuredMachine(
        device_name=new.device_name,
        torch_version=new.torch_version,
        fbgemm_version=getattr(new, "fbgemm_version", ""),
    )
