"""The benchmark of dense layers, on torch's own layers."""

import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autoshard.core import DenseLayers, DType
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape, dense_shapes
from autoshard.core.errors import DeviceError, FormatError, InvalidOptionError
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.hardware import this_processor
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.training.dense import DenseModel
from bench.collecting.dense import DenseLayersKind
from bench.dense.harness import DenseHarness, DenseSettings
from bench.dense.kernels import DenseKernel, kernel_bytes, runnable_dtypes
from bench.dense.report import dense_table, summarise_dense
from bench.dense.sampling import ChosenShape, choose_dense_shapes
from bench.measuring.attempts import mean_of
from bench.measuring.devices import find_device
from bench.measuring.timing import RoundSettings

CPU = torch.device("cpu")
LAYERS = DenseLayers(num_dense_features=5, bottom_mlp=(12, 8), top_mlp=(16, 6, 1))
BOTTOM = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=16, widths=(5, 12, 8))
TOP = DenseShape(kind=DenseKind.TOP_MLP, batch_size=16, widths=(29, 16, 1))
DOT = DenseShape.interaction(16, 6, 8)
CONCAT = DenseShape.interaction(16, 6, 8, kind=DenseKind.CONCAT)


@pytest.fixture(scope="module")
def settings():
    rounds = RoundSettings(num_warmup=0, num_measured=3, num_dropped=1, flush_every_run=False)
    # The flush has tests of its own; a small one keeps these quick.
    return DenseSettings(
        rounds=rounds, max_group_sets=3, max_bytes=2**26, cache_bytes=2**16, reference_batch=8, max_spread=1e9
    )


@pytest.fixture(scope="module")
def harness(settings):
    return DenseHarness(find_device("cpu"), settings)


def test_an_interaction_without_features_is_none():
    with pytest.raises(InvalidOptionError, match="widths"):
        dense_shapes(LAYERS, [], 7)


@pytest.mark.parametrize("feature_dims", [[8, 8, 8], [8, 4]])
def test_the_measured_parts_are_the_runtimes_model(feature_dims):
    model = DenseModel(LAYERS, feature_dims, seed=3)
    bottom, interaction, top = (DenseKernel(shape, CPU) for shape in dense_shapes(LAYERS, feature_dims, 7))
    bottom.module.load_state_dict(model.bottom.state_dict())
    top.module.load_state_dict(model.top.state_dict())
    dense_BN, pooled_BC = bottom.inputs[0], interaction.inputs[1]
    expected_B = model(model.bottom(dense_BN), pooled_BC)
    logits_B1 = top.module(interaction.module(bottom.module(dense_BN), pooled_BC))
    torch.testing.assert_close(logits_B1.squeeze(1), expected_B)

    # Each kernel's gradients, given the next one's, are those of the whole model.
    weight_B = torch.linspace(-1, 1, 7)
    wanted = [pooled_BC, *model.parameters()]
    expected = torch.autograd.grad(expected_B, wanted, weight_B)
    passed, top_gradients, bottom_gradients = chained(bottom, interaction, top, weight_B[:, None])
    for found, gradient in zip([passed, *bottom_gradients, *top_gradients], expected, strict=True):
        torch.testing.assert_close(found, gradient)


def chained(bottom, interaction, top, gradient_B1):
    """Gradients of the pooled embeddings, of the top's and of the bottom's parameters, one kernel after the other."""
    bottom_BD = bottom.forward()
    interaction.inputs[0].data = bottom_BD.detach()
    interacted_BC = interaction.forward()
    top.inputs[0].data = interacted_BC.detach()
    top.gradient_BD = gradient_B1
    input_gradient_BC, *top_gradients = top.gradients(top.forward())
    interaction.gradient_BD = input_gradient_BC
    bottom_gradient_BD, pooled_gradient_BC = interaction.gradients(interacted_BC)
    bottom.gradient_BD = bottom_gradient_BD
    return pooled_gradient_BC, top_gradients, bottom.gradients(bottom_BD)


