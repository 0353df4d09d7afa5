"""Cases that generation seldom finds: special files, sizes that only say they are large, nesting, names, digests.

Each has the exit codes that it may end with.
"""

import gzip
import hashlib
import io
import json
import struct
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load, save

from tests.fuzz.harness import BAD_INPUT, DONE, INFEASIBLE, OTHER, Case
from tests.fuzz.mutations import RAW, replaced, to_text
from tests.fuzz.targets import NEEDED, PLAN, READERS, device_of

#: Commands that are given a path, and what there is at it.
PATH_READERS = {
    "tables": ("import", "PATH", "--format", "tables-json", "-o", "out.json"),
    "tbe": ("import", "PATH", "--format", "tbe-data-config", "-o", "out.json"),
    "ids": ("import", "PATH", "--format", "id-batches", "-o", "out.json"),
    "archive": ("import", "PATH", "--format", "dlrm-datasets", "-o", "out.json"),
    "row counts": ("import", "PATH", "--format", "row-counts", "--set", "num_samples=9", "-o", "out.json"),
    "plan": ("show", "PATH"),
    "topology": ("plan", "tables.json", "--topology", "PATH"),
    "replay": ("show", "plan.json", "--replayed", "PATH"),
}
ODD_PATHS = ("pipe", "/dev/zero", "loop", "huge.json", "nothing.json", "empty")
#: Numbers of documents, and what becomes of each.
PLACES = {
    "tables.json": (
        ("batch_size",),
        ("tables", 1, "num_embeddings"),
        ("tables", 1, "embedding_dim"),
        ("tables", 1, "access", "alpha"),
        ("tables", 0, "features", 0, "pooling_factor"),
    ),
    "topology.json": (("world_size",), ("memory_bytes", "hbm"), ("levels", 0, "all_to_all", "bytes_per_s")),
    "plan.json": (("shards", 0, "rows", "stop"), ("shards", 0, "columns", 1), ("predicted", "step_ms", "high")),
}
NUMBERS = (float("nan"), 1e308, 10**25 + 7, -1, None)
#: What a terminal, a page or a file's name could take for more than a name.
NAMES = ("\x1b[31mred", "\u202egnp.exe", "two\nlines", "\ud800", "<script>alert(1)</script>", "[bold]", "a" * 5000)
CARDS = {
    "no hidden layers": ("cost", ("encoder_hidden",), []),
    "layers of no width": ("cost", ("encoder_hidden",), [0]),
    "wide layers": ("cost", ("encoder_hidden",), [10**9]),
    "features of null": ("cost", ("features",), None),
    "a scale beyond numbers": ("cost", ("scale_ms",), 1e308),
    "a scale of null": ("cost", ("scale_ms",), None),
    "an interval of everything": (
        "cost",
        ("interval",),
        {"low": -1e308, "high": 1e308, "coverage": 1, "half_width": 1},
    ),
    "deviations of nothing": ("cost", ("scaling", "std"), [1e-300] * 50),
    "terms of null": ("dense", ("terms",), None),
    "bounds of a name": ("dense", ("bounds",), {"\x1b[31mdot": [1, 1]}),
    "curves of null": ("collective", ("bounds",), None),
    "an infinite share": ("collective", ("alongside",), {"all_to_all": float("inf")}),
    "an interval beyond numbers": ("step", ("interval_scale",), 1e308),
    "a policy of no device": ("policy", ("device",), ""),
    "a policy of a number": ("policy", ("device",), 10**9),
    "a policy of null": ("policy", ("training",), None),
}
FILLS = {"weights near the largest": 3e38, "weights that are no numbers": float("nan"), "weights of 0": 0.0}


def _paths(_):
    for reader, command in PATH_READERS.items():
        for path in ODD_PATHS:
            arguments = tuple(path if part == "PATH" else part for part in command)
            yield f"{reader} from {path}", Case(arguments=arguments, needs=NEEDED), BAD_INPUT
    yield "models from a file", Case(arguments=("models", "--registry", "nothing.json")), BAD_INPUT
    for path in ("pipe", "/dev/zero", "nothing.json"):
        yield f"samples from {path}", Case(arguments=("samples", path)), OTHER, BAD_INPUT
        yield f"output to {path}", Case(arguments=("import", "nvidia-tiny", "-o", f"{path}/out.json")), BAD_INPUT


def _numbers(examples):
    for name, places in PLACES.items():
        document = json.loads((examples / name).read_text(encoding="utf-8"))
        for place in places:
            for value in NUMBERS:
                content = to_text(replaced(document, place, value))
                case = Case(arguments=READERS[name][0], files={name: content}, needs=NEEDED)
                # Large memory and many rows may be what they say they are.
                accepted = (DONE, INFEASIBLE) if value in (1e308, 10**25 + 7) else ()
                yield f"{name}, {place} of {value}", case, BAD_INPUT, *accepted


