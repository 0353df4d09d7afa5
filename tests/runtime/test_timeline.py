"""When steps' parts began and ended on all ranks, as a Chrome trace."""

import pytest
import torch

from autoshard.core.step import StepCollective
from autoshard.runtime.timeline import chrome_trace, rank_steps
from autoshard.runtime.timing import Part, Span, StepTimer, Timings


class SetClock:
    """A clock that is set by hand."""

    def __init__(self):
        self.at_s = 5.0

    def now_s(self):
        return self.at_s

    worked_s = now_s


def steps_of(*came_s):
    """Steps of a rank that comes to its all-reduces at these seconds; each ends at second 9 and is waited for."""
    awaited = [(StepCollective.ALL_REDUCE, Span(at, 9.0), Span(at + 0.5, 9.0)) for at in came_s]
    spans = [(Part.FORWARD_KERNEL, Span(5.5, 6.0))]
    return rank_steps([(Span(5.0, 10.0), Timings(spans, awaited))])


def test_a_timer_reads_the_clock_that_it_is_given():
    clock = SetClock()
    timer = StepTimer(torch.device("cpu"), clock=clock)
    with timer.measure(Part.INPUT, StepCollective.INPUT):
        clock.at_s += 0.25
    assert timer.take().parts[Part.INPUT] == pytest.approx(250.0)


def test_a_trace_has_a_process_for_each_rank_and_says_who_came_last():
    trace = chrome_trace([steps_of(6.0, 8.0), steps_of(7.0, 7.5)])
    events = trace["traceEvents"]
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert len(named) == 8
    timed = [one for one in events if one["ph"] == "X"]
    assert min(one["ts"] for one in timed) == 0.0
    kernel = next(one for one in timed if one["name"] == "forward_kernel")
    assert (kernel["ts"], kernel["dur"]) == (pytest.approx(0.5e6), pytest.approx(0.5e6))
    collectives = [one for one in timed if named[one["pid"], one["tid"]] == "collectives"]
    assert [(one["pid"], one["args"]["last_rank"], one["args"]["later_ms"]) for one in collectives] == [
        (0, 1, pytest.approx(1000.0)),
        (0, 0, pytest.approx(0.0)),
        (1, 1, pytest.approx(0.0)),
        (1, 0, pytest.approx(500.0)),
    ]
    waits = [one for one in timed if named[one["pid"], one["tid"]] == "waits"]
    assert [one["dur"] for one in waits] == pytest.approx([2.5e6, 0.5e6, 1.5e6, 1.0e6])


def test_collectives_that_not_all_ranks_take_part_in_have_no_last_rank():
    trace = chrome_trace([steps_of(6.0, 8.0), steps_of(7.0)])
    assert not any(one["args"] for one in trace["traceEvents"] if one["ph"] == "X")


def test_a_trace_of_no_steps_is_one():
    assert [one["ph"] for one in chrome_trace([[], []])["traceEvents"]] == ["M"] * 10