@pytest.mark.parametrize("dtype", runnable_dtypes(CPU))
@pytest.mark.parametrize("shape", [BOTTOM, TOP, DOT, CONCAT])
def test_every_gradient_is_computed_and_none_is_zero(shape, dtype):
    kernel = DenseKernel(replace(shape, dtype=dtype), CPU)
    output_BD = kernel.forward()
    assert output_BD.shape == (16, shape.output_width)
    gradients = kernel.gradients(output_BD)
    num_inputs = {DenseKind.BOTTOM_MLP: 0, DenseKind.TOP_MLP: 1}.get(shape.kind, 2)
    assert sum(gradient.numel() for gradient in gradients[num_inputs:]) == shape.num_parameters
    assert [gradient.shape for gradient in gradients[:num_inputs]] == [one.shape for one in kernel.inputs[:num_inputs]]
    assert all(gradient.dtype == TORCH_DTYPES[dtype] for gradient in gradients)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_nothing_is_left_behind_by_a_run():
    kernel = DenseKernel(TOP, CPU)
    kernel.backward(kernel.forward())
    assert all(leaf.grad is None for leaf in (*kernel.inputs, *kernel.module.parameters()))


def test_twenty_layers_keep_the_size_of_their_values():
    kernel = DenseKernel(DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=64, widths=(128,) * 21), CPU)
    output_BD = kernel.forward()
    first_layer = kernel.gradients(output_BD)[0]
    # Torch's own initial weights would make this 1e-8, which is nothing in fp16.
    assert 1e-2 < output_BD.std() < 1e2
    assert 1e-3 < first_layer.std() < 1e3


@pytest.mark.parametrize("shape", [BOTTOM, TOP, DOT, CONCAT])
def test_operations_are_those_that_torch_counts(shape):
    kernel = DenseKernel(shape, CPU)
    with FlopCounterMode(display=False) as forward:
        output_BD = kernel.forward()
    with FlopCounterMode(display=False) as backward:
        kernel.backward(output_BD)
    assert forward.get_total_flops() == shape.forward_flops
    assert backward.get_total_flops() == shape.backward_flops


def test_the_seed_decides_weights_and_inputs():
    first, same, other = (DenseKernel(TOP, CPU, seed).forward() for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_cpu_runs_fp32_and_what_it_says():
    assert DType.FP32 in runnable_dtypes(CPU)
    assert set(runnable_dtypes(CPU)) <= set(DENSE_DTYPES)


def test_memory_is_not_underestimated():
    shape = DenseShape(kind=DenseKind.TOP_MLP, batch_size=256, widths=(300, 200, 1))
    kernel = DenseKernel(shape, CPU)
    held = [*kernel.inputs, *kernel.module.parameters(), kernel.gradient_BD]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        gradients = kernel.gradients(kernel.forward())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in (*held, *saved, *gradients)}
    assert sum(storages.values()) <= kernel_bytes(shape) <= 4 * sum(storages.values())


def test_shapes_are_measured_in_order_and_in_groups(harness):
    shapes = [BOTTOM, TOP, DOT, CONCAT, replace(BOTTOM, batch_size=32)]
    groups, before = [], harness.num_groups
    measured = harness.measure(shapes, advance=groups.append)
    assert sum(groups) == pytest.approx(5)
    assert harness.num_groups - before == 2
    assert [one.shape for one in measured] == shapes
    for one in measured:
        assert min(one.forward_ms, one.backward_ms, one.reference_forward_ms, one.reference_backward_ms) > 0
        assert np.isfinite(one.spread)
        assert (one.num_rounds, one.num_attempts, one.is_noisy) == (3, 1, False)
        assert (one.sm_clock_mhz, one.throttle_reasons) == (0.0, "")  # a CPU tells neither


def test_what_spreads_too_much_is_measured_again_averaged_and_marked(settings, monkeypatch):
    strict = DenseHarness(find_device("cpu"), replace(settings, max_spread=0.0))
    means = []

    def watched(attempts, max_spread):
        means.append((list(attempts), mean_of(attempts, max_spread)))
        return means[-1][1]

    monkeypatch.setattr("bench.measuring.rounds.mean_of", watched)
    (measured,) = strict.measure([TOP])
    attempts, mean = means[-1]
    assert measured == mean
    assert (measured.num_attempts, measured.is_noisy) == (len(attempts), True) == (2, True)


