import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.core.machine import KnowsMachine, MeasuredMachine, device_family, model_key


@pytest.mark.parametrize(("key", "family"), [("cpu", "cpu"), ("cpu:amd-epyc", "cpu"), ("h200", "h200")])
def test_keys_lead_back_to_their_family(key, family):
    assert device_family(key) == family


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("AMD EPYC", "cpu:amd-epyc"),
        ("Intel(R) Xeon(R) Processor", "cpu:intel-xeon"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "cpu:intel-xeon-e5-2690-v4"),
        ("???", "cpu"),
    ],
)
def test_keys_of_processors(name, key):
    assert model_key("cpu", name) == key


def test_machines_are_alike_unless_what_is_known_differs():
    machine = MeasuredMachine(device_name="AMD EPYC", core_cache_bytes=2**20, cache_bytes=2**25)
    assert machine.is_like(MeasuredMachine(device_name="AMD EPYC"))
    assert machine.is_like(MeasuredMachine(device_name="AMD EPYC", cache_bytes=2**25, torch_version="2.13.0"))
    assert not machine.is_like(MeasuredMachine(device_name="AMD EPYC", cache_bytes=2**26))
    assert not machine.is_like(MeasuredMachine(device_name="Intel Xeon"))
    assert str(machine) == "AMD EPYC (1 MiB L2, 32 MiB last cache)"
    assert not isinstance(machine, KnowsMachine)


def test_sizes_are_no_debts():
    with pytest.raises(InvalidOptionError, match="cache_bytes: must be at least 0, got -1"):
        MeasuredMachine(device_name="AMD EPYC", cache_bytes=-1)
