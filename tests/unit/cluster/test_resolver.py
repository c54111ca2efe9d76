"""Cluster and task from flags, TF_CONFIG and Slurm: what is accepted, what is refused, and in which words."""

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tfps.cluster import resolver
from tfps.cluster.addresses import parse_hosts
from tfps.cluster.cluster_resolver import ClusterResolver, PartialSpec
from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.errors import ConfigError

PS, WORKERS = "p0:2222", "w0:2222,w1:2222"
MEMBERS = Cluster(("p0:2222",), ("w0:2222", "w1:2222"))
TF_CLUSTER = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
TF_MEMBERS = Cluster(("p:1",), ("c:1", "w0:1", "w1:1"))
SLURM = {  # recorded: srun -n5 -N3 -w n10,o03,n2, rank 3
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[2,10],o03",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURMD_NODENAME": "n10",
    "SLURM_GTIDS": "3",
    "SLURM_JOB_ID": "8",
}
SLURM_HET = {  # recorded: srun -n2 -w n3 A : -n4 -N2 -w n[1-2] B, rank 4
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_PACK_GROUP_0": "n3",
    "SLURM_JOB_NODELIST_PACK_GROUP_1": "n[1-2]",
    "SLURMD_NODENAME": "n1",
    "SLURM_GTIDS": "2,3,4",
}


def resolve(env: Mapping[str, str] | None = None, /, **flags: Any) -> tuple[Cluster, Task]:
    """Call ``cluster.resolve`` with these flags only."""
    names = ("ps_hosts", "worker_hosts", "job_name", "task_index", "num_workers")
    given = {name: flags.get(name) for name in names}
    return resolver.resolve(**given, num_ps=resolver.NumPs(flags.get("num_ps")), env=env or {})


def refusal(env: Mapping[str, str] | None = None, /, **flags: Any) -> list[str]:
    """Return the problems of a call that must be refused; each is one short printable line."""
    with pytest.raises(ConfigError) as caught:
        resolve(env, **flags)
    for problem in caught.value.problems:
        assert problem.isprintable()
        assert len(problem) < 400
    return caught.value.problems


def tf_config(value: Any = None, **parts: Any) -> dict[str, str]:
    """Return an environment with this TF_CONFIG; text as it is, anything else as JSON."""
    value = parts if value is None else value
    return {"TF_CONFIG": value if isinstance(value, str) else json.dumps(value)}


def task(kind: Any, index: Any) -> dict[str, Any]:
    """Return TF_CONFIG's ``task``."""
    return {"type": kind, "index": index}


def test_hosts_flags_name_the_same_cluster() -> None:
    """A task given ``hosts_flags`` resolves the cluster they were made from."""
    ps, workers = (flag.split("=")[1] for flag in hosts_flags(MEMBERS))
    assert resolve(ps_hosts=ps, worker_hosts=workers, job_name="ps", task_index=0)[0] == MEMBERS


# hosts

GOOD_ADDRESSES = [
    "h:1",
    "h1:65535",
    "H-1.example.com:2222",
    "h.:2222",
    "my_service_1:2222",
    "10.0.0.1:2222",
    "[::1]:2222",
    "[fe80::1:2]:2222",
    "a" * 63 + ":1",
    ".".join(["a" * 61] * 4) + ":1",
    "job-worker-0.ns.svc:2222",
    "xn--bcher-kva.example:80",
]


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_good_addresses_are_kept_as_they_are(address: str) -> None:
    """Names, IPv4, bracketed IPv6 (which TensorFlow's server takes) and compose's underscores are accepted."""
    problems: list[str] = []
    assert parse_hosts("ps_hosts", f"{address},other:1", problems) == (address, "other:1")
    assert problems == []


