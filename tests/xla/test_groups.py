"""The groups of collectives in every form in which XLA writes them, worked out by hand."""

import pytest

from forebay.xla.groups import Groups, groups_of

PAIRS_ACROSS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("attributes", "members"),
    [
        ("channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}", ((0, 2), (1, 3))),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
        ("to_apply=%add", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", PAIRS_ACROSS),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", PAIRS_ACROSS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # the outer half of b, then the inner one
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups(attributes, members):
    assert groups_of(attributes, 8) == Groups(members)


def test_pairs_of_a_permute():
    assert groups_of("source_target_pairs={{0,1},{1,2},{2,0}}", 8) == Groups(((0, 1), (1, 2), (2, 0)), is_pairs=True)


@pytest.mark.parametrize("attributes", ["replica_groups=wheel(3)", "replica_groups=mesh['a'=2] {'z'}"])
def test_a_form_that_is_not_known(attributes):
    assert groups_of(attributes, 8) is None


def test_domains():
    everything = Groups((tuple(range(128)),))
    # racks of 72: 72 devices in one, 56 in the other
    assert (everything.size, everything.crosses(72), everything.together(72)) == (128, True, 56)
    assert not everything.crosses(128)
    across = Groups(PAIRS_ACROSS)
    assert (across.size, across.crosses(4), across.together(4)) == (2, True, 1)
    assert not Groups(((0, 1), (4, 5))).crosses(4)
