"""Claims about the memory of a task's process."""

import subprocess
import sys

import numpy as np
import pytest
from support.eager import eager_execution
from support.service import service

_FAULTS_OF_A_STEP = """
import resource, sys
import numpy as np
from tfps import connect, malloc
if sys.argv[1] == "keep":
    assert malloc.keep_freed(heaps=1)
elif sys.argv[1] != "default":
    with connect(sys.argv[1]) as ps:
        if sys.argv[2] == "model":
            ps.pull_into({name: np.zeros(()) for name in ps.pull()})
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [np.ones(16 << 20, np.uint8) for _ in range(4)]
    del step
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def _faults_of_a_step(*how: str, **env: str) -> int:
    argv = [sys.executable, "-c", _FAULTS_OF_A_STEP, *how]
    return int(subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_freed_memory_serves_the_next_step() -> None:
    """A step that takes as much as the one before needs no new page; by default it needs some, again and again."""
    assert _faults_of_a_step("keep") < 50 < _faults_of_a_step("default")


def test_a_client_that_trains_a_model_keeps_freed_memory() -> None:
    """From the first pull into the model on; other clients, and those whose user has chosen, are left alone."""
    with eager_execution(), service() as running:
        with running.client() as ps:
            ps.init({"w": np.zeros(())})
        assert _faults_of_a_step(running.hosts, "model") < 50 < _faults_of_a_step(running.hosts, "arrays")
        assert _faults_of_a_step(running.hosts, "model", MALLOC_TRIM_THRESHOLD_="131072") > 50


_FLAGS_OF_THE_HEAP = """
import ctypes
from pathlib import Path
from tfps import malloc
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
assert malloc.keep_freed(heaps=1)
assert libc.malloc(64 << 20)
used = lambda: int(Path("/proc/self/statm").read_text().split()[1]) << 12
for _ in range(2):
    before = used()
    malloc.ask_for_large_pages()
    assert used() - before < 16 << 20  # a large page or two of the interpreter's own may come
    tensor = libc.malloc(64 << 20)
    libc.memset(tensor, 1, 64 << 20)
    libc.malloc_trim(0)  # as protobuf does
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    middle, area, flags = tensor + (32 << 20), "", []
    for text, after in zip(areas, areas[1:]):
        lines = [line for line in text.splitlines() if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]]
        first, last = (int(end, 16) for end in lines[-1].split(" ")[0].split("-"))
        if first <= middle < last:
            flags = after.splitlines()[0].split()
    print("hg" in flags)
"""


def test_what_is_taken_is_in_large_pages() -> None:
    """What the heap takes has the mark by which Linux gives large pages; to ask for them again takes no memory."""
    argv = [sys.executable, "-c", _FLAGS_OF_THE_HEAP]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\nTrue\n"


def test_a_limited_process_asks_for_nothing() -> None:
    """Where address space is limited, what is not used yet would count: the heap does not grow."""
    code = """
import resource
from pathlib import Path
from tfps import malloc
resource.setrlimit(resource.RLIMIT_AS, (32 << 30, resource.RLIM_INFINITY))
assert malloc.keep_freed(heaps=1)
size = lambda: int(Path("/proc/self/statm").read_text().split()[0]) << 12
before = size()
malloc.ask_for_large_pages()
print(size() - before < 64 << 20)
"""
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout == "True\n"


@pytest.mark.parametrize("env", [{"MALLOC_PERTURB_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}])
def test_what_the_user_set_stays(env: dict[str, str]) -> None:
    """With glibc's own variables in the environment, nothing is changed, nor asked of the heap."""
    code = """
import ctypes
from tfps import malloc
ctypes.CDLL = None
print(malloc.keep_freed(heaps=1), malloc.ask_for_large_pages())
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False None\n"