BAD_ADDRESSES = {  # address: (what the message says, the fix it gives)
    "h1": ("no port", "like h1:2222"),
    "h1:": ("port ''", "1 to 65535"),
    "h1:0": ("port 0", "1 to 65535"),
    "h1:-1": ("port -1", "1 to 65535"),
    "h1:65536": ("port 65536", "1 to 65535"),
    "h1:99999999999999999999": ("port 99999999999999999999", "1 to 65535"),
    "h1:http": ("port http", "1 to 65535"),
    "h1:2222.0": ("port 2222.0", "1 to 65535"),
    "h1:+1": ("port +1", "1 to 65535"),
    "h1:02222": ("port 02222", "1 to 65535"),
    "h1:1_000": ("port 1_000", "1 to 65535"),
    "h1:٣": ("not ASCII", "ASCII name"),
    "h1:\uff11": ("not ASCII", "ASCII name"),
    "bücher:1": ("not ASCII", "ASCII name"),
    "h\udcff:1": ("not ASCII", "ASCII name"),
    " h1:1": ("blank", "without any"),
    "h1 :1": ("blank", "without any"),
    "h1:1\n": ("control character", "without any"),
    "h1\n:1": ("control character", "without any"),
    "h\x00:1": ("control character", "without any"),
    "http://h:1": ("URL", "host:port alone"),
    "grpc://h:1": ("URL", "host:port alone"),
    "user@host:1": ("user", "host:port alone"),
    "h/x:1": ("slash", "host:port alone"),
    "h:1/": ("slash", "host:port alone"),
    "::1": ("IPv6 without brackets", "[address]:port"),
    "fe80::1:2222": ("IPv6 without brackets", "[address]:port"),
    "[::1]": ("no port", "host:port"),
    "[::g]:1": ("no IPv6 address", "[::1]:2222"),
    "[::1:1": ("no IPv6 address", "[::1]:2222"),
    "[fe80::1%eth0]:1": ("no IPv6 address", "[::1]:2222"),
    "[h1]:1": ("no IPv6 address", "[::1]:2222"),
    "h1:1:2": ("more than one colon", "host:port,host:port"),
    "300.1.1.1:1": ("no IPv4 address", "0 to 255"),
    "1.2.3:1": ("no IPv4 address", "0 to 255"),
    "127.0.0.01:1": ("no IPv4 address", "0 to 255"),
    "2222:1": ("no IPv4 address", "0 to 255"),
    ":1": ("bad host name", "letters, digits"),
    "-h:1": ("bad host name", "letters, digits"),
    "h-:1": ("bad host name", "letters, digits"),
    "a..b:1": ("bad host name", "letters, digits"),
    "..:1": ("no IPv4 address", "0 to 255"),
    "$(x):1": ("bad host name", "letters, digits"),
    "h;x:1": ("bad host name", "letters, digits"),
    "h1:1;h2:1": ("more than one colon", "host:port,host:port"),
    "h*:1": ("bad host name", "letters, digits"),
    "a" * 64 + ":1": ("bad host name", "at most 63"),
    ".".join(["a" * 62] * 5) + ":1": ("bad host name", "253 in all"),
    "x" * 65536: ("no port", "like h1:2222"),
}


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=lambda address: ascii(address[:20]))
def test_a_bad_address_is_refused_with_flag_value_and_fix(address: str) -> None:
    """One line names the flag and the value (shortened), says what is wrong and what to write."""
    wrong, fix = BAD_ADDRESSES[address]
    [problem] = refusal(ps_hosts=PS, worker_hosts=f"w0:1,{address}", job_name="worker", task_index=0)
    assert problem.startswith("--worker_hosts: ")
    assert repr(address)[1:-1][:40] in problem
    assert wrong in problem
    assert fix in problem


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_empty_flag_is_refused(text: str) -> None:
    """A flag given without a value is not the same as a flag not given."""
    assert refusal(ps_hosts=text, worker_hosts=WORKERS, job_name="worker", task_index=0) == [
        "--ps_hosts is empty: give host:port,host:port."
    ]


def test_a_comma_too_many_is_refused() -> None:
    """A trailing comma is an empty address, told by its place."""
    [problem] = refusal(ps_hosts=PS, worker_hosts=f"{WORKERS},", job_name="worker", task_index=0)
    assert problem == "--worker_hosts: address 3 is empty: write host:port, or drop a comma."


def test_a_long_list_of_problems_is_cut() -> None:
    """Of a thousand bad addresses five are reported, and how many there are."""
    hosts = ",".join(f"h{i}" for i in range(1000))
    problems = refusal(ps_hosts=PS, worker_hosts=hosts, job_name="worker", task_index=0)
    assert len(problems) == 6
    assert problems[-1] == "--worker_hosts: and 995 more like these."


@pytest.mark.parametrize(
    ("ps", "workers", "reported"),
    [
        ("a:1", ",".join(f"h{i}:2222" for i in range(10_000)), "--worker_hosts has 10,000 addresses"),
        ("a:1", "," * 65536, "--worker_hosts has 65,537 addresses"),
        (",".join(f"p{i}:1" for i in range(4096)), "w:1", "4,097 tasks, ps and workers together"),
        ("a:1", ":" * 65536, "IPv6 without brackets"),
        ("a:1", "h" * 65536 + ":1", "bad host name"),
        ("a:1", ",".join(["h:1"] * 4000), "and 3,994 more like these"),
    ],
)
def test_huge_lists_are_answered_at_once(ps: str, workers: str, reported: str) -> None:
    """Ten thousand hosts or 64 KiB of anything take no time that grows with their square."""
    began = time.monotonic()
    problems = refusal(ps_hosts=ps, worker_hosts=workers, job_name="worker", task_index=0)
    assert time.monotonic() - began < 10
    assert any(reported in problem for problem in problems)


