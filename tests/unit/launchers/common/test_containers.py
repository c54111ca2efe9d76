"""What the container platforms share: the image, the volumes, and the paths that the job's files have inside."""

import pytest
from support.jobs import job_of

import tfps
from tfps.config.command_options import SubmitOptions
from tfps.errors import ConfigError
from tfps.launchers.common import containers
from tfps.launchers.common.containers import Volume


def volumes(text: str | None) -> list[Volume]:
    """Return what ``--volumes`` says."""
    return list(containers.volumes(SubmitOptions(volumes=text)))


def test_the_image_is_that_of_this_version_unless_given() -> None:
    """Without --image the tasks run the image that docker/Dockerfile makes of this version."""
    assert containers.image(SubmitOptions()) == f"tfps:{tfps.__version__}"
    assert containers.image(SubmitOptions(image="registry:5000/mine@sha256:0")) == "registry:5000/mine@sha256:0"


def test_volumes_are_named_or_of_the_host() -> None:
    """A volume is a name or an absolute path of the host, at an absolute path, to write or only to read."""
    assert volumes(None) == [Volume("tfps", "/tfps")]
    found = volumes("mine:/a/b/,/my disk:/c:ro,other:/d:rw")
    assert found == [Volume("mine", "/a/b"), Volume("/my disk", "/c", read_only=True), Volume("other", "/d")]
    assert [volume.on_host for volume in found] == [False, True, False]


@pytest.mark.parametrize("text", ["x", "x:", "x:y", ":/x", "../x:/x", "x:/x:wo", "x:/a/../b", "x:/x,", "a:/x,b:/x/"])
def test_a_volume_that_is_none_is_an_error(text: str) -> None:
    """What is no NAME:/path or /host/path:/path, or is mounted where another is, is reported with the flag's name."""
    with pytest.raises(ConfigError, match="--volumes"):
        volumes(text)


def test_a_path_is_on_a_volume_only_if_it_stays_there() -> None:
    """Neither a name that begins alike nor a way out by .. is on the volume."""
    inside = {"/tfps": True, "/tfps/x": True, "/tfps/a/../b": True}
    outside = dict.fromkeys(["/tfpsx", "/tfps/../x", "tfps", "/"], False)
    assert {path: Volume("v", "/tfps").holds(path) for path in inside | outside} == inside | outside


def test_model_dir_is_on_the_first_volume_that_can_be_written() -> None:
    """Without --model_dir a job leaves what it leaves in a directory of its name."""
    job = job_of("first", volumes="data:/data:ro,out:/out")
    assert containers.task_config(job).model_dir == "/out/first"


def test_one_volume_must_be_writable() -> None:
    """With read-only volumes alone, the error is about them, with or without --model_dir."""
    for flags in ({}, {"model_dir": "/a/first"}):
        with pytest.raises(ConfigError, match=r"--volumes: each can only be read.*: add NAME:/path"):
            containers.task_config(job_of("first", volumes="a:/a:ro,b:/b:ro", **flags))


@pytest.mark.parametrize(("flag", "value"), [("model_dir", "/x"), ("model_dir", "runs")])
def test_what_a_job_leaves_must_be_on_a_volume(flag: str, value: str) -> None:
    """A --model_dir that would be gone with its container, or cannot be written, is an error that gives the fix."""
    with pytest.raises(ConfigError, match=r"--model_dir=.* is (on no volume.*--volumes=NAME:/|no path in the cont)"):
        containers.task_config(job_of("first", **{flag: value}))


def test_a_users_model_has_a_path_of_its_own_inside() -> None:
    """A file of this machine keeps its name; a built-in model or a module is left as it is."""
    mine = job_of("first", model="dir/it's mine.py", model_source="...")
    assert containers.task_config(mine).model == f"{containers.MODEL_DIR}/it's mine.py"
    assert containers.task_config(job_of("first", model="mnist")).model == "mnist"
