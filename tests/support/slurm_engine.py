"""A real Slurm of three nodes on this machine: n1 with two make-believe GPUs, n2 and n3.

The nodes' names do not resolve, and all three are the same machine: where a small site is at its worst.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.processes import alive, wait_gone

from tfps.cluster.ports import held_ports

NODES = ("n1", "n2", "n3")

_CONF = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire={requeue_secs}
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
KillWait={save_secs}
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.11 Port={ports[0]} CPUs=4 RealMemory=1000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.12 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.13 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""
_GRES = "NodeName=n1 Name=gpu File=/dev/null\nNodeName=n1 Name=gpu File=/dev/zero\n"


class Slurm:
    """The daemons, as children of this process."""

    def __init__(self, directory: Path, save_secs: int = 20, requeue_secs: int = 12) -> None:
        """Start them, and wait until the nodes are idle."""
        self.conf = directory / "slurm.conf"
        for name in ("state", "log", *(f"spool.{node}" for node in NODES)):
            (directory / name).mkdir(parents=True)
        with held_ports(4) as (port, *ports):
            values = {
                "directory": directory,
                "host": socket.gethostname().partition(".")[0],
                "port": port,
                "ports": ports,
            }
            self.conf.write_text(_CONF.format(**values, save_secs=save_secs, requeue_secs=requeue_secs))
        (directory / "gres.conf").write_text(_GRES)
        self._log = directory / "log"
        self._daemons = {"": self._start("slurmctld", "-D")}
        for node in NODES:
            self.boot(node)
        self.wait_idle(*NODES)

    def _start(self, *argv: str) -> "subprocess.Popen[bytes]":
        with open(self._log / "daemons", "ab") as log:
            return subprocess.Popen(argv, env=self.env(), stdout=log, stderr=log, start_new_session=True)

    def env(self) -> dict[str, str]:
        """Return the environment of a user."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**clean, "SLURM_CONF": str(self.conf)}

    def boot(self, node: str) -> None:
        """Start a node."""
        self._daemons[node] = self._start("slurmd", "-D", "-N", node)

    def crash(self, node: str) -> None:
        """Kill a node, and all that runs there, and let Slurm know."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        for pid in self.processes(f"SLURMD_NODENAME={node}"):
            for victim in (_parent(pid), pid):  # a task's slurmstepd, or its shell, then the task
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crash")  # Slurm itself notices later

    def processes(self, variable: str) -> list[int]:
        """Return the processes of this Slurm that have a variable in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                with contextlib.suppress(OSError):
                    env = (entry / "environ").read_bytes().split(b"\0")
                    if {variable.encode(), f"SLURM_CONF={self.conf}".encode()} <= set(env):
                        found.append(int(entry.name))
        return found

    def tasks(self) -> list[int]:
        """Return the processes of all jobs that still run."""
        return alive([pid for node in NODES for pid in self.processes(f"SLURMD_NODENAME={node}")])

    def ask(self, *argv: str) -> str:
        """Return what one of Slurm's commands prints."""
        result = subprocess.run(argv, env=self.env(), capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, (argv, result.stdout, result.stderr)
        return result.stdout

    def field(self, job_id: str, name: str) -> str:
        """Return what Slurm says of a job; of a heterogeneous one, of its first component."""
        line = self.ask("scontrol", "show", "job", "-o", job_id).splitlines()[0]
        return next(word.partition("=")[2] for word in line.split() if word.startswith(f"{name}="))

    def wait_state(self, job_id: str, *states: str, secs: float = 300.0) -> str:
        """Wait until a job is in one of some states, and return it."""
        deadline = time.monotonic() + secs
        while (state := self.field(job_id, "JobState")) not in states:
            assert time.monotonic() < deadline, self.ask("scontrol", "show", "job", job_id)
            time.sleep(0.2)
        return state

    def wait_idle(self, *nodes: str) -> None:
        """Wait until nodes are up and nothing runs there."""
        deadline = time.monotonic() + 100
        while set(nodes) - set(self._idle()):
            assert time.monotonic() < deadline, (self._log / "daemons").read_text()
            time.sleep(0.2)

    def _idle(self) -> list[str]:
        argv = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        result = subprocess.run(argv, env=self.env(), capture_output=True, text=True, timeout=100, check=False)
        return result.stdout.split()

    def stop(self) -> None:
        """End every job and every daemon."""
        subprocess.run(["scancel", "--user=root"], env=self.env(), capture_output=True, timeout=100, check=False)
        deadline = time.monotonic() + 100
        while self.tasks() and time.monotonic() < deadline:
            time.sleep(0.2)
        pids = [daemon.pid for daemon in self._daemons.values()]
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(100)
        wait_gone([*pids, *self.tasks()], 10)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def slurm(directory: Path, save_secs: int = 20) -> Iterator[Slurm]:
    """Yield a running Slurm."""
    missing = [tool for tool in ("slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
    assert not missing, f"{missing} missing: apt-get install --no-install-recommends slurm-wlm"
    running = Slurm(directory, save_secs)
    try:
        yield running
    finally:
        running.stop()
