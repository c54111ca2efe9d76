"""``--topology``: graphs by name, as edges, and in files."""

import copy
import os
from pathlib import Path

import pytest

from tfps.config import command_line
from tfps.config.job_config import JobConfig
from tfps.config.topology import edges_of, topology, where


def test_a_file_becomes_its_edges(tmp_path: Path) -> None:
    """Comments and blank lines do not count; all tasks get the edges, which need no file."""
    file = tmp_path / "graph.txt"
    file.write_text("# a path\n\n2 1  # the end\n0 1\n")
    found = topology(str(file))
    assert (found, edges_of(found)) == ("0-1,1-2", [(0, 1), (1, 2)])
    assert where(found, (1, 2)) == f"--topology={file}, line 3,"
    assert topology(found) == found
    assert where(copy.deepcopy(found)) == f"--topology={file}"
    argv = JobConfig(mode="gossip", topology=found).to_argv()
    assert argv == ["--mode=gossip", "--topology=0-1,1-2"]
    assert command_line.parse(argv, ["mode", "topology"]).config.topology == found


def test_a_file_may_begin_with_a_mark_and_have_the_lines_of_windows(tmp_path: Path) -> None:
    """As Notepad writes it."""
    file = tmp_path / "graph.txt"
    file.write_bytes(b"\xef\xbb\xbf0 1\r\n1 2\r\n")
    assert topology(str(file)) == "0-1,1-2"


@pytest.mark.parametrize("kind", ["pipe", "directory", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_unread(kind: str, tmp_path: Path) -> None:
    """A pipe would block, and a device may have no end."""
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(ValueError, match=r"cannot be read \(no regular file\): give ring"):
        topology(str(path))


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """It is no graph of workers."""
    (tmp_path / "long").write_text("#" * 10_000_001)
    with pytest.raises(ValueError, match="is longer than 10,000,000 characters: give ring"):
        topology(str(tmp_path / "long"))


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """Each with its line; of very many, the first ten."""
    (tmp_path / "bad").write_text("0 1\n1 1\na b\n1 0\n")
    with pytest.raises(ValueError, match=r"itself in line 2: .*; has 'a b' in line 3: .*; has the edge .* 1 and 4:"):
        topology(str(tmp_path / "bad"))
    (tmp_path / "bad").write_text("x\n" * 12)
    with pytest.raises(ValueError, match=r"in line 10: [^;]*; and 2 more$"):
        topology(str(tmp_path / "bad"))


@pytest.mark.parametrize("name", ["ring", "complete", "exponential"])
def test_a_name_stays(name: str) -> None:
    """It is no file, even if there is one."""
    assert topology(name) == name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 1\n1 1\n", "joins worker 1 with itself in line 2: remove it"),
        ("0 1\n2 1\n\n1 2\n", "has the edge of workers 1 and 2 in lines 2 and 4: remove one"),
        ("0 1\n0 1 2\n", "has '0 1 2' in line 2: write two workers"),
        ("0 1\na b\n", "has 'a b' in line 2: write two workers"),
        ("0 -1\n", "has '0 -1' in line 1: write two workers"),
        ("# nothing\n", "has no edge: write one a line"),
        (b"\xff\xfe", "cannot be read (no text): give ring, complete, exponential, edges such as 0-1,1-2, or a file"),
    ],
)
def test_a_bad_file_is_named_with_its_line(text: str | bytes, problem: str, tmp_path: Path) -> None:
    """The message has the flag, the file, the line and the fix."""
    file = tmp_path / "graph.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    parsed = command_line.parse([f"--topology={file}"], ["topology"])
    assert parsed.problems["topology"].startswith(f"--topology={file} {problem}")


def test_what_is_no_file_and_no_name_is_refused() -> None:
    """Also edges on the command line that are wrong."""
    with pytest.raises(ValueError, match=r"No such file or directory\). Did you mean ring\? Give ring, complete"):
        topology("rign")
    with pytest.raises(ValueError, match="is empty: give ring"):
        topology("")
    with pytest.raises(ValueError, match="itself in part 2"):
        topology("0-1,1-1")
