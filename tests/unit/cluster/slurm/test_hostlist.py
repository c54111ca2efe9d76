"""The lists that Slurm writes."""

import time

import pytest

from tfps.cluster.slurm import hostlist

MOST = 4096


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-2],m5,o[03-06]", "n1 n2 m5 o03 o04 o05 o06"),
        ("r[1-2]n[1-3]", "r1n1 r1n2 r1n3 r2n1 r2n2 r2n3"),
        ("n[8-10,012],m5", "n8 n9 n10 n012 m5"),
        ("n[3,1-2]", "n3 n1 n2"),
        ("n[001-3]", "n001 n002 n003"),
        ("n[10-11],n9", "n10 n11 n9"),
    ],
)
def test_a_nodelist_expands_as_scontrol_does(text: str, names: str) -> None:
    """The names, their padding and their order are those of ``scontrol show hostnames``."""
    assert hostlist.expand_nodes(text, MOST) == names.split()


@pytest.mark.parametrize(
    "text", ["n[1-2", "n[]", "n[3-1]", "n[1-2]]", "n[[1-2]]", "n[1,,2]", "n[a-b]", "n[1-2-3]", "]"]
)
def test_a_malformed_nodelist_is_refused(text: str) -> None:
    """What is not a nodelist is a ``ValueError`` that shows one."""
    with pytest.raises(ValueError, match=r"nodelist like n\[1-2\]"):
        hostlist.expand_nodes(text, MOST)


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999]", "n[1-4097]", "a[1-99]b[1-99]", "n[1-3000],m[1-3000]", ",".join(["n"] * 5000), "[1-9]" * 200],
)
def test_a_nodelist_of_too_many_nodes_is_refused_at_once(text: str) -> None:
    """The limit is applied before anything of that size is made."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="4,096 tasks"):
        hostlist.expand_nodes(text, MOST)
    assert time.monotonic() - began < 10


def test_tasks_per_node_expand() -> None:
    """``3(x2),2,1`` is 3, 3, 2, 1."""
    assert hostlist.expand_counts("3(x2),2,1", MOST) == [3, 3, 2, 1]