def test_as_many_tasks_as_allowed_are_accepted() -> None:
    """4,096 tasks resolve."""
    hosts = ",".join(f"h{i}:1" for i in range(4095))
    assert resolve(ps_hosts="p:1", worker_hosts=hosts, job_name="worker", task_index=4094)[1] == Task("worker", 4094)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("h:1", "h:1"),
        ("localhost:2222", "127.0.0.1:2222"),
        ("localhost:2222", "[::1]:2222"),
        ("[0:0:0:0:0:0:0:1]:2222", "LOCALHOST:2222"),
        ("h.example:1", "H.Example:1"),
        ("h.example:1", "h.example.:1"),
        ("[fe80::1]:1", "[FE80:0::1]:1"),
    ],
)
def test_the_same_address_twice_is_refused(one: str, other: str) -> None:
    """Two tasks on one address are reported with both spellings and where they stand: across jobs and within one."""
    across = refusal(ps_hosts=one, worker_hosts=f"w0:1,{other}", job_name="worker", task_index=0)
    assert across == [
        f"--worker_hosts: {other} is the same address as {one} of --ps_hosts; each task needs its own.",
    ]
    within = refusal(ps_hosts=PS, worker_hosts=f"{one},w0:1,{other}", job_name="worker", task_index=0)
    assert within == [
        f"--worker_hosts: {other} of task 2 is the same address as {one} of task 0; each task needs its own.",
    ]


def test_one_host_may_have_many_ports() -> None:
    """Only the whole address must differ."""
    members, _ = resolve(ps_hosts="localhost:1", worker_hosts="localhost:2,127.0.0.1:3", job_name="ps", task_index=0)
    assert members.num_workers == 2


# identity, from flags


@pytest.mark.parametrize(
    ("job", "index"), [("ps", 0), ("worker", 0), ("worker", 1), ("evaluator", 0), ("evaluator", 7)]
)
def test_four_flags_make_a_task(job: str, index: int) -> None:
    """The classic command line is enough; an evaluator belongs to no cluster and has any index."""
    assert resolve(ps_hosts=PS, worker_hosts=WORKERS, job_name=job, task_index=index) == (MEMBERS, Task(job, index))


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        ("", "one of ps, worker, evaluator"),
        ("Worker", "Did you mean worker?"),
        ("PS", "Did you mean ps?"),
        ("workers", "Did you mean worker?"),
        ("chief", "The chief is --job_name=worker --task_index=0."),
        ("master", "The chief is --job_name=worker --task_index=0."),
        ("$(x)", "one of ps, worker, evaluator"),
        ("worker\n", "Did you mean worker?"),
        ("x" * 65536, "(65536 characters)"),
    ],
)
def test_an_unknown_job_is_refused(job: str, hint: str) -> None:
    """The line names the flag, the value, the jobs there are, and the nearest."""
    [problem] = refusal(ps_hosts=PS, worker_hosts=WORKERS, job_name=job, task_index=0)
    assert problem.startswith("--job_name=")
    assert hint in problem


@pytest.mark.parametrize(
    ("job", "index", "reported"),
    [
        ("worker", 2, "--task_index=2 is out of range for job 'worker', which has 2 tasks (0-1)."),
        ("worker", -1, "--task_index=-1 is out of range for job 'worker', which has 2 tasks (0-1)."),
        ("ps", 1, "--task_index=1 is out of range for job 'ps', which has 1 task (0)."),
        ("ps", 2**63 - 1, "--task_index=9223372036854775807 is out of range for job 'ps', which has 1 task (0)."),
        ("evaluator", -1, "--task_index=-1 is negative: tasks are counted from 0."),
    ],
)
def test_an_index_out_of_range_is_refused(job: str, index: int, reported: str) -> None:
    """The line names the flag, the value and the range."""
    assert refusal(ps_hosts=PS, worker_hosts=WORKERS, job_name=job, task_index=index) == [reported]


def test_what_is_missing_is_named_with_its_flag() -> None:
    """Each flag that is still needed has its line."""
    problems = refusal(job_name="worker")
    assert [problem.split(" is missing: give ")[0] for problem in problems] == [
        "--ps_hosts",
        "--worker_hosts",
        "--task_index",
    ]


def test_nothing_at_all_lists_the_ways() -> None:
    """One line lists flags, TF_CONFIG and Slurm, and the command for one machine."""
    [problem] = refusal()
    assert all(way in problem for way in ("--ps_hosts", "TF_CONFIG", "srun", "`tfps launch`"))
    assert "Slurm job" not in problem
    assert "This Slurm job's process is in no step" in refusal({"SLURM_JOB_ID": "8", "SLURM_PROCID": "0"})[0]


