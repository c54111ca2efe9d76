"""The Compose file of a job: what is in it, that nothing in it is taken for something else, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.jobs import job_of
from support.processes import NASTY, REPO, golden, run_tfps

from tfps.errors import ConfigError
from tfps.launchers.docker.compose import ComposeLauncher

SHIPPED = ("--to=compose", "--name=tfps", "--model=mnist")


def planned(source: str | None = None, **flags: Any) -> dict[str, Any]:
    """Return the Compose file of a job as a reader of YAML has it."""
    job = job_of("first", source, at="/here", **flags)
    document: dict[str, Any] = yaml.safe_load(str(ComposeLauncher().plan(job)))
    return document


def test_the_shipped_file_is_what_the_planner_writes() -> None:
    """docker/compose.yaml is, byte for byte, what submit --dry_run prints for 1 PS and 2 workers."""
    printed = run_tfps("submit", *SHIPPED, "--dry_run")
    assert printed.stdout == (REPO / "docker" / "compose.yaml").read_text()
    assert (printed.returncode, printed.stderr) == (0, "")


def test_a_large_job_is_planned_as_before() -> None:
    """Several of each role, resources, GPUs, volumes, a model and data of this machine: as in the golden file."""
    job = job_of(
        "large",
        "...",
        at="/home/me",
        num_ps=2,
        num_workers=3,
        ps_cpu=0.5,
        ps_memory=2**30,
        worker_cpu=2.0,
        worker_gpu=2,
        worker_memory=8 * 2**30,
        image="mine:1",
        volumes="out:/out,/mnt/all:/all:ro",
        model="models/my model.py",
        data_dir="data",
        mode="sync",
        learning_rate=0.5,
    )
    plan = str(ComposeLauncher().plan(job))
    assert plan == golden("compose-large.yaml", plan)


def test_a_job_without_ps_has_no_service_of_one() -> None:
    """Two workers, and no flag or service of a PS: as in the golden file."""
    plan = str(ComposeLauncher().plan(job_of("small", model="mnist", num_ps=0, num_workers=2)))
    assert plan == golden("compose-without-ps.yaml", plan)


def test_a_service_has_servers_alone() -> None:
    """Two servers with their resources; the secret is the variable that Compose has, and no value is written."""
    service = {"serve": True, "num_ps": 2, "ps_cpu": 2.0, "ps_memory": 2**30, "optimizer": "adam"}
    plan = ComposeLauncher().plan(job_of("service", model="service", **service))
    assert str(plan) == golden("compose-service.yaml", str(plan))
    found = ComposeLauncher().client_addresses(plan)
    assert found.hosts == ["ps-0:2222", "ps-1:2222"]
    assert found.where == "in containers on the network service_training"


def test_nothing_else_is_printed_nor_needed(tmp_path: Path) -> None:
    """--dry_run needs neither Docker nor TensorFlow: it works where the one is not and the other cannot be imported."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow is imported')")
    printed = run_tfps("submit", *SHIPPED, "--dry_run", PATH="", PYTHONPATH=f"{tmp_path}:{REPO}")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert list(yaml.safe_load(printed.stdout)["services"]) == ["ps-0", "worker-0", "worker-1"]


def test_values_are_written_as_they_are() -> None:
    """A value with quotes, ends of line, $ and YAML in it is the same for a reader that knows Compose's $$."""
    model_dir, name = f"/tfps/{NASTY}", NASTY.replace("/", "_") + ".py"
    document = planned(source="", model_dir=model_dir, model=f"/m/{name}", data_dir=NASTY)
    worker = document["services"]["worker-0"]
    command = [word.replace("$$", "$") for word in worker["command"]]
    assert f"--model_dir={model_dir}" in command
    assert f"--model=/opt/model/{name}" in command
    sources = [mount["source"].replace("$$", "$") for mount in worker["volumes"]]
    assert sources == ["tfps", f"/m/{name}", f"/here/{NASTY}"]
    assert "$" not in "".join(worker["command"]).replace("$$", "")


