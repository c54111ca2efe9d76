"""A platform that starts lost tasks again one by one."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.processes import PATIENCE, POWERS, Process

from tfps.cluster.ports import held_ports


class Platform:
    """Starts every task of a cluster, and again those that end with a code from 128 up or by a signal.

    Attributes:
        starts: By task, how often it was started.
        tasks: By task, its present process.
        codes: By task, the exit code of one that is not started again.
        pause_secs: How long it takes to start a task again.
        abandoned: Tasks that are not started again.
    """

    def __init__(
        self, directory: Path, ports: list[int], num_ps: int, flags: list[str], env: Mapping[str, str]
    ) -> None:
        hosts = [f"127.0.0.1:{port}" for port in ports]
        self._cluster = [f"--ps_hosts={','.join(hosts[:num_ps])}", f"--worker_hosts={','.join(hosts[num_ps:])}", *flags]
        self._directory, self._env = directory, env
        ps, workers = [f"ps/{i}" for i in range(num_ps)], [f"worker/{i}" for i in range(len(hosts) - num_ps)]
        self.starts = dict.fromkeys([*ps, *workers], 0)
        self.tasks = {name: self.start(name) for name in self.starts}
        self.codes: dict[str, int] = {}
        self.pause_secs = 0.0
        self.abandoned: set[str] = set()
        self._over = False
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def start(self, name: str) -> Process:
        """Start a task, and return its process."""
        job, index = name.split("/")
        self.starts[name] += 1
        output = self._directory / f"{job}-{index}-{self.starts[name]}.out"
        return Process(output, *self._cluster, f"--job_name={job}", f"--task_index={index}", **self._env)

    def _keep(self) -> None:
        while not self._over and len(self.codes) < len(self.tasks):
            for name, task in self.tasks.items():
                code = task.poll()
                if code is None or name in self.codes:
                    continue
                if (code < 0 or code >= 128) and self.starts[name] < 12 and name not in self.abandoned:
                    time.sleep(self.pause_secs)
                    self.tasks[name] = self.start(name)
                else:
                    self.codes[name] = code
            time.sleep(0.1)

    def wait_for_start(self, name: str, count: int) -> Process:
        """Wait until a task was started so often; return its process."""
        deadline = time.monotonic() + 60 * PATIENCE
        while self.starts[name] < count or self.tasks[name].poll() is not None:
            assert time.monotonic() < deadline, f"{name} is not started again\n{self.said()}"
            time.sleep(0.05)
        return self.tasks[name]

    def wait(self, secs: float) -> dict[str, int]:
        """Return every task's last exit code."""
        self._keeper.join(secs * PATIENCE)
        assert not self._keeper.is_alive(), f"not over after {secs} s: {self.codes}, {self.starts}\n{self.said()}"
        return self.codes

    def said(self) -> str:
        """Return what all tasks have said."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self._directory.glob("*.out")))

    def end(self) -> None:
        """End what runs."""
        self._over = True
        self._keeper.join(10)
        for task in self.tasks.values():
            task.end()


@contextlib.contextmanager
def platform(
    directory: Path, num_ps: int, num_workers: int, *flags: str, model: str = POWERS, **env: str
) -> Iterator[Platform]:
    """Run a cluster under such a platform."""
    file = directory / "model.py"
    file.write_text(model)
    given = [f"--model={file}", f"--model_dir={directory / 'm'}", "--save_checkpoint_secs=1", *flags]
    with held_ports(num_ps + num_workers) as ports:
        running = Platform(directory, ports, num_ps, given, env)
        try:
            yield running
        finally:
            running.end()
