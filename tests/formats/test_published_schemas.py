"""The published JSON Schemas and the readers agree: what a schema refuses, its reader refuses, and names the place."""

import copy

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from autoshard.core.errors import InputError
from autoshard.formats import json_schemas, plan_from_json, tables_from_json, topology_from_json

READERS = {
    "autoshard.tables/1": tables_from_json,
    "autoshard.topology/1": topology_from_json,
    "autoshard.plan/1": plan_from_json,
}
#: Values that a field is given in turn; most are wrong for it.
STRANGE = [None, True, -1, 0, 0.5, 3, 2**80, 1e300, "", "fp32", "x" * 600, [], [[]], [0], {}, {"kind": "zipf"}]


def validator_of(name, *, alone=False):
    """The validator of a schema; `alone` takes any tables and topology in a plan, which have turns of their own."""
    schemas = json_schemas()
    registry = Registry().with_resources((item["$id"], Resource.from_contents(item)) for item in schemas.values())
    schema = copy.deepcopy(schemas[name])
    for part in ("tables", "topology") if alone and name == "autoshard.plan/1" else ():
        schema["properties"][part] = {"type": "object"}
    return Draft202012Validator(schema, registry=registry)


def paths_of(value, path=()):
    """Every place in a document below its root, but only the first two items of lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in children:
        yield (*path, key)
        yield from paths_of(inner, (*path, key))


def dotted(path):
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def mutants(document):
    """Copies of a document, each with one place changed, and that place."""
    for path in paths_of(document):
        if path[0] in ("tables", "topology") and "shards" in document and len(path) > 1:
            continue
        for value in STRANGE:
            changed, holder = copy_to(document, path)
            holder[path[-1]] = value
            yield path, changed
        if isinstance(path[-1], str):
            changed, holder = copy_to(document, path)
            del holder[path[-1]]
            yield path, changed
            changed, holder = copy_to(document, path)
            holder[path[-1] + "_"] = 1
            yield path, changed


def copy_to(document, path):
    """A copy of a document, and what holds the last part of a path in it."""
    changed = copy.deepcopy(document)
    holder = changed
    for part in path[:-1]:
        holder = holder[part]
    return changed, holder


@pytest.mark.parametrize("name", READERS)
def test_a_schema_is_one_and_names_itself(name):
    Draft202012Validator.check_schema(json_schemas()[name])
    assert json_schemas()[name]["$schema"].endswith("draft/2020-12/schema")


@pytest.mark.parametrize("name", READERS)
def test_a_whole_document_is_accepted_by_both(name, documents):
    assert list(validator_of(name).iter_errors(documents[name])) == []
    READERS[name](documents[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "plan" in name else []) for name in READERS]
)
def test_what_a_schema_refuses_its_reader_refuses_in_one_line_at_that_place(name, documents):
    validator, num_refused = validator_of(name, alone=True), 0
    for path, document in mutants(slim(documents[name])):
        error = error_of(READERS[name], document)
        if error is not None:
            assert "\n" not in str(error)
            assert len(str(error)) < 400
        if not validator.is_valid(document):
            num_refused += 1
            # The kind of an access says which fields may be beside it, so that one of these can be what is named.
            place = dotted(path[:-1]) if path[-1] == "kind" or "access" in path else dotted(path)
            assert error is not None, (path, "was accepted")
            assert error.field is not None
            assert error.field.startswith(place), (place, str(error))
    assert num_refused > 300


def error_of(reader, document):
    try:
        reader(document)
    except InputError as error:
        return error
    return None


def slim(document):
    """A plan with tables and a topology that are quickly read; these have turns of their own."""
    if "shards" not in document:
        return document
    tables = [{**table, "access": {"kind": "uniform"}} for table in document["tables"]["tables"]]
    topology = {key: value for key, value in document["topology"].items() if key not in ("fetch_ms", "overrides")}
    return {**document, "tables": {**document["tables"], "tables": tables}, "topology": topology}
