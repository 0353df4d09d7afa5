"""Results by content: each is worked out once, however often and in whatever order it is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.content_cache import ContentCache


@given(asked=st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=8), max_entries=st.integers(1, 12))
def test_results_are_those_of_their_keys(asked, max_entries):
    worked_out = []

    def squares(keys):
        assert len(set(keys)) == len(keys)
        worked_out.append(list(keys))
        return [key * key for key in keys]

    cache = ContentCache(squares, max_entries=max_entries)
    for keys in asked:
        assert cache.of(keys) == [key * key for key in keys]
        before = len(worked_out)
        assert cache.of(keys) == [key * key for key in keys]
        assert len(worked_out) == before


def test_only_new_keys_are_worked_out_while_there_is_room():
    worked_out = []
    cache = ContentCache(lambda keys: worked_out.extend(keys) or list(keys), max_entries=3)
    cache.of([1, 2])
    cache.of([2, 3])
    assert worked_out == [1, 2, 3]
    cache.of([3, 4])  # a fourth: all but those asked for are dropped
    assert worked_out == [1, 2, 3, 4]
    cache.of([1, 3])
    assert worked_out == [1, 2, 3, 4, 1]
