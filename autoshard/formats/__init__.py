"""Reading and writing: tables, topologies and plans as JSON, what comes with the package, other projects' formats."""

from typing import TYPE_CHECKING

from autoshard.core.deferred import deferred

if TYPE_CHECKING:
    from autoshard.formats.bundled import (
        bundled_name,
        bundled_table_sets,
        bundled_topologies,
        bundled_topology,
        load_machine,
        load_topology,
    )
    from autoshard.formats.documents.digest import canonical_json, digest
    from autoshard.formats.documents.json_document import format_json, parse_json, read_json
    from autoshard.formats.documents.plan_json import plan_from_json, plan_to_json, read_plan, write_plan
    from autoshard.formats.documents.published_schemas import json_schemas
    from autoshard.formats.documents.tables_json import read_tables, tables_from_json, tables_to_json, write_tables
    from autoshard.formats.documents.topology_json import (
        read_topology,
        topology_from_json,
        topology_to_json,
        write_topology,
    )
    from autoshard.formats.files import atomic_write
    from autoshard.formats.imports.dlrm_datasets import read_dlrm_datasets
    from autoshard.formats.imports.importing import FORMATS, ImportFormat, import_tables, load_tables
    from autoshard.formats.imports.table_lists import TableList, tables_from_list

__all__ = [
    "FORMATS",
    "ImportFormat",
    "TableList",
    "atomic_write",
    "bundled_name",
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
    "tables_from_list",
    "tables_to_json",
    "topology_from_json",
    "topology_to_json",
    "write_plan",
    "write_tables",
    "write_topology",
]

if not TYPE_CHECKING:
    __getattr__ = deferred(
        __name__,
        __all__,
        (
            "bundled",
            "documents.digest",
            "documents.json_document",
            "documents.plan_json",
            "documents.published_schemas",
            "documents.tables_json",
            "documents.topology_json",
            "files",
            "imports.dlrm_datasets",
            "imports.importing",
            "imports.table_lists",
        ),
    )