def _texts(examples):
    for name in PLACES:
        text = (examples / name).read_bytes()
        key = next(iter(json.loads(text)))
        contents = {
            "a key twice": text.replace(b"{", f'{{"{key}": 1, '.encode(), 1),
            "another encoding": text.decode().encode("utf-16"),
            "half of it": text[: len(text) // 2],
            "unknown fields": to_text(json.loads(text) | {"colour": 1}),
            "a list in place of an object": to_text([json.loads(text)]),
            **{mark: raw.encode() for mark, raw in RAW.items()},
        }
        for fault, content in contents.items():
            case = Case(arguments=READERS[name][0], files={name: content}, needs=NEEDED)
            yield f"{name}, {fault}", case, BAD_INPUT


def _names(examples):
    """Names that are accepted have to be shown without harm; nothing says that any of them is."""
    tables = json.loads((examples / "tables.json").read_text(encoding="utf-8"))
    plan = json.loads((examples / "plan.json").read_text(encoding="utf-8"))
    for name in NAMES:
        files = {"tables.json": to_text(replaced(tables, ("tables", 1, "name"), name))}
        case = Case(arguments=(*PLAN, "--planner", "random"), files=files, needs=NEEDED)
        yield f"a table named {name[:20]!r}", case, DONE, BAD_INPUT
        old = plan["tables"]["tables"][1]["name"]
        files = {"plan.json": to_text(plan).replace(json.dumps(old).encode(), json.dumps(name).encode())}
        for command in (("show", "--html", "out.html"), ("evaluate",), ("explain",)):
            arguments = (*command, "plan.json")
            case = Case(arguments=arguments, files=files, needs=NEEDED)
            yield f"a plan's table named {name[:20]!r} for {command[0]}", case, DONE, BAD_INPUT


def _binary(examples):
    ids, archive = (examples / "ids.parquet").read_bytes(), (examples / "batch.pt").read_bytes()
    contents = {
        ("ids.parquet", "half of it"): ids[: len(ids) // 2],
        ("ids.parquet", "texts"): _parquet({"clicks": ["a", "b"]}),
        ("ids.parquet", "negative ids"): _parquet({"clicks": [-1, 2]}),
        ("ids.parquet", "no columns"): _parquet({}),
        ("ids.parquet", "no rows"): _parquet({"clicks": pa.array([], pa.int64())}),
        ("ids.parquet", "large ids"): _parquet({"clicks": [2**63 - 1]}),
        ("ids.parquet", "a long footer"): ids[:-8] + struct.pack("<I", 2**31) + b"PAR1",
        ("batch.pt", "half of it"): archive[: len(archive) // 2],
        ("batch.pt", "an empty archive"): b"PK\x05\x06" + bytes(18),
        ("batch.pt", "a bomb"): _bomb(archive),
        ("batch.pt.gz", "a bomb"): gzip.compress(bytes(1 << 26)),
        ("batch.pt.gz", "half of it"): gzip.compress(archive)[:99],
    }
    for (name, fault), content in contents.items():
        case = Case(arguments=READERS[name][0], files={name: content}, needs=NEEDED)
        yield f"{name}, {fault}", case, BAD_INPUT


def _parquet(columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _bomb(archive):
    """The archive, each of its tensors 64 MiB of zeros that take some kilobytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as held, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as written:
        for name in held.namelist():
            written.writestr(name, bytes(1 << 26) if "/data/" in name else held.read(name))
    return made.getvalue()


def _cards(examples):
    for fault, (kind, place, value) in CARDS.items():
        card, tensors = _model(examples, kind)
        yield from _priced(fault, kind, replaced(card, place, value), save(tensors))


def _weights(examples):
    for kind in ("cost", "dense", "collective", "step", "policy"):
        card, tensors = _model(examples, kind)
        for fault, fill in FILLS.items():
            filled = {name: np.full_like(tensor, fill) for name, tensor in tensors.items()}
            yield from _priced(f"{kind}: {fault}", kind, card, save(filled))
        whole = {name: tensor.astype(np.int64) for name, tensor in tensors.items()}
        yield from _priced(f"{kind}: whole weights", kind, card, save(whole))
        yield from _priced(f"{kind}: no weights", kind, card, save({}))
        yield from _priced(f"{kind}: no safetensors", kind, card, b"\xff" * 100)


def _model(examples, kind):
    (card,) = (examples / "registry" / kind / device_of(kind)).glob("*/card.json")
    return json.loads(card.read_bytes()), load((card.parent / "weights.safetensors").read_bytes())


def _priced(fault, kind, card, weights):
    """A plan priced by the model, and the list that names it."""
    text = to_text(card | {"weights_sha256": hashlib.sha256(weights).hexdigest()})
    version = hashlib.sha256(text).hexdigest()[:16]
    alias = {"action": "publish", "id": version, "at": "2026-11-01T00:00:00+00:00", "by": "test"}
    folder = f"registry/{kind}/{device_of(kind)}"
    files = {f"{folder}/{version}/card.json": text, f"{folder}/{version}/weights.safetensors": weights}
    files[f"{folder}/production/00000001"] = json.dumps(alias).encode() + b"\n"
    planner = "policy" if kind == "policy" else "cost-greedy"
    for command in ((*PLAN, "--planner", planner, "--json"), ("models",)):
        arguments = (*command, "--registry", "registry")
        case = Case(arguments=arguments, files=files, needs=NEEDED)
        yield f"{arguments[0]} with {fault}", case, OTHER, DONE


#: Makers by what is odd about their cases: each yields name, case and the exit codes that it may end with.
KINDS = {
    "paths": _paths,
    "numbers": _numbers,
    "texts": _texts,
    "names": _names,
    "binary files": _binary,
    "cards of models": _cards,
    "weights of models": _weights,
}
