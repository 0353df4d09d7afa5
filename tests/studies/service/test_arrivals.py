import asyncio

import httpx
import pytest

from studies.service.arrivals import Latencies, Spacing, arrival_times, send_at


@pytest.mark.smoke
def test_arrivals_have_their_rate_whatever_their_spacing():
    even = arrival_times(8.0, 100.0, Spacing.EVEN, seed=0)
    poisson = arrival_times(8.0, 100.0, Spacing.POISSON, seed=0)
    assert even[:3] == [0.0, 0.125, 0.25]
    assert len(even) == 800
    assert len(poisson) == pytest.approx(800, abs=4 * 800**0.5)
    assert sorted(poisson) == poisson
    assert poisson[-1] < 100.0


@pytest.mark.smoke
def test_latencies_count_from_the_scheduled_arrival():
    async def slow(_):
        await asyncio.sleep(0.1)
        return httpx.Response(200)

    first, second = asyncio.run(send_at([0.0, 0.0], slow, max_open=1))
    assert 100 <= first.latency_ms < second.latency_ms
    assert second.latency_ms >= 200  # it waited for the first, and that counts


@pytest.mark.smoke
def test_refusals_and_failures_are_told_apart():
    statuses = {0: 200, 1: 429, 2: 503, 3: 500}

    async def send(number):
        if number == 4:
            raise httpx.ConnectError("nobody there")
        headers = {"Retry-After": "1"} if number == 1 else {}
        return httpx.Response(statuses[number], headers=headers)

    found = Latencies.of("mixed", asyncio.run(send_at([0.0] * 5, send, max_open=5)))
    assert (found.num_requests, found.num_answered, found.num_refused, found.num_failed) == (5, 1, 2, 2)
    assert found.num_refused_without_time == 1
    assert found.faults == ("ConnectError: nobody there", "status 500")
