"""Runs commands in children of a fork server, and says what of the command line's contract each of them broke."""

import base64
import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.core import errors
from costmodel.registry.versions import REGISTRY_VARIABLE
from tests.fuzz.fork_server import ERR, OUT

#: A command that has not answered by then is taken to hang.
TIMEOUT_S = 20
MOST_BYTES = 1 << 30
LONGEST_ERROR = 2000
DONE, OTHER, BAD_INPUT, INFEASIBLE = 0, 1, 2, 3

#: Errors that are nobody's bad input; the last is of a service that is not there.
OTHER_ERRORS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and getattr(kind, "exit_code", 0) == OTHER
} - {"AutoshardError"} | {"ServiceError"}
#: All but line feeds and tabs: C0, DEL, C1, line separators, and what turns the direction of writing.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Words of one digit are in every message.
_DIGITS = string.digits + " "
_WARNING = re.compile(r"^\S*:\d+: \w*Warning: ", re.MULTILINE)


#: Characters that are shown of an argument and of a case: some are as long as a command line may be.
_LONGEST_SHOWN, _LONGEST_CASE = 200, 4_000


@dataclass(frozen=True)
class Case:
    """A command with the files that it finds.

    Attributes:
        arguments: Of the command line.
        files: By path below the folder that it runs in; they replace those of `needs`.
        needs: Files and folders of the valid examples that it also finds.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def __repr__(self):
        arguments = ", ".join(repr(argument[:_LONGEST_SHOWN]) for argument in self.arguments)
        return f"Case(({arguments}), {sorted(self.files)})"[:_LONGEST_CASE]

    def _repr_pretty_(self, printer, _):
        # What hypothesis shows; it would print all of every field otherwise.
        printer.text(repr(self))

    def to_json(self):
        files = {name: _content_to_json(content) for name, content in self.files.items()}
        return {"arguments": list(self.arguments), "needs": list(self.needs), "files": files}

    @classmethod
    def from_json(cls, document):
        files = {
            name: base64.b64decode(content["base64"]) if "base64" in content else content["text"].encode()
            for name, content in document["files"].items()
        }
        return cls(arguments=tuple(document["arguments"]), files=files, needs=tuple(document["needs"]))


def _content_to_json(content):
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


@dataclass(frozen=True)
class Outcome:
    code: int
    error: str | None
    """Name of the exception that the command line turned into its message."""
    out: str
    err: str
    peak_bytes: int
    seconds: float
    is_hanging: bool


#: Parts of arguments that say that a command will import torch.
HEAVY_COMMANDS = ("train", "calibrate", "collect", "replay", "run")
HEAVY_PLANNERS = ("auto", "policy")


class ForkServer:
    """Fork servers, started when they are needed, and the folder that their commands run in.

    Args:
        folder: Where commands run.
        examples: Folder of the valid examples.
    """

    def __init__(self, folder, examples):
        self._folder, self._examples = folder, examples
        self._processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.stdin.close()
            process.stdout.close()
            process.wait(TIMEOUT_S)

    def _process_for(self, case):
        command, *others = case.arguments
        is_heavy = command in HEAVY_COMMANDS or any(name in part for part in others for name in HEAVY_PLANNERS)
        if is_heavy not in self._processes:
            self._processes[is_heavy] = self._started(["--heavy"] if is_heavy else [])
        return self._processes[is_heavy]

    def _started(self, options):
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        # One of Arrow's allocators starts a thread, which a fork would lose.
        environment = {**os.environ, **single, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        environment |= {"HOME": str(self._folder / "home"), "TERM": "dumb", "PYTHONUTF8": "1"}
        environment[REGISTRY_VARIABLE] = str(self._folder / "home" / "registry")
        command = [sys.executable, "-P", Path(__file__).with_name("fork_server.py"), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, case, prepare):
        """The outcome of a case; `prepare` makes in its folder what no file's content says, such as a pipe."""
        folder = self._folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in case.needs:
            source = self._examples / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, folder / name)
        for name, content in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        prepare(case, folder)
        request = {"arguments": list(case.arguments), "folder": str(folder), "timeout_s": TIMEOUT_S}
        process = self._process_for(case)
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        # As the terminal gets it: bytes that are no UTF-8 would be a fault of their own.
        out, err = ((folder / name).read_bytes().decode("utf-8", "surrogateescape") for name in (OUT, ERR))
        return Outcome(out=out, err=err, **answer)


def faults(case, outcome):
    """What of the contract an outcome breaks, in words; empty if nothing."""
    return [*_process_faults(outcome), *_output_faults(case, outcome), *_error_faults(case, outcome)]


def _process_faults(outcome):
    if outcome.is_hanging:
        yield f"no answer after {TIMEOUT_S} s"
    elif outcome.code not in (DONE, OTHER, BAD_INPUT, INFEASIBLE):
        yield f"exit code {outcome.code}"
    if outcome.peak_bytes > MOST_BYTES:
        yield f"{outcome.peak_bytes >> 20} MiB of memory"


def _output_faults(case, outcome):
    for name, text in (("standard output", outcome.out), ("standard error", outcome.err)):
        if "Traceback" in text or _WARNING.search(text):
            yield f"a traceback or a warning of Python's on {name}"
        found = CONTROL.search(text) or re.search("[\ud800-\udfff]", text)
        if found:
            yield f"{found.group()!r} on {name}"
    if outcome.code == DONE and "--json" in case.arguments and "--help" not in case.arguments:
        try:
            document = json.loads(outcome.out, parse_constant=lambda name: {}[name])
        except (ValueError, KeyError) as error:
            yield f"standard output is not one JSON document: {error!r}"
        else:
            if not isinstance(document, dict):
                yield "standard output is no JSON object"


def _error_faults(case, outcome):
    lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if outcome.code == DONE:
        if lines:
            yield "an error, and exit code 0"
        return
    if outcome.is_hanging or outcome.code not in (OTHER, BAD_INPUT, INFEASIBLE):
        return
    if outcome.out and outcome.code != INFEASIBLE:  # `simulate` prints the points that have no plan, and why
        yield "a failure that printed on standard output"
    # Warnings and what was done may come before them; a file has a line for each of its faults.
    if not lines or not outcome.err.endswith("".join(f"{line}\n" for line in lines)):
        yield "standard error does not end with lines that begin with `error: `"
        return
    if (longest := max(map(len, lines))) > LONGEST_ERROR:
        yield f"an error of {longest} characters"
    if outcome.code == OTHER and outcome.error not in OTHER_ERRORS:
        yield f"exit code 1 for {outcome.error}"
    if outcome.code == BAD_INPUT and not _names_something(case, lines[0]):
        yield "an error that names neither a file nor an option"


def _names_something(case, line):
    """Whether a message has a path or an option of the command line, the help to look at, or a dotted field."""
    files = {part for name in (*case.files, *case.needs) for part in (name, Path(name).name)}
    options = {argument.partition("=")[0].lstrip("-") for argument in case.arguments if argument.startswith("--")}
    if any(not argument.strip() for argument in case.arguments):
        return True  # what is nothing to look at cannot be found in a message
    told = {form for word in {*files, *options, *case.arguments} if word.strip(_DIGITS) for form in _as_printed(word)}
    return any(word in line for word in told) or re.search(r"^error: [\w.\[\]-]+: |--help\)$", line) is not None


def _as_printed(word):
    """The beginning of a word as a message may have it: with spaces joined, with escapes, or as Python's repr."""
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in word)
    return {form[:40] for form in (" ".join(word.split()), escaped, repr(word)[1:-1]) if form}
