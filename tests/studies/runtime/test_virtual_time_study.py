"""Virtual time against the wall: what runs are summed up to, and a real comparison where namespaces can be made."""

import json

import pytest

from autoshard.core.errors import DeviceError, InvalidOptionError
from autoshard.core.step import StepPart
from studies.__main__ import main
from studies.cluster.network import check_support
from studies.runtime.virtual_time import (
    Compared,
    Repeated,
    Timed,
    VirtualTimeOptions,
    _checks,
    _even_plan,
    _parts_table,
    _plans_table,
    _summary,
)


def timed(step_ms, *waits_ms, part_ms=1.0):
    parts = {part.value: part_ms for part in StepPart}
    return Timed(step_ms=step_ms, parts=parts, waits_ms=waits_ms or ({"input": 1.0}, {"input": 3.0}))


def compared(real, virtual, overlap="none", rate=200.0):
    return Compared(
        label="table-wise",
        overlap=overlap,
        mbit_per_s=rate,
        num_tables=20,
        batch_size=64,
        real=tuple(map(timed, real)),
        virtual=timed(virtual, part_ms=2.0),
    )


@pytest.mark.smoke
def test_virtual_steps_are_compared_with_the_mean_of_real_ones():
    one = compared((10.0, 12.0), 9.9)
    assert (one.error, one.noise) == (pytest.approx(-0.1), pytest.approx(0.2))
    assert one.part_error(StepPart.INPUT) == pytest.approx(1 / 11)
    found = [one, compared((20.0, 20.0), 21.0, "pipelined"), compared((5.0, 5.0), 5.0, rate=1000.0)]
    lines = {line[0]: line for line in _summary(found).lines}
    assert lines["all"][1:4] == ("3", "+0.0%", "5.0%")
    assert lines["200 Mbit/s"][1] == "2"
    assert lines["pipelined"][5] == "100%"
    assert len(_parts_table(found).lines) == len(StepPart)
    assert [line[-1] for line in _plans_table(found).lines] == ["-10.0%", "+5.0%", "+0.0%"]


@pytest.mark.smoke
def test_what_a_step_has_beside_work_and_wire_is_told():
    run = timed(10.0, {"input": 1.0, "all_reduce": 2.0}, {"input": 3.0, "all_reduce": 0.5})
    assert run.computed_ms == [7.0, 6.5]
    assert run.unexplained_ms == pytest.approx(10.0 - 7.0 - 1.0 - 0.5)
    slowed = Repeated(runs=(timed(10.0), timed(20.5), timed(11.0), timed(20.0)), labels=("as it is", "slowed") * 2)
    tokens = Repeated(runs=(timed(10.0), timed(9.5)), labels=("1 core", "2 cores"))
    table = _checks({4: Repeated(runs=(run,), labels=("first",))}, slowed, tokens)
    assert [line[0] for line in table.lines] == [
        "4 ranks alike",
        "one of 4 ranks with 10 ms more work",
        "4 ranks on 1 core and on 2",
    ]
    assert "slowed by 10.50, 9.00 ms" in table.lines[1][1]
    assert table.lines[2][1].endswith("+5.3%")


@pytest.mark.smoke
def test_ranks_that_are_alike_hold_equal_tables():
    plan = _even_plan(VirtualTimeOptions(), 4)
    assert len(plan.tables.tables) == 16
    assert len({(one.num_embeddings, one.embedding_dim) for one in plan.tables.tables}) == 1
    assert [len(shards) for shards in plan.local_shards()] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("field", "options"),
    [("--rates", {"rates": "fast"}), ("--ranks", {"ranks": "x"}), ("--overlaps", {"overlaps": "neo"})],
)
def test_options_that_make_no_sense_are_named(field, options):
    with pytest.raises(InvalidOptionError) as caught:
        VirtualTimeOptions(**options)
    assert caught.value.field == field


@pytest.mark.slow
def test_a_few_plans_are_compared(tmp_path, capsys):
    try:
        check_support()
    except DeviceError as error:
        pytest.skip(str(error))
    words = ["virtual-time", "--parts", str(tmp_path / "parts"), "--plans", "2", "--rates", "1000", "--per-launch", "2"]
    words += ["--rounds", "1", "--steps", "3", "--overlaps", "none", "--max-tables", "20", "--ranks", "2"]
    assert main([*words, "-o", str(tmp_path), "--no-images", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["plans"]) == 2
    assert all(abs(one["error"]) < 1 for one in document["plans"])
    assert main([*words, "--json"]) == 0  # from its parts
