"""The command line: its help, and bad input, which is answered before any socket is opened and TensorFlow imported."""

import builtins
import gzip
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes import REPO, TFPS, environment, run_tfps

import tfps
from tfps.cli import main, run
from tfps.cli.command import absolute, new_model_dir
from tfps.cluster.spec import Task
from tfps.config import command_line

GOOD = {"ps_hosts": "p0:2222", "worker_hosts": "w0:2222,w1:2222", "job_name": "worker", "task_index": "0"}
MEMBERS = {"ps": ["p0:1"], "worker": ["w0:1", "w1:1"]}
ME = {"type": "worker", "index": 0}
INPUT_FN = "def input_fn(mode, params, input_context):\n    return make()\n"

HOSTS = {  # a bad value, and how the answer tells the fix
    "": " is empty: give host:port,host:port.",
    "p0": "p0 has no port: write host:port",
    "p0:": "write a whole number from 1 to 65535.",
    "p0:0": "p0:0 has port 0: write a whole number from 1 to 65535.",
    "p0:-1": "p0:-1 has port -1: write a whole number from 1 to 65535.",
    "p0:65536": "p0:65536 has port 65536: write a whole number from 1 to 65535.",
    "p0:http": "p0:http has port http: write a whole number from 1 to 65535.",
    "p0:1, p1:1": "' p1:1' has a blank or a control character: write host:port,host:port without any.",
    "p0:1,": "address 2 is empty: write host:port, or drop a comma.",
    "http://p0:1": "http://p0:1 is a URL: write host:port alone.",
    "me@p0:1": "me@p0:1 names a user: write host:port alone.",
    "p0/x:1": "p0/x:1 has a slash: write host:port alone.",
    "p0:1,p1:1,p0:1": "p0:1 of task 2 is the same address as p0:1 of task 0; each task needs its own.",
    "localhost:1,127.0.0.1:1": "127.0.0.1:1 of task 1 is the same address as localhost:1 of task 0",
    "::1:2222": "::1:2222 is IPv6 without brackets: write [address]:port.",
    "[::1]": "[::1] has no port: write host:port",
    "[::zz]:1": "[::zz]:1 has no IPv6 address in its brackets: write [address]:port",
    "pö:1": "'pö:1' is not ASCII: write the host's ASCII name.",
    "x" * 65536: "(65536 characters) has no port: write host:port",
    ",".join(f"p{n}:1" for n in range(10_000)): " has 10,000 addresses: a cluster can have at most 4,096 tasks.",
    "p0:1\np1:1": r"'p0:1\np1:1' has a blank or a control character: write host:port,host:port without any.",
    "$(x):1": "$(x):1 has a bad host name: use letters, digits",
    "p0:1;p1:1": "p0:1;p1:1 has more than one colon: write host:port,host:port.",
}

IDENTITY: Mapping[str, tuple[Mapping[str, str | None], str]] = {
    "unknown job": ({"job_name": "boss"}, "--job_name=boss is not one of ps, worker, evaluator."),
    "empty job": ({"job_name": ""}, "--job_name='' is not one of ps, worker, evaluator."),
    "upper-case job": ({"job_name": "PS"}, "--job_name=PS is not one of ps, worker, evaluator. Did you mean ps?"),
    "no job": (
        {"job_name": None},
        "--job_name is missing: give this task's role: --job_name=ps, worker or evaluator.",
    ),
    "no index": ({"task_index": None}, "--task_index is missing: give this task's index in its role"),
    "negative": ({"task_index": "-1"}, "--task_index=-1 is out of range for job 'worker', which has 2 tasks (0-1)."),
    "count": ({"task_index": "2"}, "--task_index=2 is out of range for job 'worker', which has 2 tasks (0-1)."),
    "fraction": ({"task_index": "1.5"}, "--task_index=1.5 must be a whole number from 0 to 2^63 - 1."),
    "2^63": ({"task_index": str(2**63)}, f"--task_index={2**63} must be a whole number from 0 to 2^63 - 1."),
    "no ps": (
        {"ps_hosts": None},
        "--ps_hosts is missing: give the parameter servers: --ps_hosts=host:port,host:port; --mode=allreduce or "
        "--mode=gossip needs none.",
    ),
    "no workers": ({"worker_hosts": None}, "--worker_hosts is missing: give the workers: --worker_hosts=host:port"),
    "other size": ({"num_workers": "3"}, "--num_workers=3, but --worker_hosts has 2: drop --num_workers or correct"),
    "same address": ({"ps_hosts": "w1:2222"}, "--worker_hosts: w1:2222 is the same address as w1:2222 of --ps_hosts"),
    "evaluator": ({"job_name": "evaluator"}, "--model_dir is missing: the evaluator reads the checkpoints there."),
}

