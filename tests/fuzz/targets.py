"""What is fuzzed: for each file that autoshard reads, faulty versions of it and the commands that read it."""

import gzip
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from autoshard.core.errors import AutoshardError
from autoshard.formats.stores.samples import KERNEL_SAMPLES
from tests.fuzz.command_lines import all_commands, command_lines
from tests.fuzz.harness import Case
from tests.fuzz.mutations import archives, json_texts, parquets, spoilt, weights, written_texts, yaml_texts

PLAN = ("plan", "tables.json", "--topology", "topology.json", "--time-limit", "0.01")
TRAIN = ("--registry", "registry", "--updates", "1")
#: Commands that read a file, by the file; the first is drawn more often, for it takes the shortest.
READERS = {
    "tables.json": (
        ("import", "tables.json", "-o", "out.json", "--json"),
        (*PLAN, "--planner", "cost-greedy", "--json"),
        (*PLAN, "--planner", "flexshard"),
        (*PLAN, "--planner", "oper"),
        (*PLAN, "--planner", "auto"),
        (*PLAN, "--planner", "neo", "--json"),
        ("compare", *PLAN[1:], "--planners", "random,replica-groups,karmarkar-karp"),
        ("simulate", "tables.json", "--ranks", "2", "--batches", "2", "--time-limit", "0.01", "--json"),
        ("import", "tables.json", "-o", "out.json", "--scale", "3"),
    ),
    "topology.json": (
        (*PLAN, "--planner", "random", "--json"),
        (*PLAN, "--planner", "neo"),
        (*PLAN, "--planner", "oper"),
        (*PLAN, "--planner", "auto"),
        ("compare", *PLAN[1:], "--planners", "cost-greedy,replica-groups", "--json"),
        ("simulate", "tables.json", "--topology", "topology.json", "--ranks", "4", "--batches", "2", "--json"),
    ),
    "plan.json": (
        ("show", "plan.json", "--json"),
        ("evaluate", "plan.json"),
        ("evaluate", "plan.json", "-o", "out.json", "--json"),
        ("explain", "plan.json", "--json"),
        ("explain", "plan.json"),
        ("diff", "plan.json", "plan.json"),
        ("show", "plan.json", "--html", "out.html"),
        ("run", "plan.json", "--nproc", "3"),
        ("replay", "plan.json", "--device", "cuda"),
    ),
    "tables.yaml": (
        ("import", "tables.yaml", "-o", "out.json", "--json"),
        ("plan", "tables.yaml", *PLAN[2:], "--planner", "cost-greedy", "--json"),
    ),
    "topology.yaml": (("plan", "tables.json", "--topology", "topology.yaml", *PLAN[4:], "--planner", "random"),),
    "list.csv": (("import", "list.csv", "-o", "out.json", "--json"),),
    "hugectr.json": (("import", "hugectr.json", "-o", "out.json", "--json"),),
    "models.py": (
        ("import", "models.py:tiny", "-o", "out.json", "--json"),
        ("import", "models.py", "-o", "out.json"),
    ),
    "dlrm.sh": (("import", "dlrm.sh", "--format", "dlrm-command", "-o", "out.json", "--json"),),
    "plan.pt": (
        ("evaluate", "plan.pt", "--tables", "tables.json", "--topology", "topology.json", "--json"),
        ("evaluate", "plan.pt", "--tables", "tables.json", "--topology", "topology.json", "-o", "out.json"),
    ),
    "replay.json": (("show", "plan.json", "--replayed", "replay.json"),),
    "tbe.json": (("import", "tbe.json", "-o", "out.json", "--json"),),
    "counts.parquet": (
        ("import", "tables.json", "-o", "out.json"),
        ("import", "counts.parquet", "--format", "row-counts", "--set", "num_samples=9", "-o", "out.json", "--json"),
    ),
    "ids.parquet": (("import", "ids.parquet", "-o", "out.json", "--json"),),
    "ids.pt": (("import", "ids.pt", "-o", "out.json"),),
    "batch.pt": (("import", "batch.pt", "-o", "out.json"),),
    "batch.pt.gz": (("import", "batch.pt.gz", "-o", "out.json"),),
    "store": (("samples", "store"), ("samples", "store", "--json"), ("train", "cost", "--store", "store", *TRAIN)),
    "store/dense": (("train", "step", "--store", "store", "--registry", "registry"), ("samples", "store")),
    "store/collectives": (("train", "step", "--store", "store", "--registry", "registry"), ("samples", "store")),
    "registry": (
        ("models", "--registry", "registry", "--json"),
        (*PLAN, "--planner", "cost-greedy", "--registry", "registry", "--json"),
        (*PLAN, "--planner", "cost-greedy", "--registry", "registry"),
        ("explain", "plan.json", "--registry", "registry"),
        ("simulate", "tables.json", "--topology", "topology.json", "--ranks", "4", "--registry", "registry", "--json"),
    ),
    "registry/policy": (
        (*PLAN, "--planner", "policy", "--registry", "registry", "--json"),
        ("models", "--registry", "registry"),
    ),
}
MODELS = ("cost", "dense", "collective", "step", "policy")


