"""Reading and writing: tables, topologies and plans as JSON, what comes with the package, other projects' formats."""

from autoshard.formats.bundled import (
    bundled_table_sets,
    bundled_topologies,
    bundled_topology,
    load_machine,
    load_tables,
    load_topology,
)
from autoshard.formats.digest import canonical_json, digest
from autoshard.formats.dlrm_datasets import read_dlrm_datasets
from autoshard.formats.files import atomic_write
from autoshard.formats.importing import FORMATS, ImportFormat, import_tables
from autoshard.formats.json_document import format_json, parse_json, read_json
from autoshard.formats.plan_json import plan_from_json, plan_to_json, read_plan, write_plan
from autoshard.formats.published_schemas import json_schemas
from autoshard.formats.tables_json import read_tables, tables_from_json, tables_to_json, write_tables
from autoshard.formats.topology_json import read_topology, topology_from_json, topology_to_json, write_topology

__all__ = [
    "FORMATS",
    "ImportFormat",
    "atomic_write",
    "bundled_table_sets",
    "bundled_topologies",
    "bundled_topology",
    "canonical_json",
    "digest",
    "format_json",
    "import_tables",
    "json_schemas",
    "load_machine",
    "load_tables",
    "load_topology",
    "parse_json",
    "plan_from_json",
    "plan_to_json",
    "read_dlrm_datasets",
    "read_json",
    "read_plan",
    "read_tables",
    "read_topology",
    "tables_from_json",
    "tables_to_json",
    "topology_from_json",
    "topology_to_json",
    "write_plan",
    "write_tables",
    "write_topology",
]
