from tests.policies.conftest import (  # noqa: F401
    cost,
    make_cost,
    make_problem,
    make_tables,
    make_tasks,
    make_topology,
    model,
)