def test_the_network_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a good nor a bad command line opens a socket or asks for a name."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    for name in ("socket", "getaddrinfo", "gethostbyname", "gethostname", "getfqdn"):
        monkeypatch.setattr(socket, name, refuse)
    assert resolve(ps_hosts=PS, worker_hosts=WORKERS, job_name="ps", task_index=0)[0] == MEMBERS
    assert refusal(ps_hosts="no.such.host:0", worker_hosts="localhost:1,127.0.0.1:1", job_name="ps", task_index=0)


def test_all_problems_are_reported_at_once() -> None:
    """A command line with five mistakes gets five lines."""
    problems = refusal(ps_hosts="p", worker_hosts="w:1,w:1", job_name="Worker", task_index=-1, num_workers=3)
    assert [problem.split(":")[0].split(",")[0].split(" is")[0] for problem in problems] == [
        "--ps_hosts",
        "--job_name=Worker",
        "--num_workers=3",
        "--worker_hosts",
        "--task_index=-1",
    ]


def test_sizes_must_agree_with_the_hosts() -> None:
    """``--num_ps`` and ``--num_workers`` may repeat what the hosts say, and nothing else."""
    flags: dict[str, Any] = {"ps_hosts": PS, "worker_hosts": WORKERS, "job_name": "ps", "task_index": 0}
    assert resolve(**flags, num_ps=1, num_workers=2)[0] == MEMBERS
    assert refusal(**flags, num_ps=2, num_workers=1) == [
        "--num_ps=2, but --ps_hosts has 1: drop --num_ps or correct --ps_hosts.",
        "--num_workers=1, but --worker_hosts has 2: drop --num_workers or correct --worker_hosts.",
    ]


# TF_CONFIG


@pytest.mark.parametrize(
    ("kind", "index", "expected"),
    [
        ("chief", 0, Task("worker", 0)),
        ("worker", 0, Task("worker", 1)),
        ("worker", "1", Task("worker", 2)),
        ("ps", 0, Task("ps", 0)),
        ("evaluator", 0, Task("evaluator", 0)),
    ],
)
def test_the_chief_is_worker_0_and_shifts_the_others(kind: str, index: object, expected: Task) -> None:
    """Worker hosts are the chief's and then the workers'; indices may be digit strings."""
    assert resolve(tf_config(cluster=TF_CLUSTER, task=task(kind, index))) == (TF_MEMBERS, expected)


def test_master_is_the_old_name_of_chief() -> None:
    """A ``master`` is worker 0."""
    members = {"master": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
    assert resolve(tf_config(cluster=members, task=task("master", 0))) == (TF_MEMBERS, Task("worker", 0))


def test_without_a_chief_worker_0_is_chief() -> None:
    """Indices are not shifted where there is no chief."""
    found = resolve(tf_config(cluster={"worker": ["w0:1", "w1:1"], "ps": ["p:1"]}, task=task("worker", 0)))
    assert found == (Cluster(("p:1",), ("w0:1", "w1:1")), Task("worker", 0))


def test_the_evaluator_is_no_part_of_the_cluster() -> None:
    """Kubeflow and Volcano list it; it is left out, whatever stands there."""
    members = {**TF_CLUSTER, "evaluator": ["w0:1", "not an address"]}
    assert resolve(tf_config(cluster=members, task=task("evaluator", 1))) == (TF_MEMBERS, Task("evaluator", 1))


def test_what_other_tools_add_is_accepted() -> None:
    """``environment``, ``rpc_layer: grpc`` and unknown keys beside cluster and task change nothing."""
    env = tf_config(
        cluster=TF_CLUSTER, task={**task("ps", 0), "trial": "1"}, environment="cloud", rpc_layer="grpc", job={"x": 1}
    )
    assert resolve(env) == (TF_MEMBERS, Task("ps", 0))


@pytest.mark.parametrize("text", ["", "  ", "{}", " {\n} "])
def test_an_empty_tf_config_is_none(text: str) -> None:
    """An empty TF_CONFIG is as good as no TF_CONFIG."""
    assert refusal({"TF_CONFIG": text}) == refusal()
    assert resolve({"TF_CONFIG": text, **SLURM})[1] == Task("worker", 2)


def test_flags_that_agree_with_tf_config_are_fine() -> None:
    """The same said twice, in another spelling, is no contradiction; the flags' spelling counts."""
    env = tf_config(cluster=TF_CLUSTER, task=task("worker", 0))
    found = resolve(env, ps_hosts="P:1", worker_hosts="c:1,w0:1,w1:1", job_name="worker", task_index=1, num_workers=3)
    assert found == (Cluster(("P:1",), TF_MEMBERS.workers), Task("worker", 1))


def test_flags_complete_tf_config() -> None:
    """What TF_CONFIG leaves out, flags may say: the hosts, or the task."""
    found = resolve(tf_config(task=task("worker", 1)), ps_hosts=PS, worker_hosts=WORKERS)
    assert found == (MEMBERS, Task("worker", 1))
    assert resolve(tf_config(cluster=TF_CLUSTER), job_name="ps", task_index=0) == (TF_MEMBERS, Task("ps", 0))


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (
            {"task_index": 1},
            "--task_index=1, but TF_CONFIG says task index 2 (worker 1 after the chief): drop the flag",
        ),
        ({"job_name": "ps"}, "--job_name=ps, but TF_CONFIG says job worker (worker 1 after the chief): drop the flag"),
        ({"ps_hosts": "q:1"}, "--ps_hosts=q:1, but TF_CONFIG says ps p:1: drop the flag or correct TF_CONFIG."),
        ({"worker_hosts": "w0:1,w1:1,c:1"}, "--worker_hosts=w0:1,w1:1,c:1, but TF_CONFIG says workers c:1,w0:1,w1:1"),
        ({"num_ps": 2}, "--num_ps=2, but TF_CONFIG cluster.ps has 1: drop --num_ps or correct TF_CONFIG"),
        ({"num_workers": 2}, "--num_workers=2, but TF_CONFIG cluster.worker has 3: drop --num_workers or correct"),
    ],
)
def test_flags_that_contradict_tf_config_are_refused(flags: dict[str, Any], reported: str) -> None:
    """The line names the flag with its value, what TF_CONFIG says, and the way out."""
    [problem] = refusal(tf_config(cluster=TF_CLUSTER, task=task("worker", 1)), **flags)
    assert problem.startswith(reported)


