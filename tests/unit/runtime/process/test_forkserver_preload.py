"""The first import of a fork server ends with the launcher, even with one that ended before it began.

It takes long: what it forks knows when it began.
"""

import subprocess
import sys

from support.processes import environment

from tfps.config.launch_protocol import FORK_SERVER_PARENT

IMPORT = "import tfps.runtime.process.forkserver_preload, sys; print('imported')"


def test_a_fork_server_whose_launcher_has_ended_ends_before_its_import_has() -> None:
    """It does not take its new parent, which adopts it, for the launcher."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(100)
    env = environment(**{FORK_SERVER_PARENT: str(gone.pid)})
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")


def test_what_is_forked_has_begun_with_the_import() -> None:
    """When a process began is noted before TensorFlow is imported."""
    code = f"""if True:
        import sys, time
        from tfps.runtime.process import tensorflow_import
        called = []
        tensorflow_import.load = lambda: called.append(time.monotonic())
        {IMPORT}
        from tfps.runtime.process import process_identity
        print(process_identity.BEGAN < called[0])
    """
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "imported\nTrue\n"