@pytest.mark.parametrize(
    "shape",
    [
        DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=4096, widths=(4096,) * 21),  # memory
        DenseShape(kind=DenseKind.DOT, batch_size=1, widths=(1, 3000)),  # memory, of the pairs
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape, harness):
    assert not harness.can_measure(shape)
    with pytest.raises(DeviceError, match="at batch"):
        harness.measure([shape])


def test_shapes_that_take_too_long_are_refused(settings):
    harness = DenseHarness(find_device("cpu"), replace(settings, max_bytes=2**34, max_run_seconds=1e-4))
    assert harness.can_measure(replace(DOT, batch_size=1))
    assert not harness.can_measure(DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=4096, widths=(1024,) * 21))


def test_without_memory_for_the_reference_nothing_is_measured(settings):
    with pytest.raises(DeviceError, match="the benchmark may fill 1,024"):
        DenseHarness(find_device("cpu"), replace(settings, max_bytes=1024))


def test_the_same_seed_chooses_the_same_shapes():
    first, same = (list(islice(choose_dense_shapes(seed=7), 50)) for _ in range(2))
    assert first == same
    assert first != list(islice(choose_dense_shapes(seed=8), 50))
    with pytest.raises(InvalidOptionError, match="dtypes"):
        choose_dense_shapes(seed=0, dtypes=())


def test_the_choice_holds_the_published_shapes_and_others():
    chosen = list(islice(choose_dense_shapes(seed=0), 2000))
    sources = Counter(one.source for one in chosen)
    assert set(sources) == {"square", "model", "pyramid", "interaction", "repeat"}
    assert sources["repeat"] == 2000 // 32
    shapes = {replace(one.shape, dtype=DType.FP32) for one in chosen}
    assert {one.shape.dtype for one in chosen} == set(DENSE_DTYPES)
    # Neo's Appendix A: 20 layers of 1K, 2K and 4K.
    squares = {(s.widths[0], s.batch_size) for s in shapes if s.widths == (s.widths[0],) * 21}
    assert {width for width, _ in squares} >= {1024, 2048, 4096}
    # MLPerf's DLRM.
    widths = {(shape.kind, shape.widths) for shape in shapes}
    assert (DenseKind.BOTTOM_MLP, (13, 512, 256, 128)) in widths
    assert (DenseKind.TOP_MLP, (479, 1024, 1024, 512, 256, 1)) in widths
    assert (DenseKind.DOT, (128, 26 * 128)) in widths
    seen = set()
    for one in chosen:
        if one.source == "repeat":
            assert one.shape in seen
        seen.add(one.shape)


def chosen_of(*shapes, source="model"):
    return iter([ChosenShape(shape=shape, source=source) for shape in shapes])


def test_collected_samples_are_read_back(harness, tmp_path):
    told = []
    too_large = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=4096, widths=(4096,) * 21)
    done = DenseLayersKind.collect(
        harness,
        chosen_of(BOTTOM, too_large, TOP, DOT, TOP, CONCAT),
        tmp_path,
        advance=lambda count, _: told.append(count),
    )
    assert (done.added, done.failed, done.skipped) == ({"model": 4}, {"model": 1}, {"model": 1})
    assert done.reasons == ("not run by the device, or not in the time or memory there is",)
    assert done.num_noisy == 0
    assert told == [1] * 4
    samples = DENSE_SAMPLES.read(tmp_path)
    assert [sample.shape for sample in samples] == [BOTTOM, TOP, DOT, CONCAT]
    assert len(done.files) == 1
    assert damaged_samples(samples) == ()
    assert all(sample.forward_flops_per_s > 0 for sample in samples if sample.shape.kind != DenseKind.CONCAT)
    assert {(sample.device, sample.source, sample.num_threads) for sample in samples} == {("cpu", "model", 1)}
    assert all(sample.machine.is_like(this_processor()) and sample.memory_bytes_per_s > 0 for sample in samples)


