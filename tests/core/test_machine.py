from dataclasses import replace

import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.core.machine import KnowsMachine, MeasuredMachine, device_family


@pytest.mark.parametrize(("key", "family"), [("cpu", "cpu"), ("cpu:amd-epyc", "cpu"), ("h200", "h200")])
def test_keys_lead_back_to_their_family(key, family):
    assert device_family(key) == family


EPYC = MeasuredMachine(
    device_name="AMD EPYC",
    core="amd-25-17-avx512",
    core_threads=1,
    core_cache_bytes=2**20,
    cache_bytes=2**25,
    cache_threads=2,
    clock_mhz=2596.0,
)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("AMD EPYC", "cpu:amd-epyc"),
        ("Intel(R) Xeon(R) Processor", "cpu:intel-xeon"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "cpu:intel-xeon-e5-2690-v4"),
        ("???", "cpu"),
    ],
)
def test_keys_of_processors_that_only_their_names_are_known_of(name, key):
    assert MeasuredMachine(device_name=name).key_in("cpu") == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "cpu:amd-25-17-avx512-1m-l2-32m-cache-of-2"),
        ({"device_name": "AMD EPYC 9554", "clock_mhz": 3100.0}, "cpu:amd-25-17-avx512-1m-l2-32m-cache-of-2"),
        ({"cache_bytes": 2**23}, "cpu:amd-25-17-avx512-1m-l2-8m-cache-of-2"),
        ({"core_cache_bytes": 1280 * 2**10}, "cpu:amd-25-17-avx512-1280k-l2-32m-cache-of-2"),
        ({"core_threads": 2, "cache_threads": 16}, "cpu:amd-25-17-avx512-2-threads-1m-l2-32m-cache-of-16"),
        ({"core": ""}, "cpu:amd-epyc-1m-l2-32m-cache-of-2"),
    ],
)
def test_keys_name_what_kernels_feel(changes, key):
    assert replace(EPYC, **changes).key_in("cpu") == key


@pytest.mark.parametrize(
    ("changes", "is_like"),
    [
        ({"torch_version": "2.13.0", "memory_bytes": 2**33}, True),
        ({"device_name": "AMD EPYC 9554"}, True),
        ({"core": "", "cache_threads": 0}, True),
        ({"core": "", "device_name": "AMD EPYC 9554"}, False),
        ({"core": "amd-25-1-avx2"}, False),
        ({"cache_bytes": 2**23}, False),
        ({"core_cache_bytes": 2**19}, False),
        ({"cache_threads": 16}, False),
        ({"core_threads": 2}, False),
        ({"clock_mhz": 2700.0}, True),
        ({"clock_mhz": 3400.0}, False),
        ({"memory_bytes_per_s": 3e10}, True),
        ({"memory_bytes_per_s": 8e10}, False),
    ],
)
def test_machines_are_alike_unless_what_is_known_differs(changes, is_like):
    here = replace(EPYC, memory_bytes_per_s=2e10)
    other = replace(here, **changes)
    assert here.is_like(other) == other.is_like(here) == is_like


def test_machines_say_what_they_are():
    assert str(EPYC) == "AMD EPYC (amd-25-17-avx512, 2.6 GHz, 1 MiB L2, 32 MiB last cache of 2 threads)"
    assert str(MeasuredMachine(device_name="AMD EPYC")) == "AMD EPYC"
    assert not isinstance(EPYC, KnowsMachine)


def test_sizes_are_no_debts():
    with pytest.raises(InvalidOptionError, match="cache_bytes: must be at least 0, got -1"):
        MeasuredMachine(device_name="AMD EPYC", cache_bytes=-1)