TF_CONFIG: Mapping[str, tuple[Any, Sequence[str], str]] = {
    "not JSON": ("{'cluster'", [], "TF_CONFIG is not JSON: "),
    "cut off": (json.dumps({"cluster": MEMBERS})[:-9], [], "TF_CONFIG is not JSON: "),
    "a list": ([], [], "TF_CONFIG must be an object like"),
    "a key twice": ('{"task": {}, "task": {}, "cluster": {}}', [], "TF_CONFIG has the key task twice: drop one."),
    "a wrong cluster": ({"cluster": [], "task": ME}, [], "TF_CONFIG cluster must be an object {...}, but is a list."),
    "a wrong job": (
        {"cluster": {**MEMBERS, "ps": "p0:1"}, "task": ME},
        [],
        'TF_CONFIG cluster.ps must be a list of "host:port" strings, but has "p0:1".',
    ),
    "a wrong index": (
        {"cluster": MEMBERS, "task": {"type": "worker", "index": "x"}},
        [],
        'TF_CONFIG task.index is "x": it must be a whole number, from 0.',
    ),
    "contradicted": (
        {"cluster": MEMBERS, "task": ME},
        ["--job_name=ps"],
        "--job_name=ps, but TF_CONFIG says job worker: drop the flag or correct TF_CONFIG.",
    ),
    "contradicted hosts": (
        {"cluster": MEMBERS, "task": ME},
        ["--ps_hosts=q0:1"],
        "--ps_hosts=q0:1, but TF_CONFIG says ps p0:1: drop the flag or correct TF_CONFIG.",
    ),
    "an evaluator": (
        {"cluster": {**MEMBERS, "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 0}},
        [],
        "--model_dir is missing: the evaluator reads the checkpoints there.",
    ),
    "sparse": (
        {"cluster": {"ps": ["p0:1"], "worker": {"1": "w1:1"}}, "task": {"type": "worker", "index": 1}},
        [],
        "TF_CONFIG cluster.worker is an object, the sparse form",
    ),
}

NUMBERS = {
    "--learning_rate=nan": "must be a finite number greater than 0.",
    "--learning_rate=-0.1": "must be a finite number greater than 0.",
    "--batch_size=0": "must be a whole number from 1 to 2^31 - 1.",
    "--max_steps=0": "must be a whole number from 1 to 2^63 - 1.",
    "--max_steps=-1": "must be a whole number from 1 to 2^63 - 1.",
    f"--max_steps={2**63}": "must be a whole number from 1 to 2^63 - 1.",
    "--steps_to_validate=-100": "must be a whole number from 1 to 2^63 - 1.",
    "--save_checkpoint_secs=-60": "must be a finite number greater than 0.",
    "--start_timeout_secs=-1": "must be a finite number greater than 0.",
}

MODELS: Mapping[str, tuple[str | None, str]] = {  # what mine.py holds, and what is said of it
    "no such file": (None, "--model=mine.py: no such file. Give a .py file that defines input_fn and model_fn."),
    "syntax error": (f"{INPUT_FN}def model_fn(:\n    return\n", "mine.py, line 3: invalid syntax\n    def model_fn(:"),
    "no model_fn": (INPUT_FN, "mine.py defines no model_fn: add def model_fn(features, labels, mode, params)."),
    "wrong parameters": (
        f"{INPUT_FN}def model_fn(x): return y\n",
        "line 3: model_fn must take model_fn(features, labels,",
    ),
    "the wrong thing": (
        f"{INPUT_FN}def model_fn(features, labels, mode, params):\n    return tf.reduce_mean(features)\n",
        "line 4: model_fn must return a tfps.ModelSpec.\n    return tf.reduce_mean(features)",
    ),
    "nothing": (
        f"{INPUT_FN}def model_fn(features, labels, mode, params):\n    loss = 3\n",
        "line 3: model_fn returns nothing; it must return a tfps.ModelSpec.",
    ),
}


@pytest.fixture(autouse=True)
def _untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in an empty directory, outside any cluster; fail if a socket is opened or TensorFlow imported."""
    for name in [n for n in os.environ if n == "TF_CONFIG" or n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    touched: list[str] = []
    really_import = builtins.__import__

    def look(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "tensorflow":
            touched.append(name)
        return really_import(name, *args, **kwargs)

    really_open = socket.socket.__init__

    def open_socket(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # others are those of tests before
            touched.append("socket")
            raise AssertionError("a socket was opened")
        really_open(self, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", look)
    monkeypatch.setattr(socket.socket, "__init__", open_socket)
    yield
    assert touched == []


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command which must be refused, and returns what it says."""

    def run(*argv: str, code: int = 2) -> str:
        assert main.main(argv) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert all(line.startswith(("error: ", "    ")) and line.isprintable() for line in err.splitlines()), err
        assert len(err) < 3000
        return err

    return run


def task(**changes: str | None) -> list[str]:
    """Return the command line of a task with some flags changed or, with ``None``, left out."""
    return ["run", *(f"--{name}={value}" for name, value in {**GOOD, **changes}.items() if value is not None)]


@pytest.mark.parametrize("flag", ["ps_hosts", "worker_hosts"])
@pytest.mark.parametrize("value", HOSTS, ids=lambda value: value[:30])
def test_bad_hosts(refused: Any, flag: str, value: str) -> None:
    """Each bad address is one plain line with the flag, the address and how to write it."""
    [line] = refused(*task(**{flag: value}, task_index="0", job_name="ps")).splitlines()
    assert line.startswith(f"error: --{flag}")
    assert HOSTS[value] in line


def test_ipv6_in_brackets_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 in brackets is a good address, and the task gets as far as being one."""
    tasks: list[Task] = []
    monkeypatch.setattr(run, "_be_task", lambda _job, _members, me, _flag: tasks.append(me) or 0)
    assert main.main(task(ps_hosts="[::2]:2222", worker_hosts="[fe80::1]:2222,[fe80::2]:2222", task_index="1")) == 0
    assert tasks == [Task("worker", 1)]


@pytest.mark.parametrize("case", IDENTITY)
def test_bad_identity(refused: Any, case: str) -> None:
    """For a task that is none of the cluster's, the answer lists those that are."""
    changes, says = IDENTITY[case]
    [line] = refused(*task(**changes)).splitlines()
    assert line.startswith(f"error: {says}")


@pytest.mark.parametrize("case", TF_CONFIG)
def test_bad_tf_config(refused: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A TF_CONFIG that cannot be meant is refused with the place in it and the fix, flags or not."""
    reported, flags, says = TF_CONFIG[case]
    monkeypatch.setenv("TF_CONFIG", reported if isinstance(reported, str) else json.dumps(reported))
    for argv in (["run", *flags], flags):
        assert refused(*argv).startswith(f"error: {says}")


@pytest.mark.parametrize("flag", NUMBERS)
def test_bad_numbers(refused: Any, flag: str) -> None:
    """A number out of its bounds is refused with the bounds, by a task and by a launcher."""
    for command in (task(), ["launch"], ["--num_ps=1", *task()[1:]]):
        assert refused(*command, flag) == f"error: {flag} {NUMBERS[flag]}\n"


@pytest.mark.parametrize("case", MODELS)
def test_bad_models(refused: Any, tmp_path: Path, case: str) -> None:
    """A mistake in a model's file is shown with the user's own line, by every command that runs models."""
    text, says = MODELS[case]
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    for command in (task(), ["launch"], ["plan"]):
        said = refused(*command, "--model=mine.py")
        assert said.startswith("error: --model=mine.py")
        assert says in said


def idx(*shape: int, kind: int = 8, data: bytes | None = None) -> bytes:
    """Return a file in MNIST's format, all zeros by default."""
    size = 1
    for length in shape:
        size *= length
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + (bytes(size) if data is None else data)


DATA: Mapping[str, tuple[bytes, str]] = {  # the images' file; the labels' is good, for 10 images
    "truncated": (idx(10, 28, 28)[:-1], "train-images-idx3-ubyte"),
    "truncated gzip": (gzip.compress(idx(10, 28, 28))[:-9], "train-images-idx3-ubyte"),
    "wrong magic": (b"\x89PNG" + bytes(9000), "train-images-idx3-ubyte"),
    "wrong type": (idx(10, 28, 28, kind=0x0D, data=bytes(10 * 28 * 28 * 4)), "train-images-idx3-ubyte"),
    "wrong shape": (idx(10, 27, 28), "train-images-idx3-ubyte"),
    "other count": (idx(9, 28, 28), "train-"),
    "empty file": (b"", "train-images-idx3-ubyte"),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data(refused: Any, tmp_path: Path, case: str) -> None:
    """Damaged data is exit 65, before any task is started, with the flag and the file."""
    images, says = DATA[case]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "data" / "train-labels-idx1-ubyte").write_bytes(idx(10))
    for command in (task(), ["launch"], ["plan"]):
        said = refused(*command, "--model=mnist", "--data_dir=data", code=65)
        assert said.startswith("error: --data_dir=data")
        assert says in said


def test_no_data(refused: Any, tmp_path: Path) -> None:
    """Data that is not there is exit 65 too, as is data for fewer images than workers."""
    assert "--data_dir=nowhere" in refused("launch", "--model=mnist", "--data_dir=nowhere", code=65)
    assert "--data_dir=nowhere" in refused("launch", "--model=linear", "--data_dir=nowhere", code=65)
    data = tmp_path / "data"
    data.mkdir()
    assert "--data_dir=data is empty" in refused("launch", "--model=mnist", "--data_dir=data", code=65)
    (data / "train-images-idx3-ubyte").write_bytes(idx(10, 28, 28))
    (data / "train-labels-idx1-ubyte").write_bytes(idx(10))
    said = refused("launch", "--model=mnist", "--data_dir=data", "--num_workers=11", code=65)
    assert "--data_dir=data" in said
    assert "11 workers" in said


def test_all_problems_are_reported_at_once(refused: Any) -> None:
    """Flags, cluster, model and data are all checked before the answer; each problem is reported once, with exit 2."""
    said = refused(
        *task(ps_hosts="p0", task_index="1.5", job_name=None), "x", "--zzz", "--seed=-1", "--model=m.py", "--data_dir=d"
    )
    starts = (
        "x is",
        "--zzz is",
        "--task_index=1.5 must",
        "--seed=-1 must",
        "--model=m.py: no",
        "--ps_hosts: p0 has",
        "--job_name is",
    )
    lines = said.splitlines()
    assert len(lines) == len(starts) + 1
    for start in (*starts, "--data_dir=d"):
        assert sum(line.startswith(f"error: {start}") for line in lines) == 1


def test_without_a_cluster_a_task_says_how_to_give_one(refused: Any) -> None:
    """``tfps run`` alone names the three ways to give a cluster, and ``tfps launch``."""
    [line] = refused("run").splitlines()
    for way in ("--ps_hosts", "--worker_hosts", "--job_name", "--task_index", "TF_CONFIG", "srun", "`tfps launch`"):
        assert way in line


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--max_steps=5", "--help"]])
def test_help_is_one_screen(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """``tfps`` alone and ``tfps --help`` list every command, an example to try and the classic command line."""
    assert main.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) <= 24
    for name, verb in main.COMMANDS.items():
        assert f"  {name:<8} {verb.summary}" in out.splitlines()
    assert "  tfps launch --num_ps=1 --num_workers=2" in out
    assert "  python -m tfps --ps_hosts=" in out


@pytest.mark.parametrize("verb", main.COMMANDS)
def test_help_of_a_command(capsys: pytest.CaptureFixture[str], verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tfps COMMAND --help`` lists exactly the command's flags, within the terminal's width; its example is valid."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main([verb, "--model_dir=x", "--help"]) == 0
    out = capsys.readouterr().out
    flags = [line.split()[0].removeprefix("--") for line in out.splitlines() if line.startswith("  --")]
    reported = main.COMMANDS[verb]
    assert flags == list(reported.flags)
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("  tfps"))
    program, name, *argv = shlex.split(reported.example)
    assert (program, name) == ("tfps", verb)
    if reported.argument:
        assert argv.pop(0) == "slurm:4711"
    assert f"  {reported.example}" in out.splitlines()
    assert command_line.parse(argv, flags).problems == {}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``tfps --version`` is the package's."""
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfps {tfps.__version__}\n"


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        *(("lanch", " Did you mean launch?"), ("evla", " Did you mean eval?"), ("train.py", "")),
        ("serve", " Give tfps launch --serve, or tfps run --serve for one server."),
    ],
)
def test_an_unknown_command(refused: Any, verb: str, hint: str) -> None:
    """A word that is no command is named, a near miss with the command meant."""
    assert refused(verb, "--num_ps=1") == f"error: {verb} is not a command of tfps.{hint} See tfps --help.\n"


def test_a_flag_of_another_command(refused: Any) -> None:
    """``launch`` makes its own cluster, so the classic flags are not ignored but refused; so are others elsewhere."""
    ends = "is not a flag of tfps launch: leave it out. It is one of tfps run, submit and doctor.\n"
    assert refused("launch", "--ps_hosts=h:1") == f"error: --ps_hosts {ends}"
    of_task = "is not a flag of tfps launch: leave it out. It is one of tfps run and doctor.\n"
    assert refused("launch", "--task_index=0") == f"error: --task_index {of_task}"
    whose = "It is one of tfps run, launch, submit, plan and doctor.\n"
    assert refused("eval", "--max_steps=5") == f"error: --max_steps is not a flag of tfps eval: leave it out. {whose}"
    assert refused("run", "--export_dir=x").splitlines()[0].endswith("leave it out. It is one of tfps export.")


@pytest.mark.parametrize("verb", main.COMMANDS)
def test_an_unknown_flag_leads_to_the_help_of_its_command(refused: Any, verb: str) -> None:
    """``--help`` alone is the list of commands, which has no flags."""
    line = f"error: --zzz is not a known flag. See tfps {verb} --help."
    assert line in refused(verb, "--zzz").splitlines()
    assert line.replace(verb, "run") in refused("--zzz").splitlines()


@pytest.mark.parametrize("verb", ["run", "doctor"])
def test_a_first_port_where_each_address_has_its_own(refused: Any, verb: str) -> None:
    """``--port_base`` would set no port: it is refused with everything else, not ignored."""
    flags = [f"--{name}={GOOD[name]}" for name in ("ps_hosts", "worker_hosts", "job_name", "task_index")]
    [line] = refused(verb, *flags, "--port_base=9000").splitlines()
    assert line == "error: --port_base is for a step of Slurm: leave it out. Each address has its own port here."


@pytest.mark.parametrize("model", ["base", "base.py", "bad.base", "bad/base.py", "/a.b/base.py"])
def test_a_new_directory_has_the_models_short_name(model: str) -> None:
    """A module's directory is named by its last part, as a file's by its name."""
    assert re.fullmatch(r"runs/base-\d{8}-\d{6}-\d+", new_model_dir(model))


@pytest.mark.parametrize("verb", ["eval", "export"])
def test_no_trained_job(refused: Any, tmp_path: Path, verb: str) -> None:
    """Without a directory it is exit 2; without a checkpoint in it, or a damaged job.json, exit 65, with the path."""
    assert refused(verb) == "error: --model_dir is missing: give the directory of a trained job.\n"
    said = refused(verb, "--model_dir=.", code=65)
    assert said == "error: --model_dir=. holds no checkpoint (model.ckpt-*): train first.\n"
    said = refused(verb, "--model_dir=nowhere", code=65)
    assert said == "error: --model_dir=nowhere does not exist: give the directory of a trained job.\n"
    said = refused(verb, "--checkpoint_path=model.ckpt-1", code=65)
    assert said.startswith("error: --checkpoint_path=model.ckpt-1 is not a checkpoint: there is no model.ckpt-1.index.")
    (tmp_path / "job.json").write_text("[")
    assert refused(verb, "--model_dir=.", code=65).startswith("error: job.json cannot be read: ")
    wrong = [("model", "null"), ("data_dir", "7"), ("batch_size", '"x"'), ("seed", "{}"), ("batch_size", "true")]
    wrong += [("batch_size", "0"), ("num_ps", "-3"), ("min_slice_mb", "NaN"), ("optimizer", '"junk"')]
    for name, value in wrong:
        (tmp_path / "job.json").write_text(f'{{"{name}": {value}}}')
        reported = f"error: job.json cannot be read: {name} is {value}. Fix it, or move it away and give the flags.\n"
        assert refused(verb, "--model_dir=.", code=65) == reported


REAL: Mapping[str, tuple[list[str], int, str]] = {
    "hosts": (task(ps_hosts=",".join(f"p{n}:1" for n in range(10_000))), 2, "--ps_hosts has 10,000 addresses"),
    "identity": (
        task(task_index="7")[1:],
        2,
        "--task_index=7 is out of range for job 'worker', which has 2 tasks (0-1).",
    ),
    "numbers": (["launch", "--learning_rate=nan"], 2, "--learning_rate=nan must be a finite number greater than 0."),
    "model": (["launch", "--model=mine.py"], 2, "mine.py, line 2: model_fn must take model_fn(features, labels,"),
    "data": (["launch", "--model=mnist", "--data_dir=nowhere"], 65, "--data_dir=nowhere"),
    "no checkpoint": (["eval", "--model_dir=."], 65, "--model_dir=. holds no checkpoint"),
}


@pytest.mark.parametrize("case", REAL)
def test_real_processes_answer_at_once(tmp_path: Path, case: str) -> None:
    """A real process answers bad input with its exit code before it imports TensorFlow, which fails here."""
    argv, code, says = REAL[case]
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "mine.py").write_text("def input_fn(a, b, c): return d\ndef model_fn(): return e\n")
    ended = run_tfps(*argv, cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "tensorflow"]