def test_a_second_run_adds_what_is_new_and_repeats_when_told(harness, tmp_path):
    DenseLayersKind.collect(harness, chosen_of(BOTTOM, TOP), tmp_path)
    again = DenseLayersKind.collect(harness, chosen_of(TOP, DOT), tmp_path)
    assert (again.num_samples, again.skipped) == (1, {"model": 1})
    repeated = DenseLayersKind.collect(harness, chosen_of(TOP, source="repeat"), tmp_path)
    assert (repeated.num_samples, repeated.skipped) == (1, {})
    samples = DENSE_SAMPLES.read(tmp_path)
    assert Counter(sample.shape for sample in samples) == {BOTTOM: 1, TOP: 2, DOT: 1}


def test_a_limit_and_a_time_end_the_run(harness, tmp_path):
    shapes = choose_dense_shapes(seed=1, dtypes=[DType.FP32])
    assert DenseLayersKind.collect(harness, shapes, tmp_path, num_samples=4).num_samples == 4
    done = DenseLayersKind.collect(harness, shapes, tmp_path, seconds=0.0)
    assert 1 <= done.num_samples <= harness.settings.max_group_sets  # the first group only


def test_a_store_of_another_version_is_refused_before_anything_is_measured(harness, tmp_path):
    folder = tmp_path / "dense" / "device=cpu"
    folder.mkdir(parents=True)
    (folder / "part-0.parquet").write_bytes(b"no Parquet")
    with pytest.raises(FormatError, match="is no Parquet file"):
        DenseLayersKind.collect(harness, chosen_of(TOP), tmp_path)


@pytest.mark.slow
def test_a_killed_run_leaves_whole_files(tmp_path):
    script = f"""
import sys
from pathlib import Path
from statistics import median
from bench.dense.harness import DenseHarness, DenseSettings
from bench.collecting.dense import DenseLayersKind
from bench.dense.sampling import choose_dense_shapes
from bench.measuring.devices import find_device
settings = DenseSettings(max_group_sets=1, max_bytes=2**26, cache_bytes=2**16, reference_batch=8)
harness = DenseHarness(find_device("cpu"), settings)
DenseLayersKind.collect(harness, choose_dense_shapes(seed=0), Path({str(tmp_path)!r}), seconds_per_file=0.0)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("part-*.parquet"))) < 2:
            assert process.poll() is None, "the collector ended by itself"
            assert time.monotonic() < deadline, "the collector has not written in time"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    samples = DENSE_SAMPLES.read(tmp_path)
    assert len(samples) >= 2
    assert damaged_samples(samples) == ()


def test_the_report_groups_by_part_and_format(harness, tmp_path):
    DenseLayersKind.collect(harness, chosen_of(BOTTOM, TOP, replace(TOP, batch_size=64), CONCAT), tmp_path)
    samples = DENSE_SAMPLES.read(tmp_path)
    summaries = {summary.kind: summary for summary in summarise_dense(samples)}
    assert list(summaries) == ["bottom_mlp", "concat", "top_mlp"]
    assert (summaries["top_mlp"].num_samples, summaries["top_mlp"].batch_sizes) == (2, (16, 64))
    assert summaries["concat"].forward_gflops_per_s == (0, 0)
    best = max(sample.forward_flops_per_s for sample in samples if sample.shape.kind == DenseKind.TOP_MLP)
    assert summaries["top_mlp"].forward_gflops_per_s[1] == pytest.approx(best / 1e9)
    assert len(dense_table(samples).rows) == 3


@pytest.mark.slow
def test_a_device_runs_all_its_formats(tmp_path, any_device):
    harness = DenseHarness(find_device(any_device))
    on_cuda = any_device == "cuda"
    assert set(harness.dtypes) == set(DENSE_DTYPES) or not on_cuda
    size = 4096 if on_cuda else 64
    shapes = [
        replace(shape, dtype=dtype, batch_size=size) for shape in (BOTTOM, TOP, DOT, CONCAT) for dtype in harness.dtypes
    ]
    done = DenseLayersKind.collect(harness, chosen_of(*shapes), tmp_path)
    assert done.num_samples == len(shapes)
    assert all((sample.sm_clock_mhz > 0) == on_cuda for sample in DENSE_SAMPLES.read(tmp_path))
