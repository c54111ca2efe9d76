"""A service that lasts as long as a block of a program."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.certificates import Authority
from support.processes import PATIENCE, environment, load_variable, run_tfps, wait_gone

import tfps
from tfps.errors import ServiceError


def test_a_service_in_a_block(tmp_path: Path) -> None:
    """Its flags count, it saves as it ends, and nothing of it is left."""
    flags = {"num_ps": 2, "learning_rate": 1.0, "mode": "sync", "num_workers": 1, "model_dir": tmp_path / "job"}
    with tfps.serve(**flags) as address, tfps.connect(address) as ps:  # type: ignore[arg-type]
        assert address.count(",") == 1
        ps.init({"w": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
        for step in range(3):
            ps.pull()
            assert ps.push({"w": np.ones(2, np.float32)}) == step + 1
    np.testing.assert_array_equal(load_variable(tmp_path / "job", "w"), [-3, -3])


def test_a_service_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two servers, with relative paths; a program without code for it needs one variable, and is refused without."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    monkeypatch.chdir(tmp_path)
    flags = {"num_ps": 2, "model_dir": "job", "tls_cert": cert.name, "tls_key": key.name, "tls_ca": authority.cert.name}
    program = "import numpy, tfps; ps = tfps.connect(); ps.init(dict(v=numpy.ones(2), w=numpy.ones(3)))"
    program += "; print(ps.push(dict(v=numpy.ones(2), w=numpy.ones(3))), *ps.pull()['v'])"
    with tfps.serve(**flags, learning_rate=0.5) as address:  # type: ignore[arg-type]
        known = environment(TFPS_PS_HOSTS=address, TFPS_TLS_CA=str(authority.cert))
        assert subprocess.check_output([sys.executable, "-c", program], env=known, text=True) == "1 0.5 0.5\n"
        with pytest.raises(ServiceError, match="this service has TLS"):
            tfps.connect(address, start_timeout_secs=60)


def test_flags_that_are_wrong_are_an_error_of_the_caller() -> None:
    """With the message of the command line."""
    with pytest.raises(ServiceError, match="--mode=nope is not one of"), tfps.serve(mode="nope"):
        pass


def test_the_service_ends_with_the_program(tmp_path: Path) -> None:
    """Which is killed in the block."""
    program = f"""
import time, tfps
with tfps.serve(model_dir={str(tmp_path / "job")!r}) as address:
    print(address, flush=True)
    time.sleep(600)
"""
    given = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([sys.executable, "-c", program], **given) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline().startswith("127.0.0.1:")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert children
        finally:
            os.kill(process.pid, signal.SIGKILL)
    wait_gone([int(child) for child in children], 30 * PATIENCE)


def test_a_service_without_a_block(tmp_path: Path) -> None:
    """As in a notebook."""
    service = tfps.serve(model_dir=tmp_path / "job", learning_rate=1)
    assert repr(service) == f"<tfps service at {service.address}>"
    with tfps.connect(service.address) as ps:
        ps.init({"w": np.zeros(2, np.float32)})
        ps.push({"w": np.ones(2, np.float32)})
    service.close()
    service.close()
    np.testing.assert_array_equal(load_variable(tmp_path / "job", "w"), [-1, -1])


def test_a_forked_child_does_not_keep_the_service(tmp_path: Path) -> None:
    """It ends with the program that has started it."""
    program = f"""
import os, time, tfps
service = tfps.serve(model_dir={str(tmp_path / "job")!r})
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
if child := os.fork():
    print(child, *children, flush=True)
time.sleep(600)
"""
    given = {"stdout": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([sys.executable, "-c", program], **given) as process:  # type: ignore[call-overload]
        try:
            child, *servers = map(int, process.stdout.readline().split())
            assert servers
        finally:
            os.kill(process.pid, signal.SIGKILL)
        try:
            wait_gone(servers, 30 * PATIENCE)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_model_is_measured_with_what_a_service_has_saved(tmp_path: Path) -> None:
    """The loss of ``linear`` is that of the pushed parameters; without a model it is said that a service has none."""
    saved = f"--model_dir={tmp_path / 'job'}"
    flags = {"num_ps": 2, "learning_rate": 1.0, "model_dir": tmp_path / "job"}
    with tfps.serve(**flags) as address, tfps.connect(address) as ps:  # type: ignore[arg-type]
        ps.init({"weight": np.float32(0), "bias": np.float32(0)})
        ps.push({"weight": np.float32(-2), "bias": np.float32(-10)})
    measured = run_tfps("eval", "--model=linear", saved)
    rmse = float(re.search(r"rmse=([\d.]+)", measured.stdout)[1])  # type: ignore[index]
    assert (measured.returncode, 0.3 < rmse < 0.36) == (0, True), measured.stdout  # the noise is 0.33
    refused = run_tfps("eval", saved)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --model is missing: a service has written")
