"""Generated bad input of every kind: no traceback, no hang, little memory, an error in one line, and its exit code.

Dozens of cases by default, and 2,000 others with `pytest -m slow tests/fuzz`, the same ones every time.
AUTOSHARD_FUZZ_CASES sets another number, and AUTOSHARD_FUZZ_SEED another seed; `random` draws one, and prints it. A
case that fails is made as small as it gets, and written to a file: in `tests/fuzz/corpus` it is a test from then on.
"""

import json
import os
import random
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.command_lines import LONG, all_commands, place_oddities
from tests.fuzz.examples import EVERYTHING
from tests.fuzz.harness import DONE, Case, faults
from tests.fuzz.oddities import KINDS
from tests.fuzz.targets import READERS, all_targets

NUM_CASES, NUM_CASES_SLOW = 24, 2_000
#: Targets are dealt to as many tests, which may run side by side.
NUM_PARTS = 4
#: Commands that execute plans: they are given an option that is at fault.
EXECUTING = ("run", "replay")
CORPUS = Path(__file__).with_name("corpus")


@pytest.fixture
def run(fork_server, tmp_path):
    """Runs a case; returns its outcome and what of the contract it breaks, and keeps the case if it breaks any."""

    def run(case):
        outcome = fork_server.run(case, place_oddities)
        found = faults(case, outcome)
        if found:
            file = tmp_path / "case.json"
            file.write_text(json.dumps(case.to_json(), indent=1), encoding="utf-8")
            found.append(f"exit code {outcome.code}, {outcome.error}; {outcome.err[-2000:]!r}; the case is in {file}")
        return outcome, found

    return run


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_generated_cases(part, examples, run):
    check_generated(run, all_targets(examples), part, NUM_CASES, None)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_generated_cases(part, examples, run):
    wanted = os.environ.get("AUTOSHARD_FUZZ_SEED", "1")
    number = random.SystemRandom().getrandbits(32) if wanted == "random" else int(wanted)
    print(f"AUTOSHARD_FUZZ_SEED={number}")
    num_cases = int(os.environ.get("AUTOSHARD_FUZZ_CASES", NUM_CASES_SLOW))
    check_generated(run, all_targets(examples), part, num_cases, number)


def check_generated(run, targets, part, num_cases, number):
    """Shares a number of cases among targets, at least one each, and checks those of one part of the targets."""
    targets = list(targets)
    total = sum(target.share for target in targets)
    for target in targets[part::NUM_PARTS]:
        share = max(1, round(num_cases * target.share / total))

        @settings(
            max_examples=share, derandomize=number is None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=target.cases)
        def check(case):
            _, found = run(case)
            assert not found, found

        (check if number is None else seed(number)(check))()


@pytest.mark.parametrize("one_in", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_cases(kind, one_in, examples, run):
    failed = {}
    for name, case, *codes in KINDS[kind](examples):
        if crc32(name.encode("utf-8", "surrogatepass")) % one_in:
            continue
        outcome, found = run(case)
        if outcome.code not in codes and not found:
            found = [f"exit code {outcome.code}, expected {codes}: {outcome.err[-500:]!r}"]
        if found:
            failed[name] = found
    assert not failed, "\n".join(f"{name}: {found}" for name, found in failed.items())


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.json")), ids=lambda file: file.stem)
def test_cases_that_failed_once(file, run):
    _, found = run(Case.from_json(json.loads(file.read_text(encoding="utf-8"))))
    assert not found, found


@pytest.mark.parametrize("readers", READERS)
def test_examples_are_valid(readers, run):
    """Else all that is made of them would be refused for the same reason."""
    for arguments in READERS[readers]:
        if arguments[0] not in EXECUTING:
            outcome, found = run(Case(arguments=arguments, needs=EVERYTHING))
            assert (outcome.code, found) == (DONE, []), (arguments, outcome)


def test_every_command_is_drawn():
    paths = {command.path for command in all_commands()}
    assert {("plan",), ("import",), ("models",)} < paths
    assert paths > LONG