def test_a_task_has_no_rights() -> None:
    """No container has a capability, a writable root, a way to more privileges, a published port or a way out."""
    document = planned(num_ps=2)
    for service in document["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"ports", "privileged", "network_mode", "cap_add", "user"} & set(service)
        assert service["networks"] == ["training"]
    assert document["networks"] == {"training": {"internal": True}}


def test_every_worker_has_gpus_of_its_own() -> None:
    """Docker gives the same first GPUs to all who ask for a number; so each worker asks for its own, and no PS does."""
    services = planned(num_workers=3, worker_gpu=2)["services"]
    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert devices == {"worker-0": ["0", "1"], "worker-1": ["2", "3"], "worker-2": ["4", "5"]}


@pytest.mark.parametrize(
    ("data_dir", "inside", "mounted"),
    [
        ("/tfps/data", "/tfps/data", None),
        ("file:///tfps/data", "file:///tfps/data", None),
        ("data/x", "/opt/data", "/here/data/x"),
        ("../x", "/opt/data", "/x"),
        ("/tfps/../x", "/opt/data", "/x"),
    ],
)
def test_data_is_on_a_volume_or_on_this_machine(data_dir: str, inside: str, mounted: str | None) -> None:
    """A --data_dir on a volume is a path of the containers; any other directory is mounted, only to be read."""
    worker = planned(data_dir=data_dir)["services"]["worker-0"]
    assert f"--data_dir={inside}" in worker["command"]
    mounts = [(mount["source"], mount["read_only"]) for mount in worker["volumes"] if mount["type"] == "bind"]
    assert mounts == ([] if mounted is None else [(mounted, True)])


def test_a_volume_is_the_one_of_its_name_in_every_job() -> None:
    """--volumes=NAME:/path is Docker's volume NAME, whatever the job's name is; /host/path is no volume of Docker's."""
    document = planned(volumes="mine:/tfps,/mnt/x:/x,data.1:/data:ro", model_dir="/tfps/m")
    assert document["volumes"] == {name: {"name": name, "external": True} for name in ("mine", "data.1")}


def test_a_new_volume_belongs_to_the_tasks_wherever_it_is_mounted() -> None:
    """The file's head creates each volume; one that Docker would make root's is mounted first at the image's /tfps.

    Docker then changes it nowhere else.
    """
    job = job_of("first", volumes="tfps:/tfps,out:/data/x,in:/in:ro,/mnt/x:/x,out:/y,tfps:/z", image="mine:1")
    text = str(ComposeLauncher().plan(job))
    assert [line.partition(": ")[2] for line in text.splitlines() if line.startswith("# Before the first use")] == [
        "docker volume create tfps",
        "docker volume create in",
        "docker rm --volumes $(docker create --volume=out:/tfps mine:1 true)",
    ]
    mounts = yaml.safe_load(text)["services"]["ps-0"]["volumes"]
    kept = {mount["target"]: mount.get("volume") for mount in mounts}
    nocopy = {"nocopy": True}
    assert kept == {"/tfps": None, "/data/x": nocopy, "/in": nocopy, "/x": None, "/y": nocopy, "/z": nocopy}


def test_a_volume_may_be_mounted_at_tmp() -> None:
    """Then it takes the place of the container's own /tmp, which else would be there twice."""
    services = planned(volumes="tfps:/tfps,mine:/tmp")["services"].values()
    assert [service.get("tmpfs") for service in services] == [None] * 3
    assert [service["tmpfs"] for service in planned()["services"].values()] == [["/tmp"]] * 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"volumes": "x:/tfps"}, "--volumes: x is too short for Docker"),
        ({"volumes": "tfps:/tfps,mine:/opt/model", "source": "..."}, "--volumes mounts /opt/model"),
        ({"volumes": "tfps:/tfps,mine:/opt/data", "data_dir": "d"}, "--volumes mounts /opt/data"),
        ({"data_dir": "gs://bucket/x"}, "--data_dir=gs://bucket/x cannot be reached.*: copy the data to a directory"),
    ],
)
def test_what_could_not_work_is_refused(flags: dict[str, Any], says: str) -> None:
    """Volumes that Docker refuses or that hide the job's files, and data beyond the internal network."""
    with pytest.raises(ConfigError, match=f"^{says}"):
        planned(**flags)


def test_too_little_memory_is_refused_before_anything_is_sent() -> None:
    """Less than Docker takes is an error that says how much it takes."""
    with pytest.raises(ConfigError, match="--ps_memory is less than Docker takes: give at least 6Mi"):
        planned(ps_memory=2**20)


def test_without_docker_it_says_what_to_install() -> None:
    """Without a client of Docker's: exit 69, on one line, without a traceback."""
    ended = run_tfps("submit", *SHIPPED, PATH="")
    assert ended.returncode == 69
    assert ended.stderr.startswith("error: docker is not installed: ")
    assert ended.stderr.count("\n") == 1