WORKER_1 = task("worker", 1)
BAD_TF_CONFIGS: list[tuple[Any, str, str]] = [  # TF_CONFIG, the place and what is wrong, the fix
    ("{'cluster': 1}", "TF_CONFIG is not JSON", "line 1 column 2"),
    ('{"cluster": {}', "TF_CONFIG is not JSON", "at its end"),
    ("[" * 65536, "TF_CONFIG is not JSON", "nested too deeply"),
    ("1" * 5000, "TF_CONFIG is not JSON", "a number that is too long"),
    ("\udcff", "TF_CONFIG is not JSON", "line 1 column 1"),
    ("[]", "TF_CONFIG must be an object", "is a list"),
    ("null", "TF_CONFIG must be an object", "is null"),
    ('"x"', "TF_CONFIG must be an object", 'is "x"'),
    ('{"cluster": {"ps": ["p:1"], "ps": ["q:1"]}}', "TF_CONFIG has the key ps twice", "drop one"),
    ({"cluster": 5, "task": WORKER_1}, "TF_CONFIG cluster must be an object", "is 5"),
    ({"cluster": TF_CLUSTER, "task": "worker"}, "TF_CONFIG task must be an object", '"worker"'),
    ({"cluster": TF_CLUSTER}, "TF_CONFIG has no task.type", "--job_name"),
    ({"cluster": TF_CLUSTER, "task": {"type": "ps"}}, "TF_CONFIG has no task.index", "--task_index"),
    ({"task": WORKER_1}, "TF_CONFIG has no cluster.ps", "--ps_hosts"),
    ({"task": WORKER_1}, "TF_CONFIG has no cluster.worker", "--worker_hosts"),
    ({"x": 1}, "TF_CONFIG has no cluster.ps", "add it"),
    ({"cluster": {"worker": ["w:1"]}, "task": task("worker", 0)}, "TF_CONFIG has no cluster.ps", "add it"),
    ({"cluster": {"ps": ["p:1"], "worker": []}, "task": task("ps", 0)}, "TF_CONFIG has no cluster.worker", "add it"),
    ({"cluster": {"ps": ["p:1"]}, "task": task("ps", 1)}, "TF_CONFIG has no cluster.worker", "enableDynamicWorker"),
    (
        {"cluster": {"ps": ["p:1"], "worker": {"1": "w:1"}}, "task": WORKER_1},
        "TF_CONFIG cluster.worker is an object, the sparse form",
        "enableDynamicWorker: false",
    ),
    ({"cluster": {**TF_CLUSTER, "ps": "p:1"}, "task": WORKER_1}, "TF_CONFIG cluster.ps must be a list", '"p:1"'),
    ({"cluster": {**TF_CLUSTER, "ps": ["p:1", 5]}, "task": WORKER_1}, "TF_CONFIG cluster.ps must be a list", "has 5"),
    ({"cluster": {**TF_CLUSTER, "ps": [["p:1"]]}, "task": WORKER_1}, "TF_CONFIG cluster.ps must be", "has a list"),
    ({"cluster": {**TF_CLUSTER, "ps": ["p"]}, "task": WORKER_1}, "TF_CONFIG cluster.ps: p has no port", "like h1:2222"),
    ({"cluster": {**TF_CLUSTER, "ps": ["p:1,q:1"]}, "task": WORKER_1}, "TF_CONFIG cluster.ps: p:1,q:1", "one colon"),
    (
        {"cluster": {**TF_CLUSTER, "ps": [""]}, "task": WORKER_1},
        "TF_CONFIG cluster.ps: address 1 is empty",
        "host:port",
    ),
    (
        {"cluster": {**TF_CLUSTER, "ps": ["W0:1"]}, "task": WORKER_1},
        "TF_CONFIG cluster.worker: w0:1 is the same",
        "own",
    ),
    (
        {"cluster": {**TF_CLUSTER, "workers": ["w:1"]}, "task": WORKER_1},
        'TF_CONFIG cluster has "workers"',
        "mean worker",
    ),
    ({"cluster": {**TF_CLUSTER, "master": ["m:1"]}, "task": WORKER_1}, "both a chief and a master", "drop one"),
    ({"cluster": {**TF_CLUSTER, "chief": ["c:1", "d:1"]}, "task": WORKER_1}, "cluster.chief has 2 addresses", "drop"),
    ({"cluster": TF_CLUSTER, "task": task("Worker", 0)}, 'TF_CONFIG task.type is "Worker"', "Did you mean worker?"),
    ({"cluster": TF_CLUSTER, "task": task(7, 0)}, "TF_CONFIG task.type is 7", "one of chief"),
    ({"cluster": TF_CLUSTER, "task": task(["ps"], 0)}, "TF_CONFIG task.type is a list", "one of chief"),
    ({"cluster": TF_CLUSTER, "task": task("master", 0)}, "TF_CONFIG task.type is master", "cluster.master is missing"),
    ({"cluster": TF_CLUSTER, "task": task("worker", 2)}, "TF_CONFIG task.index=2 is out of range", "2 tasks (0-1)"),
    ({"cluster": TF_CLUSTER, "task": task("chief", 1)}, "TF_CONFIG task.index=1 is out of range", "1 task (0)"),
    ({"cluster": TF_CLUSTER, "task": task("worker", -1)}, "TF_CONFIG task.index is -1", "whole number, from 0"),
    ({"cluster": TF_CLUSTER, "task": task("worker", True)}, "TF_CONFIG task.index is true", "whole number"),
    ({"cluster": TF_CLUSTER, "task": task("worker", 1.0)}, "TF_CONFIG task.index is 1.0", "whole number"),
    ({"cluster": TF_CLUSTER, "task": task("worker", "one")}, 'TF_CONFIG task.index is "one"', "whole number"),
    ({"cluster": TF_CLUSTER, "task": task("worker", "١")}, "TF_CONFIG task.index is ", "whole number"),
    ({"cluster": TF_CLUSTER, "task": task("worker", 10**4000)}, "TF_CONFIG task.index is 1000", "whole number"),
    ({"cluster": TF_CLUSTER, "task": task("worker", {})}, "TF_CONFIG task.index is an object", "whole number"),
    ({"cluster": TF_CLUSTER, "task": WORKER_1, "rpc_layer": "grpc+verbs"}, "TF_CONFIG rpc_layer is", "leave it out"),
    ({"cluster": TF_CLUSTER, "task": WORKER_1, "rpc_layer": ["grpc"]}, "TF_CONFIG rpc_layer is a list", "leave it out"),
]


