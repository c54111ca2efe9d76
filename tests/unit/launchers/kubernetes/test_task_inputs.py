"""The hosts and the model's file, as tasks on each Kubernetes platform get them, and what is too large for that."""

import base64
from pathlib import Path

import pytest
import yaml
from support.jobs import job_of
from support.kubernetes_jobs import FULL, PLATFORMS, changed, kind_of, plan_of, templates
from support.processes import POWERS

from tfps.cli import main
from tfps.cluster.resolver import NumPs, resolve
from tfps.cluster.spec import Task
from tfps.errors import ConfigError
from tfps.launchers.kubernetes import task_inputs

every_platform = pytest.mark.parametrize("platform", PLATFORMS)


@every_platform
def test_a_models_file_arrives_as_it_is(platform: str) -> None:
    """The ConfigMap has the model's source, to the byte, and is mounted where --model points."""
    data = kind_of(platform, FULL, "ConfigMap")["data"]
    assert data["model"] == FULL.model_source
    spec = templates(platform, FULL)["worker"]["spec"]
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "model"]
    assert volume["configMap"] == {"name": "full", "items": [{"key": "model", "path": 'my "model" $(id).py'}]}
    assert {"name": "model", "mountPath": "/opt/model", "readOnly": True} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    "head",
    [b"", b"# -*- coding: latin-1 -*-\n# \xe9\n", b"\xef\xbb\xbf", b"\n  \n", "#a\x85b\u2028cé\n".encode()],
    ids=["plain", "latin-1", "byte order mark", "blank", "other line ends"],
)
@pytest.mark.parametrize("tail", [b"\n", b"", b"\n\n\n", b"\r\n# end\r\n"], ids=["line", "no end", "blank", "dos"])
def test_the_file_that_is_sent_has_the_models_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], head: bytes, tail: bytes
) -> None:
    """Else the job's hash of its model would not be the file's; so does the file that --dry_run prints."""
    content = head + POWERS.strip().encode() + tail
    (tmp_path / "m.py").write_bytes(content)
    (tmp_path / "kubectl").write_text("#!/bin/sh\n[ $1 != create ] || cat >$$.sent\necho space uid\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    argv = ["submit", "--to=kubernetes", "--model=m.py", "--name=a"]
    assert main.main(argv) == 0
    assert capsys.readouterr() == ("kubernetes:space/a\n", "")
    assert main.main([*argv, "--dry_run"]) == 0
    printed = capsys.readouterr().out
    for texts in ([path.read_text() for path in tmp_path.glob("*.sent")], [printed]):
        [found] = [made for text in texts for made in yaml.safe_load_all(text) if made["kind"] == "ConfigMap"]
        binary = base64.b64decode(found.get("binaryData", {}).get("model", ""))
        assert binary or found["data"]["model"].encode() == content
        assert binary in (b"", content)
        assert found["data"]["ps_hosts"]


@every_platform
def test_a_model_that_no_configmap_holds_is_refused(platform: str) -> None:
    """A model's file of more than a mebibyte is an error that names another way."""
    with pytest.raises(ConfigError, match="put the model into the image"):
        plan_of(platform, changed(FULL, "#" * 2**20 + "\n"))


@every_platform
def test_tfps_takes_the_hosts(platform: str) -> None:
    """The cluster that tasks get, from the ConfigMap or from the operator, has the size that was asked for."""
    data = kind_of(platform, FULL, "ConfigMap")["data"]
    given = {"TF_CONFIG": task_inputs.tf_config(FULL, "team.svc", Task("worker", 2))}
    env = {} if "ps_hosts" in data else given
    task = ("worker", 2) if "ps_hosts" in data else (None, None)
    members, me = resolve(data.get("ps_hosts"), data.get("worker_hosts"), *task, NumPs(), None, env)
    assert (members.num_ps, members.num_workers, str(me)) == (2, 3, "worker/2")


@every_platform
def test_more_tasks_than_one_argument_names_are_refused(platform: str) -> None:
    """The addresses of 4,097 tasks do not fit into one argument or variable of a process."""
    with pytest.raises(ConfigError, match="4,097 tasks are too many"):
        plan_of(platform, changed(job_of("a" * 30), num_workers=4096, num_ps=1))
