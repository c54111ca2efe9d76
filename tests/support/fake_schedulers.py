"""Small stand-ins for the commands of PBS and LSF, which really run a script, as a process on this machine.

They print what the real ones do, as their manuals have it: qsub(1B), qstat(1B), qdel(1B), bsub(1), bjobs(1), bkill(1).
Where no such scheduler can be had, they show that the common part of a batch launcher works; not that a site's does.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("qsub", "qstat", "qdel", "pbs_tmrsh", "bsub", "bjobs", "bkill", "blaunch")
STATE = "FAKE_SCHEDULER"  # environment variable: the directory of the jobs
HOSTS = "FAKE_HOSTS"  # environment variable: the hosts that a job gets, one for each task


def install(directory: Path) -> dict[str, str]:
    """Write the commands into a directory; returns the environment in which they are found."""
    (directory / "bin").mkdir(parents=True)
    (directory / "jobs").mkdir()
    for name in COMMANDS:
        path = directory / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
        path.chmod(0o755)
    path = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, STATE: str(directory / "jobs"), HOSTS: "127.0.0.1 127.0.0.1 127.0.0.1"}


def _job(job_id: str) -> Path:
    return Path(os.environ[STATE], job_id)


def _submit(suffix: str) -> str:
    """Start the script on standard input under a small shell, which keeps its exit code; returns the job's id."""
    job_id = f"{len(list(_job('').iterdir())) + 1}{suffix}"
    job = _job(job_id)
    job.mkdir()
    (job / "script").write_text(sys.stdin.read())
    (job / "nodes").write_text("".join(f"{host}\n" for host in os.environ[HOSTS].split()))
    of_pbs = {"PBS_JOBID": job_id, "PBS_NODEFILE": str(job / "nodes")}
    env = os.environ | (of_pbs if suffix else {"LSB_JOBID": job_id, "LSB_HOSTS": os.environ[HOSTS]})
    keep = 'trap : TERM INT; bash "$1/script"; code=$?; echo $code >"$1/code.new"; mv "$1/code.new" "$1/code"'
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(
        ["sh", "-c", keep, "job", job], env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    (job / "pid").write_text(str(process.pid))
    return job_id


def _code(job_id: str) -> int | None:
    path = _job(job_id) / "code"
    return int(path.read_text()) if path.is_file() else None


def _end(job_id: str, *numbers: int) -> None:
    """Signal every process of a job, and after 60 s kill it: after longer than both schedulers wait, and tasks need."""
    (_job(job_id) / "killed").touch()
    group = int((_job(job_id) / "pid").read_text())
    with contextlib.suppress(ProcessLookupError):
        for number in numbers:
            os.killpg(group, number)
        deadline = time.monotonic() + 60
        while _code(job_id) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if _code(job_id) is None:
            os.killpg(group, signal.SIGKILL)
            (_job(job_id) / "code").write_text("137")


def _pbs(command: str, argv: list[str]) -> int:
    if command == "qsub":
        print(_submit(".fake"))
        return 0
    job_id = argv[-1]
    if not _job(job_id).is_dir():
        print(f"{command}: Unknown Job Id {job_id}", file=sys.stderr)
        return 153
    if command == "qdel":
        _end(job_id, signal.SIGTERM)
        return 0
    code = _code(job_id)
    status = "" if code is None else f"    Exit_status = {code}\n"
    print(f"Job Id: {job_id}\n    Job_Name = fake\n    job_state = {'R' if code is None else 'F'}\n{status}")
    return 0


def _lsf(command: str, argv: list[str]) -> int:
    if command == "bsub":
        print(f"Job <{_submit('')}> is submitted to default queue <normal>.")
        return 0
    job_id = argv[-1]
    if not _job(job_id).is_dir():
        print(f"Job <{job_id}> is not found", file=sys.stderr)
        return 255
    if command == "bkill":
        print(f"Job <{job_id}> is being terminated", flush=True)
        _end(job_id, signal.SIGINT, signal.SIGTERM)
        return 0
    code, killed = _code(job_id), (_job(job_id) / "killed").exists()
    reason = "TERM_OWNER: job killed by owner" if killed else "-"
    print("RUN|-|-" if code is None else f"EXIT|{code}|{reason}" if code or killed else "DONE|-|-")
    return 0


def main(command: str, argv: list[str]) -> int:
    """Be one of the commands."""
    if command in ("pbs_tmrsh", "blaunch"):
        host, *words = argv
        with open(_job(os.environ.get("PBS_JOBID") or os.environ["LSB_JOBID"]) / "remote", "a") as file:
            file.write(f"{host}\n")
        assert re.fullmatch(r"[\w./= -]+", " ".join(words)), words
        os.execvp(words[0], words)
    return _pbs(command, argv) if command.startswith("q") else _lsf(command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