@pytest.mark.parametrize(("value", "reported", "fix"), BAD_TF_CONFIGS, ids=lambda value: ascii(value)[:40])
def test_a_bad_tf_config_is_refused_with_place_value_and_fix(value: Any, reported: str, fix: str) -> None:
    """Some line names the place in TF_CONFIG and its value, and a fix."""
    assert any(reported in problem and fix in problem for problem in refusal(tf_config(value)))


def test_a_tf_config_with_many_mistakes_tells_them_all() -> None:
    """One mistake at each level, one line each, and none that only follows from another."""
    members = {"worker": {"0": "w:1"}, "ps": ["p"], "chef": ["c:1"]}
    problems = refusal(tf_config(cluster=members, task=task("worker", 1.5), rpc_layer="x"))
    assert [problem.split(":")[0] for problem in problems] == [
        'TF_CONFIG rpc_layer is "x"',
        'TF_CONFIG cluster has "chef"',
        "TF_CONFIG cluster.worker is an object, the sparse form, in which a task does not know all others",
        "TF_CONFIG cluster.ps",
        "TF_CONFIG task.index is 1.5",
    ]


# Slurm


def test_a_step_makes_its_first_rank_a_ps() -> None:
    """Without flags rank 0 is the ps and the others are the workers, in rank order."""
    found = resolve(SLURM)
    assert found == (Cluster(("n2:8888",), ("n2:8889", "n2:8890", "n10:8888", "o03:8888")), Task("worker", 2))


