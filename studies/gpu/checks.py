"""Stage `tests`: the tests that need a GPU, in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from autoshard.core.errors import DeviceError
from autoshard.report.images import Section
from autoshard.table import Table
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

_ROOT: Final = Path(__file__).parents[2]
_TAIL: Final = 4_000
#: A line for each test as it ends, so that a run which is cut tells of those before.
_ENDED: Final = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def _run(visit: Visit) -> Numbers:
    if not visit.device.is_cuda:
        return {"counts": {}, "failed": [], "reason": "the tests need a GPU"}
    if not (_ROOT / "tests").is_dir():
        return {"counts": {}, "failed": [], "reason": "the tests are not part of this installation"}
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", *_files()]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=0.95 * visit.seconds_left, check=False
        )
        text, reason = done.stdout, ""
        if not _ENDED.search(text):
            raise DeviceError(f"pytest ended with {done.returncode}: {(done.stderr or text).strip()[-_TAIL:]}")
    except subprocess.TimeoutExpired as error:
        text, reason = (error.stdout or b"").decode(errors="replace"), "the time was up"
    return {
        "counts": dict(Counter(state.lower() for _, state in _ENDED.findall(text))),
        "failed": [test for test, state in _ENDED.findall(text) if state in ("FAILED", "ERROR")],
        "reason": reason,
        "tail": text[-_TAIL:],
    }


def _files() -> list[str]:
    """Files with tests of a GPU; others may need packages that a machine for measuring lacks."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [str(path.relative_to(_ROOT)) for path, text in texts.items() if "mark.gpu" in text or "any_device" in text]


def _show(numbers: Numbers) -> Sequence[Section]:
    if not numbers["counts"]:
        return ()
    counts = Table(
        columns=("tests", "number"),
        rows=tuple((kind, str(number)) for kind, number in numbers["counts"].items()),
        caption="Tests that need a GPU",
    )
    caption = "; ".join(numbers["failed"]) or "None failed."
    return (Section(title="Tests", caption=caption, tables=(counts,)),)


def _headline(numbers: Numbers) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in numbers["counts"].items())
    return counts or str(numbers["reason"])


STAGE: Final = Stage(name="tests", share=0.12, run=_run, show=_show, headline=_headline)
