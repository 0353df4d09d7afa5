"""The order in which columns travel."""

from hypothesis import given
from hypothesis import strategies as st

from autoshard.runtime.exchange import WireOrder


@st.composite
def wire_orders(draw):
    num_processes = draw(st.integers(1, 4))
    dims = draw(st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=10))
    owners = draw(st.lists(st.integers(0, num_processes - 1), min_size=len(dims), max_size=len(dims)))
    features = draw(st.permutations(range(len(dims))))
    return WireOrder(
        features_of_P=tuple(
            tuple(feature for feature in features if owners[feature] == process) for process in range(num_processes)
        ),
        dim_F=tuple(dims),
    )


def columns_of(order):
    """Each column of each feature, named (feature, column)."""
    return [[(feature, column) for column in range(dim)] for feature, dim in enumerate(order.dim_F)]


@given(wire_orders())
def test_outputs_of_the_processes_come_back_in_the_order_of_the_features(order):
    columns = columns_of(order)
    sent = [[name for feature in features for name in columns[feature]] for features in order.features_of_P]
    gathered = [name for process, start, stop in order.gathering_runs() for name in sent[process][start:stop]]
    assert gathered == [name for feature in columns for name in feature]
    assert tuple(len(names) for names in sent) == order.widths


@given(wire_orders())
def test_gradients_go_where_the_outputs_came_from(order):
    columns = columns_of(order)
    flat = [name for feature in columns for name in feature]
    for features, runs in zip(order.features_of_P, order.scattering_runs(), strict=True):
        scattered = [name for _, start, stop in runs for name in flat[start:stop]]
        assert scattered == [name for feature in features for name in columns[feature]]


def test_neighbours_travel_in_one_piece():
    order = WireOrder(features_of_P=((0, 1, 2), (3,)), dim_F=(4, 4, 8, 4))
    assert order.gathering_runs() == ((0, 0, 16), (1, 0, 4))
    assert order.scattering_runs() == (((0, 0, 16),), ((1, 16, 20),))


def test_the_order_names_every_feature_once():
    order = WireOrder(features_of_P=((2, 0), (), (1,)), dim_F=(4, 8, 12))
    assert order.features == (2, 0, 1)
    assert order.num_features == (2, 0, 1)
    assert order.widths == (16, 0, 8)
