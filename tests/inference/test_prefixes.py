"""The tree of shared prefixes holds every token once, and families save what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.inference.prefixes import FAMILY_TOKENS, Kin, Prefix, common_prefix, families, shared_prefixes

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9)


@settings(deadline=None, max_examples=200)
@given(PROMPTS)
def test_every_shared_token_is_in_the_tree_once(prompts):
    depth, prefixes, order = {}, {}, []
    for place, path in shared_prefixes(prompts).walk():
        order.append(place)
        assert [p.start for p in path] == [0, *(p.stop for p in path[:-1])][: len(path)]
        depth[place] = path[-1].stop if path else 0
        prefixes |= {prefix.key: prefix for prefix in path}
    assert sorted(order) == list(range(len(prompts)))
    assert all(depth[place] < len(prompt) for place, prompt in enumerate(prompts))
    # counted token by token: what is before a prompt's last token is one with the same place and past in another
    inner = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt))}
    tokens = sum(p.stop - p.start for p in prefixes.values())
    tokens += sum(len(prompt) - depth[place] for place, prompt in enumerate(prompts))
    assert tokens == len(inner) + len(prompts)
    for prefix in prefixes.values():
        assert len(prefix.prompts) > 1
        assert len({tuple(prompts[place][: prefix.stop]) for place in prefix.prompts}) == 1
        first = order.index(prefix.prompts[0])  # what stands behind a prefix in a layout is all of it and no more
        assert tuple(order[first : first + len(prefix.prompts)]) == prefix.prompts


def test_prompts_of_two_environments_stand_together_in_order_of_their_first():
    tree = shared_prefixes([[1, 7, 7, 1, 2], [1, 8, 3, 1, 2], [1, 7, 7, 2, 2], [1, 8, 3, 2, 2], [1, 9, 9]])
    assert tree == Prefix(0, 1, (Prefix(1, 3, (0, 2)), Prefix(1, 3, (1, 3)), 4))
    assert [place for place, _ in tree.walk()] == [0, 2, 1, 3, 4]


def test_prompts_with_one_common_prefix_stay_in_order():
    tree = shared_prefixes([[5, 5, 3, 1], [5, 5, 1], [5, 5, 2, 2, 2]])
    assert tree == Prefix(0, 2, (0, 1, 2))
    assert shared_prefixes([[1, 2, 3]]) == Prefix(0, 0, (0,))
    assert shared_prefixes([[4, 4], [4, 4], [4, 4]]) == Prefix(0, 1, (0, 1, 2))
    assert shared_prefixes([[1, 2], [1, 2, 3, 4], [1, 2, 3, 5]]) == Prefix(0, 1, (0, Prefix(1, 3, (1, 2))))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        shared_prefixes([[1], []])


def test_a_prompt_that_begins_another_keeps_a_token():
    assert common_prefix([(1, 2, 3), (1, 2, 3, 4)]) == 2
    assert common_prefix([(3,), (3,)]) == 0
    assert common_prefix([(1, 2, 9), (1, 2, 4), (1, 3, 4)]) == 1


def test_families_keep_long_prefixes_once_and_do_not_part_for_short_ones():
    def two(shared):
        return [[kind] * shared + [kind, place] for place in range(3) for kind in (1, 2)]

    assert families(two(FAMILY_TOKENS)) == [Kin(FAMILY_TOKENS + 1, (0, 2, 4)), Kin(FAMILY_TOKENS + 1, (1, 3, 5))]
    assert families(two(20)) == [Kin(0, (0, 2, 4, 1, 3, 5))]
    assert families([[1] * 900]) == [Kin(0, (0,))]
    assert families([[place] * 900 for place in range(5)]) == [Kin(0, (0, 1, 2, 3, 4))]


def test_later_turns_of_a_task_are_a_family():
    """Several episodes of a task begin with the same prompt, and go on with what each of them wrote."""
    prompts = [[7] * 300 + [task] * 200 + [60 + row] * 40 for task in (1, 2) for row in range(4)]
    assert families(prompts) == [Kin(500, (0, 1, 2, 3)), Kin(500, (4, 5, 6, 7))]
