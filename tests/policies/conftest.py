import pytest

from policies.network import PolicyNetwork, first_weights
from policies.training.drawn_tasks import TaskKind, game_task
from tests import builders as make

#: Few tables on one node, which are searched in no time.
SMALL = TaskKind(machines=("a100-8",), pools=("criteo-kaggle",), num_tables=(5,))


@pytest.fixture(scope="session")
def network():
    return PolicyNetwork(first_weights(0))


@pytest.fixture(scope="session")
def task():
    tables, _ = make.draw_task(8, 8, seed=3)
    return game_task(make.request(tables, make.two_nodes()))
