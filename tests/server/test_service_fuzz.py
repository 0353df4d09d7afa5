"""Generated requests: whatever a client sends, the service answers as its OpenAPI document says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance


@pytest.fixture(scope="module")
def api(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode", "max_examples", "status"),
    [
        ("GET", "/livez", GenerationMode.POSITIVE, 3, 200),
        ("GET", "/readyz", GenerationMode.POSITIVE, 3, 200),
        ("POST", "/v1/plans", GenerationMode.POSITIVE, 60, 200),
        ("POST", "/v1/plans", GenerationMode.NEGATIVE, 60, 400),
        ("GET", "/v1/plans", GenerationMode.POSITIVE, 20, 200),
        ("GET", "/v1/plans/{plan_id}", GenerationMode.POSITIVE, 10, 404),
        ("DELETE", "/v1/plans/{plan_id}", GenerationMode.POSITIVE, 10, 404),
    ],
)
def test_every_answer_is_as_documented(api, method, path, mode, max_examples, status):
    statuses = set()

    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # Else nearly every task would be refused for its planner's name.
            case.body |= {"planner": "cost-greedy", "options": {}, "time_limit_s": 0.1}
        # What fits the schema may still make no sense, such as a topology whose levels do not nest.
        statuses.add(case.call_and_validate(excluded_checks=[positive_data_acceptance]).status_code)

    check()
    assert status in statuses
    assert mode is GenerationMode.POSITIVE or 200 not in statuses
