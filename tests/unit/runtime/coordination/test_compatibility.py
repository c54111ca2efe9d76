"""What tasks have to agree on: each difference by itself, and tasks that were really started otherwise."""

import contextlib
import hashlib
import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import (
    cluster_of,
    dataset_of,
    job,
    linear,
    model_of,
    session_config,
    shared_servers,
    target_of,
    variables_of,
    wait_until,
)
from support.listeners import Speaker
from support.processes import Process, processes, summary

import tfps
from tfps.cluster import rendezvous
from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, PeerLostError, StoppedError
from tfps.runtime import task as runtime_task
from tfps.runtime.checkpoint.directory import list_checkpoints, step_in
from tfps.runtime.coordination import compatibility, job_state
from tfps.runtime.coordination.job_state import Phase, WorkerTotals
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training import parameter_server
from tfps.runtime.training.worker import Worker
from tfps.storage import write_json

HERE = {"model": "mine.py", "max_steps": 100, "learning_rate": 0.5, "optimizer": "adam"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that PS of an earlier job have to leave."""
    monkeypatch.setattr(rendezvous, "LEAVING_SECS", 0.3)


def terms(num_ps: int = 1, num_workers: int = 2, tensorflow: str = "2.21.0", **flags: Any) -> str:
    """Return the terms of a task with these flags."""
    members = Cluster(("p:1",) * num_ps, ("w:1",) * num_workers)
    return compatibility.fingerprint(JobConfig(**{**HERE, **flags}), members, tensorflow)


def refusal(mine: str, *theirs: str) -> list[str]:
    """Return in which words a worker is refused by PS that stay."""
    with contextlib.ExitStack() as stack:
        there = [stack.enter_context(contextlib.closing(Speaker(Task("ps", i)))) for i in range(len(theirs))]
        cluster = Cluster(tuple(each.address for each in there), ("w:1",))
        with pytest.raises(ConfigError) as caught:
            compatibility.check(mine, theirs, cluster)
    addresses = {each.address: f"h{i}:2222" for i, each in enumerate(there)}
    lines = caught.value.problems
    for address, name in addresses.items():
        lines = [line.replace(address, name) for line in lines]
    assert all(line.isprintable() for line in lines)
    return lines


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"mode": "sync"}, "--mode=async here, sync on"),
        ({"wire": "plain"}, "--wire=packed here, plain on"),
        ({"optimizer": None}, "--optimizer=adam here, none on"),
        ({"learning_rate": 0.25}, "--learning_rate=0.5 here, 0.25 on"),
        ({"model": "/else/where/other.py"}, "--model=mine.py here, other.py on"),
        ({"max_steps": 101}, "--max_steps=100 here, 101 on"),
        ({"ps_strategy": "round_robin"}, "--ps_strategy=greedy here, round_robin on"),
        ({"min_slice_mb": 0.5}, "--min_slice_mb=64 here, 0.5 on"),
        ({"num_ps": 2}, "--ps_hosts has 1 here, 2 on"),
        ({"num_workers": 3}, "--worker_hosts has 2 here, 3 on"),
    ],
    ids=str,
)
def test_a_difference_is_refused(flags: dict[str, Any], says: str) -> None:
    """Whatever changes the graph or the protocol has to be the same; a line names the flag, both values and the PS."""
    assert refusal(terms(), terms(**flags)) == [f"{says} ps/0 (h0:2222): give every task the same value."]


def test_another_file_of_the_model_is_refused(tmp_path: Path) -> None:
    """A file that was edited after the PS had started, or is another on some host, is refused; a missing one is not."""
    file = tmp_path / "mine.py"
    file.write_text("rate = 1\n")
    before = terms(model=str(file))
    file.write_text("rate = 3\n")
    [line] = refusal(terms(model=str(file)), before)
    assert line.startswith(
        "--model=mine.py here differs from the file on ps/0 (h0:2222): it was edited in the meantime"
    )
    compatibility.check(terms(model=str(file)), [terms(model="/nowhere/mine.py")], Cluster(("p:1",), ("w:1",)))


def test_another_file_that_the_model_imports_is_refused(tmp_path: Path) -> None:
    """A restarted worker would train with other code than the rest; a host that lacks such a file is not refused."""
    (tmp_path / "mine.py").write_text("import json, layers\nfrom package import rates\n")
    (tmp_path / "layers.py").write_text("import sizes\n")
    (tmp_path / "sizes.py").write_text("size = 1\n")
    (tmp_path / "decay.py").write_text("factor = 1\n")
    (tmp_path / "unused.py").write_text("size = 1\n")
    (tmp_path / "package").mkdir()
    for name in ("__init__", "rates"):
        (tmp_path / "package" / f"{name}.py").write_text("import decay\n")
    before = terms(model=str(tmp_path / "mine.py"))
    (tmp_path / "unused.py").write_text("size = 2\n")
    assert terms(model=str(tmp_path / "mine.py")) == before
    (tmp_path / "sizes.py").write_text("size = 2\n")
    (tmp_path / "decay.py").write_text("factor = 2\n")
    (tmp_path / "package" / "rates.py").write_text("import decay\nrate = 2\n")
    lines = refusal(terms(model=str(tmp_path / "mine.py")), before)
    text = "{}, which --model=mine.py imports, here differs from the file on ps/0 (h0:2222): it was edited"
    assert [line.split(" in the meantime")[0] for line in sorted(lines)] == [
        text.format("decay.py"),
        text.format("package/rates.py"),
        text.format("sizes.py"),
    ]
    alone = tmp_path / "alone" / "mine.py"
    alone.parent.mkdir()
    alone.write_text((tmp_path / "mine.py").read_text())
    compatibility.check(before, [terms(model=str(alone))], Cluster(("p:1",), ("w:1",)))


def test_another_file_of_a_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dotted module is compared as a file is, with what it imports of its own package, and is not imported."""
    texts = {"__init__": "", "ctr": "from . import layers\nfrom compared.wide.rates import rate\nraise SystemExit\n"}
    texts |= {"layers": "import json\nfrom .sizes import size\n", "sizes": "size = 1\n", "unused": "size = 1\n"}
    texts |= {"wide/__init__": "", "wide/rates": "from ..deep import x\nfrom . import layers\n", "deep": "x = 1\n"}
    (tmp_path / "compared" / "wide").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "compared" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = terms(model="compared.ctr")
    for name in texts:
        with (tmp_path / "compared" / f"{name}.py").open("a") as file:
            file.write("# edited\n")
    lines = refusal(terms(model="compared.ctr"), before)
    imported = ["deep.py", "layers.py", "sizes.py", "wide/__init__.py", "wide/rates.py"]
    assert [line.split(" here differs")[0] for line in sorted(lines)] == [
        "--model=compared.ctr",
        *(f"{name}, which --model=compared.ctr imports," for name in imported),
    ]


def test_a_module_in_no_package_is_compared_without_its_neighbors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be installed beside all other packages; a built-in model is of tfps's version; others are not there."""
    (tmp_path / "alone_there.py").write_text("import neighbor\n")
    (tmp_path / "neighbor.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    files = {model: json.loads(terms(model=model))["files"] for model in ("alone_there", "linear", "not_there.ctr")}
    assert files.pop("alone_there") == {"model": hashlib.sha256(b"import neighbor\n").hexdigest()}
    assert files == {"linear": {"model": ""}, "not_there.ctr": {"model": ""}}


def test_what_is_each_tasks_own_may_differ() -> None:
    """Role, paths, batch size, intervals and patience may differ, as may the names of hosts."""
    own = {"data_dir": "d", "model_dir": "m", "batch_size": 7, "save_checkpoint_secs": 1.0}
    own |= {"steps_to_validate": 1, "start_timeout_secs": 5.0, "job_name": "ps", "ps_hosts": "localhost:1"}
    compatibility.check(terms(), [terms(**own, model="/else/where/mine.py")], Cluster(("p:1",), ("w:1",)))


def test_every_difference_is_reported_once() -> None:
    """Several differences are a line each; one that several PS have is one line, with their number."""
    lines = refusal(terms(optimizer=None), terms(mode="sync"), terms(optimizer=None, mode="sync"))
    assert lines == [
        "no --optimizer here, adam on ps/0 (h0:2222): give every task the same value.",
        "--mode=async here, sync on ps/0 (h0:2222) and 1 more: give every task the same value.",
    ]


def test_versions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another minor version of TensorFlow, or any of tfps, is refused; another patch of TensorFlow is only reported."""
    caplog.set_level(logging.INFO, "tfps")
    assert refusal(terms(), terms(tensorflow="2.20.0")) == [
        "TensorFlow 2.21.0 here, 2.20.0 on ps/0 (h0:2222): install the same version on every host."
    ]
    assert caplog.messages == []
    compatibility.check(terms(), [terms(tensorflow="2.21.1")], Cluster(("p:1",), ("w:1",)))
    assert caplog.messages == ["TensorFlow 2.21.0 here, 2.21.1 on PS"]
    here = terms()
    monkeypatch.setattr(tfps, "__version__", "9.9.9")
    [line] = refusal(here, terms())
    assert line.startswith(f"tfps {json.loads(here)['versions']['tfps']} here, 9.9.9 on ps/0")


def test_a_ps_of_an_earlier_job_that_leaves_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the PS that differs leaves, the worker ends as one that may be started again (170), not for good (2)."""
    monkeypatch.setattr(rendezvous, "LEAVING_SECS", 10.0)
    leaving = Speaker(Task("ps", 0))
    later = threading.Timer(0.5, leaving.close)
    later.start()
    with pytest.raises(PeerLostError, match="belonged to an earlier job and has exited: restart this task") as caught:
        compatibility.check(terms(), [terms(mode="sync")], Cluster((leaving.address,), ("w:1",)))
    later.join()
    assert caught.value.exit_code == 170


def test_a_worker_that_is_refused_leaves_no_mark() -> None:
    """A worker that meets real PS which were started otherwise has joined none of them when it is refused."""
    ones = model_of(lambda *_: dataset_of(np.float32([1])).repeat(), linear)
    with shared_servers():
        cluster, config, stop = cluster_of(2, 1), JobConfig(max_steps=5), StopRequest()
        calls = [(config, cluster, Task("ps", index), stop) for index in range(2)]
        servers = [threading.Thread(target=parameter_server.serve, args=call, daemon=True) for call in calls]
        for thread in servers:
            thread.start()
        worker = Worker(config.replace(max_steps=6), cluster, Task("worker", 0), ones, StopRequest())
        with pytest.raises(ConfigError, match=r"--max_steps=6 here, 5 on ps/0 .*: give every"):
            worker.work()
        with tf.Graph().as_default() as graph:
            state = job_state.JobState(cluster, 0)
            with tf.Session(target_of(Task("ps", 0)), graph=graph, config=session_config("/job:ps")) as session:
                assert state.marked(session) == [False, False]
                state.write(session, Phase.DONE, WorkerTotals())
                for thread in servers:
                    thread.join(100)
                    assert not thread.is_alive()


def test_a_task_that_was_started_otherwise_is_refused(tmp_path: Path) -> None:
    """Of real tasks, a worker with another mode, wire and optimizer ends with 2 and a line for each; the PS stays."""
    with held_ports(2) as (first, second), processes() as started:
        cluster = [f"--ps_hosts=127.0.0.1:{first}", f"--worker_hosts=127.0.0.1:{second}", "--task_index=0"]
        started.append(Process(tmp_path / "ps", *cluster, "--job_name=ps"))
        mine = ["--job_name=worker", "--issync=1", "--wire=plain", "--optimizer=adam"]
        started.append(Process(tmp_path / "worker", *cluster, *mine, f"--model_dir={tmp_path / 'm'}"))
        assert started[1].wait(120) == 2, started[1].output()
        said = [x for x in started[1].output().splitlines() if not x.startswith(("threads: ", "waiting for "))]
        assert said == [
            f"error: --{what} on ps/0 (127.0.0.1:{first}): give every task the same value."
            for what in ("optimizer=adam here, none", "mode=sync here, async", "wire=plain here, packed")
        ]
        assert started[0].poll() is None


def test_the_ps_of_another_run_are_refused(tmp_path: Path) -> None:
    """A chief goes on with its own run, and with one whose ``job.json`` is lost, but with no other."""
    here, there = tmp_path / "here", tmp_path / "there"
    run = compatibility.new_run(str(here))
    reported = json.dumps(run)
    compatibility.check_run(str(here), reported, "ps/0 (h:1)")
    write_json(here / "job.json", {"model": "linear", "run": run["id"]})
    compatibility.check_run(str(here), reported, "ps/0 (h:1)")
    compatibility.check_run(str(here), "", "ps/0 (h:1)")
    compatibility.check_run(None, json.dumps(compatibility.new_run(None)), "ps/0 (h:1)")
    with pytest.raises(ConfigError) as caught:
        compatibility.check_run(str(there), reported, "ps/0 (h:1)")
    assert str(caught.value) == (
        f"--model_dir={there}: ps/0 (h:1) belongs to another run, with --model_dir={here}: end the PS and restart "
        "them, or give that directory."
    )
    write_json(here / "job.json", {"model": "linear", "run": compatibility.new_run(str(here))["id"]})
    with pytest.raises(ConfigError, match=r"to another run, which started before this one: end the PS and restart"):
        compatibility.check_run(str(here), reported, "ps/0 (h:1)")


def test_a_directory_that_was_emptied_is_not_of_the_run_on_the_ps(tmp_path: Path) -> None:
    """Its chief means to start from step 0; so does one without any directory, for a run that has one."""
    reported = json.dumps(compatibility.new_run(str(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        compatibility.check_run(str(tmp_path), reported, "ps/0 (h:1)", has_run=False)
    assert str(caught.value) == (
        f"--model_dir={tmp_path}: ps/0 (h:1) belongs to another run, of which nothing is left there: end the PS and "
        "restart them."
    )
    with pytest.raises(ConfigError, match=f"--model_dir=none: ps/0 .* with --model_dir={tmp_path}: .* directory"):
        compatibility.check_run(None, reported, "ps/0 (h:1)")


@pytest.mark.slow
def test_the_ps_that_outlive_a_run_give_its_variables_to_no_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chief with a new directory, or an emptied one, is refused; one that its launcher started again goes on."""
    old, new = tmp_path / "old", tmp_path / "new"
    ones = model_of(lambda mode, *_: None if mode == "eval" else dataset_of(np.float32([1])).repeat(), linear)
    with job(ones, 1, 1, max_steps=100_000, model_dir=str(old), save_checkpoint_secs=0.2) as running:
        wait_until(lambda: _saved_step(old) > 0)
        running.stop("worker/0")
        wait_until(lambda: "worker/0" in running.ended)
        stopped_at = summary(old)["global_step"]

        def begin(model_dir: Path, is_new_dir: bool, stop: StopRequest) -> None:
            config = JobConfig(max_steps=100_000, model_dir=str(model_dir), save_checkpoint_secs=0.2)
            runtime_task._worker(config, cluster_of(1, 1), Task("worker", 0), stop, is_new_dir)

        with pytest.raises(ConfigError, match=rf"ps/0 .* belongs to another run, with --model_dir={old}"):
            begin(new, True, StopRequest())
        old.rename(tmp_path / "away")
        with pytest.raises(ConfigError, match=r"ps/0 .* belongs to another run, of which nothing is left there"):
            begin(old, False, StopRequest())
        monkeypatch.setenv("TFPS_STARTED_AGAIN", "1")
        stop = StopRequest()
        stops = threading.Thread(target=lambda: _stop_when(lambda: _saved_step(new) > stopped_at, stop))
        stops.start()
        with pytest.raises(StoppedError):
            begin(new, True, stop)
        stops.join()
    reported, saved = summary(new), variables_of(new)
    assert reported["resumed_from_step"] == 0
    assert reported["global_step"] > stopped_at > 0
    assert saved["weight"] == -saved["global_step"] == -reported["global_step"], "no update is lost or repeated"


def _saved_step(model_dir: Path) -> int:
    return max(map(step_in, list_checkpoints(str(model_dir))), default=0)


def _stop_when(condition: Callable[[], bool], stop: StopRequest) -> None:
    wait_until(condition)
    stop.request(StoppedError("stopped by SIGTERM"))