def test_num_ps_says_how_many_ranks_are_ps() -> None:
    """With ``--num_ps=4`` rank 3 is the last ps."""
    members, me = resolve(SLURM, num_ps=4, num_workers=1)
    assert (members.workers, me) == (("o03:8888",), Task("ps", 3))


def test_the_first_component_of_a_heterogeneous_step_is_the_ps() -> None:
    """Its size is the number of ps; ``--num_ps`` cannot change it."""
    expected = Cluster(("n3:8888", "n3:8889"), ("n1:8888", "n1:8889", "n1:8890", "n2:8888"))
    assert resolve(SLURM_HET) == (expected, Task("worker", 2))
    assert refusal(SLURM_HET, num_ps=1) == [
        "--num_ps=1, but Slurm's step has 2: drop --num_ps or change the srun command."
    ]


def test_slurm_is_not_looked_at_where_flags_or_tf_config_say_who_is_there() -> None:
    """Its variables are there whether meant or not; even broken ones do no harm then."""
    broken = {**SLURM, "SLURM_STEP_NODELIST": "n["}
    assert resolve(broken, ps_hosts=PS, worker_hosts=WORKERS, job_name="ps", task_index=0) == (MEMBERS, Task("ps", 0))
    tf = tf_config(cluster=TF_CLUSTER, task=task("ps", 0))
    assert resolve({**broken, **tf}) == (TF_MEMBERS, Task("ps", 0))
    assert refusal({**broken, "TF_CONFIG": "x"})[0].startswith("TF_CONFIG is not JSON")


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({"job_name": "ps"}, "--job_name=ps, but Slurm's step says job worker (SLURM_PROCID=3): drop the flag or"),
        ({"job_name": "evaluator"}, "--job_name=evaluator, but Slurm's step says job worker (SLURM_PROCID=3)"),
        ({"task_index": 3}, "--task_index=3, but Slurm's step says task index 2 (SLURM_PROCID=3): drop the flag"),
        ({"num_workers": 5}, "--num_workers=5, but Slurm's step has 4: drop --num_workers or change the srun command"),
        (
            {"num_ps": 5},
            "Slurm's step has 5 tasks, but needs at least 6, 5 ps and a worker: start it with srun --ntasks=7.",
        ),
    ],
)
def test_flags_that_contradict_the_step_are_refused(flags: dict[str, Any], reported: str) -> None:
    """The line names the flag with its value, what Slurm says, and the way out."""
    [problem] = refusal(SLURM, **flags)
    assert problem.startswith(reported)


def test_flags_that_agree_with_the_step_are_fine() -> None:
    """Saying what Slurm says, or part of it, is no contradiction."""
    assert resolve(SLURM, job_name="worker", task_index=2, num_ps=1, num_workers=4) == resolve(SLURM)


@pytest.mark.parametrize(
    ("env", "reported"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-999999999]"}, "SLURM_STEP_NODELIST=n[1-999999999] names more nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n2,$(x),o03", "SLURMD_NODENAME": "$(x)"}, "SLURM_STEP_NODELIST: $(x):8888"),
        ({**SLURM, "SLURM_PROCID": "9"}, "SLURM_PROCID=9 must be a whole number from 0 to 4"),
    ],
)
def test_a_broken_step_is_one_line(env: dict[str, str], reported: str) -> None:
    """A problem of Slurm's variables is reported alone: what follows from it is not."""
    [problem] = refusal(env)
    assert reported in problem


# another platform


class _PodResolver(ClusterResolver):
    """Reads the cluster from the variables of a made-up platform."""

    source = "the pod"
    variable = "POD_TASKS"
    hint = "start the tasks with podctl"

    def is_present(self, env: Mapping[str, str]) -> bool:
        """Return whether the platform has started this process."""
        return self.variable in env

    def resolve(
        self, env: Mapping[str, str], flags: PartialSpec, num_ps: int | None, problems: list[str]
    ) -> PartialSpec:
        """Return the first task as the PS; which task this process is, the platform does not tell."""
        del flags, num_ps, problems
        ps, *workers = env[self.variable].split(",")
        return PartialSpec((ps,), tuple(workers) or None)


