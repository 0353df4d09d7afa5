from tests.policies.conftest import (  # noqa: F401
    cost,
    make_cost,
    make_problem,
    make_tasks,
    model,
)
