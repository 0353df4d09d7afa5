"""Generated requests: whatever a client sends, the service answers as its OpenAPI document says."""

import contextlib
import os
import re
from collections import Counter
from itertools import count

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyStrategyDefinition
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, not_a_server_error, positive_data_acceptance

#: Requests of the long run, of which a nightly job asks for 100,000, and the seed of its first round: a run that was
#: stopped goes on with the seed after that of the last round which it printed.
LONG_RUN = int(os.environ.get("AUTOSHARD_FUZZ_REQUESTS", "2000"))
FIRST_SEED = int(os.environ.get("AUTOSHARD_FUZZ_SEED", "0"))
STEPS = 10
#: Scenarios of such requests that are drawn with one seed.
ROUND = 25
#: Bodies for which nearly every task would be refused for its planner's name, and of which each task takes long.
QUICK = {"options": {}, "time_limit_s": 0.1}


@pytest.fixture(scope="module")
def api(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def plain(case):
    """Has a body's planners be quick ones: what fits the schema is then often planned."""
    if isinstance(case.body, dict):
        if "planners" in case.body:
            case.body |= {**QUICK, "planners": ["cost-greedy", "random"]}
        elif "planner" in case.body or "time_limit_s" in case.body:
            case.body |= {**QUICK, "planner": "cost-greedy"}
    return case


@pytest.mark.parametrize(
    ("method", "path", "mode", "max_examples", "statuses"),
    [
        ("GET", "/livez", GenerationMode.POSITIVE, 3, {200}),
        ("GET", "/readyz", GenerationMode.POSITIVE, 3, {200}),
        ("GET", "/metrics", GenerationMode.POSITIVE, 3, {200}),
        ("POST", "/v1/plans", GenerationMode.POSITIVE, 20, {200}),
        ("POST", "/v1/plans", GenerationMode.NEGATIVE, 15, {400}),
        ("GET", "/v1/plans", GenerationMode.POSITIVE, 20, {200}),
        ("GET", "/v1/plans/{plan_id}", GenerationMode.POSITIVE, 3, {404}),
        ("DELETE", "/v1/plans/{plan_id}", GenerationMode.POSITIVE, 3, {404}),
        ("DELETE", "/v1/jobs/{job_id}", GenerationMode.POSITIVE, 3, {404}),
        ("GET", "/v1/plans/{plan_id}/explanation", GenerationMode.POSITIVE, 3, {404}),
        ("GET", "/v1/plans/{plan_id}/improvements", GenerationMode.POSITIVE, 3, {404}),
        ("GET", "/v1/plans/{plan_id}/report", GenerationMode.POSITIVE, 3, {404}),
        ("GET", "/v1/plans/{plan_id}/diff/{other_id}", GenerationMode.POSITIVE, 3, {404}),
        ("POST", "/v1/plans/{plan_id}/replans", GenerationMode.POSITIVE, 3, {404}),
        ("POST", "/v1/evaluations", GenerationMode.POSITIVE, 10, {400, 422}),
        *(
            pytest.param("POST", path, mode, 100, statuses, marks=pytest.mark.slow)
            for path, mode, statuses in (
                ("/v1/plans", GenerationMode.POSITIVE, {200}),
                ("/v1/plans", GenerationMode.NEGATIVE, {400}),
                ("/v1/comparisons", GenerationMode.POSITIVE, {200}),
                ("/v1/simulations", GenerationMode.POSITIVE, {200}),
                ("/v1/simulations", GenerationMode.NEGATIVE, {400}),
                ("/v1/validations", GenerationMode.POSITIVE, {200}),
            )
        ),
        ("POST", "/v1/simulations", GenerationMode.POSITIVE, 10, {200}),
        ("POST", "/v1/validations", GenerationMode.POSITIVE, 4, {200}),
        ("POST", "/v1/simulations", GenerationMode.NEGATIVE, 4, {400}),
    ],
)
def test_every_answer_is_as_documented(api, method, path, mode, max_examples, statuses):
    found = set()

    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        case = plain(case) if mode is GenerationMode.POSITIVE else case
        # What fits the schema may still make no sense, such as a topology whose levels do not nest.
        found.add(case.call_and_validate(excluded_checks=[positive_data_acceptance]).status_code)

    check()
    assert statuses & found
    assert mode is GenerationMode.POSITIVE or 200 not in found


def follow_requests(api, client, num_requests, monkeypatch):
    """Sends requests that follow from each other, such as to explain a plan that was made; returns how many, and which.

    What may follow depends on answers, and these on the moment: where they differ from those to the same requests
    before, Hypothesis gives up on what it was about to draw. So requests are drawn in rounds, each with its own seed.
    """
    made, faults = [], []

    class Requests(api.as_state_machine()):
        def setup(self):
            # Hypothesis takes what is drawn to follow from what was drawn before, and not from earlier scenarios.
            for plan in client.get("/v1/plans", params={"limit": 200}).json()["plans"]:
                client.delete(f"/v1/plans/{plan['id']}")
            for state in ("queued", "running"):  # a measurement may last a day, and others wait for it
                for job in client.get("/v1/jobs", params={"limit": 200, "state": state}).json()["jobs"]:
                    client.post(f"/v1/jobs/{job['id']}/cancel")

        def get_call_kwargs(self, _):
            return {"timeout": 120}  # the machine has other work, and jobs that begin take their share

        def before_call(self, case):
            plain(case)
            case.headers.pop("Idempotency-Key", None)  # these last from one scenario to the next
            job_id = str((case.path_parameters or {}).get("job_id"))
            if case.path.endswith("/events") and re.fullmatch("[0-9a-f]{32}", job_id):
                client.post(f"/v1/jobs/{job_id}/cancel")  # events are sent until the job has ended
            if (case.method, case.path) == ("POST", "/v1/plans") and isinstance(case.body, dict):
                case.body |= {"tables": "criteo-kaggle", "topology": "cpu-8"}

        def after_call(self, response, case):
            made.append((case.method, case.path, response.status_code))

        def validate_response(self, response, case, **_):
            # What is in the tables and topologies of jobs is read when they run.
            late = [negative_data_rejection] if case.path.startswith("/v1/jobs") else []
            # No room and no time are documented answers, which a machine with other work gives.
            busy = [not_a_server_error] if response.status_code in (503, 504) else []
            try:
                case.validate_response(response, excluded_checks=[positive_data_acceptance, *late, *busy])
            except Exception as fault:
                faults.append(fault)
                raise

    of_round = settings(
        max_examples=max(1, min(num_requests // STEPS, ROUND)),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for seed in count(FIRST_SEED):
        monkeypatch.setattr(hypothesis.core, "global_force_seed", seed)
        with contextlib.suppress(FlakyStrategyDefinition):
            Requests.run(settings=of_round)
        by_status = sorted(Counter(status for _, _, status in made).items())
        print(f"seed {seed}: {len(made):,} requests until now; answers by status: {dict(by_status)}", flush=True)
        assert not faults, faults
        if len(made) >= num_requests:
            return len(made), set(made)


@pytest.mark.slow
def test_requests_that_follow_from_each_other_are_answered_as_documented(api, client, monkeypatch):
    # Requests about models follow from no other, and would be most of so few.
    sent, made = follow_requests(api.exclude(path_regex="^/v1/models"), client, 200, monkeypatch)
    assert sent >= 200
    assert ("POST", "/v1/plans", 200) in made
    assert any(path.startswith("/v1/plans/{plan_id}") and status == 200 for _, path, status in made)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_requests_that_follow_from_each_other_are_answered_as_documented(api, client, monkeypatch):
    sent, made = follow_requests(api, client, LONG_RUN, monkeypatch)
    assert sent >= LONG_RUN
    assert {status for _, _, status in made} <= {200, 201, 202, 204, 304, 400, 403, 404, 409, 412, 422, 429, 503, 504}