@pytest.mark.parametrize(
    ("argv", "code", "reported"),
    [
        (["plan", "--model=linear"], 0, ""),
        (["plan", "--model=mine.py"], 2, "no such file"),
        (["submit", "--to=kubernetes", "--dry_run", "--image=a"], 2, "error: the working directory is gone: "),
    ],
)
def test_a_working_directory_that_is_gone(tmp_path: Path, argv: list[str], code: int, reported: str) -> None:
    """A model that is installed needs none; what does says so."""
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", 'rmdir ../gone && exec "$@"', "sh", *TFPS, *argv]
    ended = subprocess.run(
        command, cwd=tmp_path / "gone", capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert reported in ended.stderr
    assert "Traceback" not in ended.stderr


def test_tf_config_makes_a_task_of_a_bare_command(tmp_path: Path) -> None:
    """With TF_CONFIG set, ``python -m tfps`` alone is a task, not a call for help."""
    ended = run_tfps(cwd=tmp_path, TF_CONFIG='{"cluster": {"ps": ["p0:1"]}, "task": {"type": "ps", "index": 0}}')
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: TF_CONFIG has no cluster.worker")
    assert run_tfps(cwd=tmp_path).stdout.startswith("TensorFlow 1.x-style parameter-server training")


def test_help_and_version_are_commands_too(capsys: pytest.CaptureFixture[str]) -> None:
    """``tfps help plan`` and ``tfps version`` show what the flags do, and ``tfps help`` the same and the pages."""
    for words, flags in ((["help", "plan"], ["plan", "--help"]), (["version"], ["--version"]), (["help"], ["--help"])):
        shown = []
        for argv in (words, flags):
            assert main.main(argv) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] != "" or (words == ["help"] and shown[0].startswith(shown[1]))


def test_a_path_goes_up_from_where_a_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``link/../run`` is for tfps what it is for every other program; a path without it keeps its links."""
    (tmp_path / "deep" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/a")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/../run") == f"{tmp_path}/deep/run"
    assert absolute("./link/run/") == f"{tmp_path}/link/run"


LIMITED = """
import sys, threading
from tfps.cli.main import main

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
sys.exit(main(sys.argv[1:]))
"""


def test_a_limit_on_processes_is_reported(tmp_path: Path) -> None:
    """Where no thread can be started any more, that is no mistake of tfps, and it says what to raise."""
    command = [sys.executable, "-c", LIMITED, "launch", "--model=linear", f"--model_dir={tmp_path}"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    reported = (
        "no more threads or processes can be started: raise the limit on them, see ulimit -u, or that of the container"
    )
    assert (ended.returncode, ended.stderr) == (2, f"error: {reported}.\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_reason_to_fail(tmp_path: Path, closed: str) -> None:
    """What would be said goes nowhere, and no file is taken for a stream."""
    command = f"exec {sys.executable} -m tfps plan --model=linear --num_ps=1 --num_workers=1 {closed}"
    ended = subprocess.run(["sh", "-c", command], env=environment(), cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert b"Traceback" not in ended.stderr