def test_a_platform_is_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver in the table gives the cluster, is completed and contradicted by flags, and is in the messages."""
    monkeypatch.setattr(resolver, "RESOLVERS", (*resolver.RESOLVERS, _PodResolver()))
    pod = {"POD_TASKS": "p0:2222,w0:2222,w1:2222"}
    assert resolve(pod, job_name="worker", task_index=1) == (MEMBERS, Task("worker", 1))
    assert refusal(pod, ps_hosts="x:1", job_name="worker", task_index=1) == [
        "--ps_hosts=x:1, but the pod says ps p0:2222: drop the flag or correct the pod."
    ]
    assert refusal({"POD_TASKS": "p0:1"}, job_name="worker", task_index=1) == [
        "the pod has no worker_hosts: add it, or give the workers: --worker_hosts=host:port,host:port."
    ]
    assert "; or start the tasks with podctl. " in refusal()[0]


# anything

ANYTHING = [
    "",
    " ",
    ",",
    ":",
    "{}",
    "[]",
    "null",
    "0",
    "-1",
    "[",
    "]",
    "[]:1",
    "%s",
    "{0}",
    "\x00",
    "\ud800",
    "é" * 999,
]
ANYTHING += [*BAD_ADDRESSES, *(value for value, *_ in BAD_TF_CONFIGS if isinstance(value, str)), "n[1-9]" * 99]


@pytest.mark.parametrize("text", ANYTHING, ids=lambda text: ascii(text[:20]))
def test_whatever_is_given_is_a_config_error_or_a_task(text: str) -> None:
    """No text in any place raises anything but ``ConfigError``, in short printable lines."""
    slurm = [{**SLURM, name: text} for name in SLURM] + [{**SLURM_HET, name: text} for name in SLURM_HET]
    nested = [
        {"cluster": {**TF_CLUSTER, text: [text], "ps": [text]}, "task": task(text, text), "rpc_layer": text},
        {"cluster": {"ps": text, "worker": {text: text}}, "task": {text: text}},
        {text: text, "cluster": text, "task": text},
    ]
    flags = {"ps_hosts": PS, "worker_hosts": WORKERS, "job_name": "worker", "task_index": 0}
    for env in [*slurm, *map(tf_config, nested), {"TF_CONFIG": text}]:
        assert _task_or_problems(env, {})
        assert _task_or_problems(env, flags)
    for name in ("ps_hosts", "worker_hosts", "job_name"):
        assert _task_or_problems({}, {**flags, name: text})


def _task_or_problems(env: dict[str, str], flags: dict[str, Any]) -> Task | list[str]:
    try:
        return resolve(env, **flags)[1]
    except ConfigError:
        return refusal(env, **flags)


# no PS


@pytest.mark.parametrize("ps_hosts", [None, "", " "])
def test_a_job_without_ps_needs_no_addresses_of_them(ps_hosts: str | None) -> None:
    """With ``num_ps=0``, the flag may be missing or empty."""
    found = resolve(ps_hosts=ps_hosts, worker_hosts="a:1,b:1", job_name="worker", task_index=1, num_ps=0)
    assert found == (Cluster((), ("a:1", "b:1")), Task("worker", 1))


def test_tf_config_without_ps_is_enough_without_ps() -> None:
    """A platform that starts no PS gives all that is needed."""
    env = tf_config(cluster={"worker": ["a:1", "b:1"]}, task=task("worker", 1))
    assert resolve(env, num_ps=0) == (Cluster((), ("a:1", "b:1")), Task("worker", 1))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"ps_hosts": "p:1", "job_name": "worker"}, "--ps_hosts has 1 ps, but the job has no PS (--num_ps=0"),
        ({"job_name": "ps"}, "This task is a ps, but the job has no PS"),
    ],
)
def test_ps_of_a_job_without_are_refused(given: dict[str, Any], problem: str) -> None:
    """Both their addresses and a task of theirs."""
    with pytest.raises(ConfigError) as raised:
        resolve(worker_hosts="a:1,b:1", task_index=0, num_ps=0, **given)
    assert [line.startswith(problem) for line in raised.value.problems] == [True]


def test_a_mode_is_named_as_the_reason_to_have_no_ps() -> None:
    """So are the modes without PS where PS are missing, whether flags or the environment give the rest."""
    none = resolver.NumPs(0, "gossip")
    job: tuple[Any, ...] = ("a:1,b:1", "worker", 0)
    with pytest.raises(
        ConfigError, match=r"^--ps_hosts has 1 ps, but --mode=gossip has no PS: correct --ps_hosts, or "
    ):
        resolver.resolve("p:1", *job, none, None, {})
    with pytest.raises(ConfigError, match=r"^This task is a ps, but --mode=gossip has no PS: do not start one\.$"):
        resolver.resolve(None, "a:1,b:1", "ps", 0, none, None, {})
    some = resolver.NumPs(None, "async", lambda: ["allreduce", "gossip"])
    with pytest.raises(ConfigError, match=r"host:port; --mode=allreduce or --mode=gossip needs none\.$"):
        resolver.resolve(None, *job, some, None, {})
    env = tf_config(cluster={"worker": ["a:1", "b:1"]}, task=task("worker", 1))
    with pytest.raises(ConfigError, match=r"^TF_CONFIG .*; --mode=allreduce or --mode=gossip needs none\.$"):
        resolver.resolve(None, None, None, None, some, None, env)
