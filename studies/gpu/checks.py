"""Stage `tests`: the tests that need a GPU, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from autoshard.report.images import NumberTable, Section
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

_ROOT: Final = Path(__file__).parents[2]
_TAIL: Final = 4_000
_COUNT: Final = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


def _run(visit: Visit) -> Numbers:
    if not visit.device.is_cuda:
        return {"counts": {}, "failed": [], "reason": "the tests need a GPU"}
    if not (_ROOT / "tests").is_dir():
        return {"counts": {}, "failed": [], "reason": "the tests are not part of this installation"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider", "tests"]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=0.95 * visit.seconds_left, check=False
        )
        text, reason = done.stdout, ""
    except subprocess.TimeoutExpired as error:
        text, reason = (error.stdout or b"").decode(errors="replace"), "the time was up"
    return {
        "counts": {kind: int(number) for number, kind in _COUNT.findall(text)},
        "failed": re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE),
        "reason": reason,
        "tail": text[-_TAIL:],
    }


def _show(numbers: Numbers) -> Sequence[Section]:
    if not numbers["counts"]:
        return ()
    counts = NumberTable(
        columns=("tests", "number"),
        lines=tuple((kind, str(number)) for kind, number in numbers["counts"].items()),
        caption="Tests that need a GPU",
    )
    caption = "; ".join(numbers["failed"]) or "None failed."
    return (Section(title="Tests", caption=caption, tables=(counts,)),)


def _headline(numbers: Numbers) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in numbers["counts"].items())
    return counts or str(numbers["reason"])


STAGE: Final = Stage(name="tests", share=0.12, run=_run, show=_show, headline=_headline)
