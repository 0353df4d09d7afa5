"""What long searches say of options."""

import numpy as np
import pytest

from autoshard.core.errors import FormatError
from policies.planning.playing import play
from policies.training.labels import Label, regrets, searched


@pytest.fixture(scope="module")
def layout(task):
    return searched(task, 0.05, seed=0)


def test_a_search_finds_a_layout_that_is_no_worse_than_the_witness(task, layout):
    assert layout.fits()
    assert layout.step_ms() <= task.witness_ms


def test_options_cost_at_least_as_much_as_the_best_and_that_of_the_layout_costs_nothing_more(task, layout):
    regret_O = regrets(task, layout)
    assert (regret_O >= 0).all()
    assert (np.minimum.reduceat(regret_O, task.flat.first_I) == 0).all()
    chosen = [int(task.flat.first_I[item]) + layout.choice(item)[0] for item in range(len(task.order_I))]
    assert (regret_O[chosen] == 0).all()
    assert regret_O.max() > 0.1


def test_an_option_of_which_one_rank_has_too_much_costs_the_excess():
    """Of a table that is most of the task, the whole on one rank is worse than shares of it on all of them."""
    from policies.training.drawn_tasks import game_task
    from tests import builders as make

    tables = [make.table("large", 200_000, 64, 80.0), *[make.table(f"t{index}", 500, 16, 1.0) for index in range(4)]]
    task = game_task(make.request(make.tables(*tables, batch_size=4096), make.topology(4, bytes_per_s=1e11)))
    regret_O = regrets(task, searched(task, 0.05, seed=0))
    of_large = task.options_of(task.space.item_of["large"])
    labels = [option.label for option in task.space.items[task.space.item_of["large"]].options]
    assert regret_O[of_large][labels.index("table_wise")] > 1.0


def test_a_label_comes_back_from_its_file(task, layout, tmp_path):
    label = Label.of(task, layout)
    label.save(tmp_path / "label")
    back = Label.read(tmp_path / "label")
    for name in ("items_NF", "options_OF", "regret_O", "places_YSF", "may_YS"):
        np.testing.assert_array_equal(getattr(back, name), getattr(label, name))
    assert len(label.chosen_N) == len(task.order_I)
    assert label.may_YS[np.arange(len(label.site_Y)), label.site_Y].all()


def test_another_file_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1)}, tmp_path / "label")
    with pytest.raises(FormatError, match="must hold the arrays of a label"):
        Label.read(tmp_path / "label")


def test_any_layout_that_fits_can_be_a_label(task, network):
    label = Label.of(task, play(network, task, 2, rng=np.random.default_rng(0)).layouts[1])
    assert label.step_ms[0] > 0