#: What commands need besides the file that is at fault.
NEEDED = ("tables.json", "topology.json", "plan.json", "counts.parquet")


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        name: Of the file, of the part of the registry, or of the command.
        share: Of all cases, relative to the other targets.
        cases: Strategy of them.
    """

    name: str
    share: float
    cases: st.SearchStrategy[Case]


def all_targets(examples):
    """Everything that is fuzzed.

    Args:
        examples: Folder of the valid examples.
    """
    documents = {"tables.json": 8.0, "topology.json": 5.0, "plan.json": 8.0, "flex.json": 3.0, "replay.json": 1.0}
    for name, share in {**documents, "tbe.json": 2.0, "hugectr.json": 2.0}.items():
        document = json.loads((examples / name).read_text(encoding="utf-8"))
        yield _file(name, share, json_texts(document))
    for name in ("tables", "topology"):
        yield _file(f"{name}.yaml", 2.0, yaml_texts(json.loads((examples / f"{name}.json").read_text("utf-8"))))
    for name in ("list.csv", "models.py", "dlrm.sh"):
        yield _file(name, 1.5, written_texts((examples / name).read_text("utf-8")))
    binary = {
        "counts.parquet": parquets,
        "ids.parquet": parquets,
        "ids.pt": archives,
        "batch.pt": archives,
        "plan.pt": archives,
    }
    for name, spoil in binary.items():
        yield _file(name, 1.5, spoil((examples / name).read_bytes()))
    yield _file("batch.pt.gz", 1.5, _packed((examples / "batch.pt").read_bytes()))
    for store in ("store", "store/dense", "store/collectives"):
        (part,) = (examples / store).glob("device=cpu/part-*.parquet")
        contents = st.one_of(parquets(part.read_bytes()), parquets(part.read_bytes()).map(_identified))
        yield Target(store, 2.0, _cases(_as_file(part.relative_to(examples), contents), READERS[store], ("store",)))
    for kind in MODELS:
        readers = READERS["registry/policy" if kind == "policy" else "registry"]
        yield Target(f"registry/{kind}", 2.0, _cases(_models(examples, kind), readers, NEEDED))
    for command in all_commands():
        lines = command_lines(command).map(lambda line: Case(arguments=line, needs=_named(line, examples)))
        yield Target(" ".join(command.path), 1.0, lines)


def _file(name, share, contents):
    role = "plan.json" if name == "flex.json" else name
    return Target(name, share, _cases(_as_file(role, contents), READERS[role], NEEDED))


def _as_file(name, contents):
    return contents.map(lambda content: {str(name): content})


def _cases(files, readers, needs):
    some = st.one_of(st.just(readers[0]), st.sampled_from(readers))
    return st.builds(lambda files, arguments: Case(arguments=arguments, files=files, needs=needs), files, some)


def _identified(content):
    """A file of samples, the ids of its samples mended, if it can be read at all."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        file.write(content)
        file.flush()
        try:
            samples = KERNEL_SAMPLES.read_file(Path(file.name))
        except AutoshardError:
            return content
    return KERNEL_SAMPLES.file_content([sample.identified() for sample in samples])


def _packed(content):
    packed = gzip.compress(content, mtime=0)
    return st.one_of(spoilt(packed), archives(content).map(lambda made: gzip.compress(made, mtime=0)))


def device_of(kind):
    """The device that a model of a kind is of: a policy is of any."""
    return "any" if kind == "policy" else "cpu"


@st.composite
def _models(draw, examples, kind):
    """A version of a model with faults and with the digests that it needs to be looked at."""
    device = device_of(kind)
    (folder,) = (path.parent for path in (examples / "registry" / kind / device).glob("*/card.json"))
    card, tensors = (folder / "card.json").read_bytes(), (folder / "weights.safetensors").read_bytes()
    (change,) = (folder.parent / "production").iterdir()
    alias = change.read_bytes()
    part = draw(st.sampled_from(("card", "card", "weights", "weights", "alias", "digest")))
    if part == "weights":
        tensors = draw(weights(tensors))
    if part == "digest":
        tensors = draw(spoilt(tensors))
    else:
        mark = "@weights@"
        document = json.loads(card) | {"weights_sha256": mark}
        text = draw(json_texts(document)) if part == "card" else json.dumps(document).encode()
        card = text.replace(mark.encode(), hashlib.sha256(tensors).hexdigest().encode())
    version = hashlib.sha256(card).hexdigest()[:16]
    alias = alias.replace(folder.name.encode(), version.encode())
    if part == "alias":
        alias = draw(st.one_of(spoilt(alias), json_texts(json.loads(alias))))
    at = Path("registry", kind, device)
    model = {"card.json": card, "weights.safetensors": tensors}
    names = {at / version / name: content for name, content in model.items()}
    names[at / "production" / change.name] = alias
    return {str(name): content for name, content in names.items()}


def _named(line, examples):
    """The examples that a command line names, and what these need."""
    found = {word for argument in line for word in (argument, argument.partition("=")[2]) if word.strip("./")}
    return ("counts.parquet", *sorted(name for name in found if "/" not in name and (examples / name[:200]).exists()))
