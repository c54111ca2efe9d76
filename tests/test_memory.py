"""Claims about the memory of a task's process."""

import subprocess
import sys

_FAULTS_OF_A_STEP = """
import resource, sys
import numpy as np
from tfps.runtime import memory
if sys.argv[1] == "keep":
    assert memory.keep_freed(heaps=1)
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [np.ones(16 << 20, np.uint8) for _ in range(4)]
    del step
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def _faults_of_a_step(how: str, **env: str) -> int:
    argv = [sys.executable, "-c", _FAULTS_OF_A_STEP, how]
    return int(subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_freed_memory_serves_the_next_step() -> None:
    """A step that takes as much as the one before needs no new page; by default it needs some, again and again."""
    assert _faults_of_a_step("keep") < 50 < _faults_of_a_step("default")


def test_what_the_user_set_stays() -> None:
    """With glibc's own variables in the environment, nothing is changed."""
    code = "from tfps.runtime import memory; print(memory.keep_freed(heaps=1))"
    argv, env = [sys.executable, "-c", code], {"MALLOC_ARENA_MAX": "4"}
    assert subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout == "False\n"
