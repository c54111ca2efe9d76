"""A real Docker daemon for tests, with its own directory, socket and networks; and images made without a registry.

What the daemon does to the firewall and the routing of the machine is undone. Needs Debian's docker.io, docker-compose,
iptables and debootstrap, and root.
"""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.processes import REPO, children_of, wait_gone

COMPOSE_2 = Path(sys.prefix) / "compose-2/usr/libexec/docker/cli-plugins"
SKELETON = "tfps-skeleton"
BASE = "python:3.11.15-slim-bookworm"
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_NEEDED = ("python3-venv", "ca-certificates")


@contextlib.contextmanager
def daemon() -> Iterator[Path]:
    """Start a daemon, for the clients of this process's environment; yield its directory, and leave nothing of it."""
    directory = Path(tempfile.mkdtemp(prefix="tfps-docker-"))
    before = _network()
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(_dockerd(directory), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        with _environment(DOCKER_HOST=f"unix://{directory}/sock", DOCKER_CONFIG=str(directory / "config")):
            _wait_until_up(process, directory)
            yield directory
            remove_containers()
    finally:
        _end(process, directory)
        _restore_network(before)


def _dockerd(directory: Path) -> Sequence[str]:
    places = [f"--{option}={directory}/{option}" for option in ("data-root", "exec-root", "pidfile")]
    return ["dockerd", f"--host=unix://{directory}/sock", "--bridge=none", *places]


def _network() -> tuple[str, Sequence[str]]:
    """Return whether the machine routes, and its firewall's tables that Docker writes to."""
    tables = (["iptables-save", "--table", table] for table in ("filter", "nat"))
    saved = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in tables]
    return _IP_FORWARD.read_text(), saved


def _restore_network(before: tuple[str, Sequence[str]]) -> None:
    for table, rules in zip(("filter", "nat"), before[1], strict=True):
        subprocess.run(["iptables-restore"], input=rules or f"*{table}\nCOMMIT\n", text=True, check=True)
    _IP_FORWARD.write_text(before[0])


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait_until_up(process: "subprocess.Popen[bytes]", directory: Path) -> None:
    deadline = time.monotonic() + 100
    while subprocess.run(["docker", "version"], capture_output=True, check=False).returncode:
        log = (directory / "log").read_text(errors="replace")
        assert process.poll() is None, f"dockerd does not start:\n{log}"
        assert time.monotonic() < deadline, f"dockerd does not answer:\n{log}"
        time.sleep(0.1)


def remove_containers() -> None:
    """Remove every container and network."""
    if left := docker("ps", "--all", "--quiet").split():
        docker("rm", "--force", *left)
    docker("network", "prune", "--force")


def _end(process: "subprocess.Popen[bytes]", directory: Path) -> None:
    """End the daemon and all below it, unmount what it leaves mounted, and remove its directory."""
    below = children_of(process.pid)
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    wait_gone(below, 20)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{directory}/")]):
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(directory)


def docker(*arguments: str, given: bytes | None = None, timeout: float = 400) -> str:
    """Return what ``docker`` says; fails with its words if it does."""
    ended = subprocess.run(["docker", *arguments], input=given, capture_output=True, timeout=timeout, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


def inspect(*names: str) -> list[Any]:
    """Return what Docker knows of containers, networks or volumes."""
    found: list[Any] = json.loads(docker("inspect", *names))
    return found


def make_skeleton() -> None:
    """Make an image of a few directories and links; ``SKELETON_VOLUMES`` mount this machine's programs into it."""
    links = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("dev", "etc", "home", "opt", "proc", "sys", "tmp", "usr", "tfps"):
            owner = 1000 if name == "tfps" else 0
            mode = 0o1777 if name == "tmp" else 0o755
            _add(tar, name, type=tarfile.DIRTYPE, mode=mode, uid=owner, gid=owner)
        for name, target in links.items():
            _add(tar, name, type=tarfile.SYMTYPE, linkname=target)
    path = f"{sys.prefix}/bin:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    changes = ["USER 1000:1000", *(f"ENV {name}={value}" for name, value in environment.items())]
    options = [word for change in changes for word in ("--change", change)]
    docker("import", *options, "-", SKELETON, given=packed.getvalue())


def _add(tar: tarfile.TarFile, name: str, **attributes: Any) -> None:
    entry = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(entry, key, value)
    tar.addfile(entry)


def skeleton_flags() -> Sequence[str]:
    """Return the flags of a job on the skeleton."""
    found = [path for path in sys.path if Path(path).is_dir()]  # a .pth file may name places elsewhere
    places = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix, str(REPO), *found])
    outer = [place for place in places if not any(Path(other) in Path(place).parents for other in places)]
    return f"--image={SKELETON}", f"--volumes=tfps:/tfps,{','.join(f'{place}:{place}:ro' for place in outer)}"


def build_image(directory: Path, tag: str) -> None:
    """Build the shipped Dockerfile on a base that is made here, with this machine's way to its package index."""
    root = directory / "root"
    _run(["debootstrap", "--variant=minbase", f"--include={','.join(_NEEDED)}", "bookworm", str(root)])
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    (root / "etc/pip.conf").write_text(_pip_conf(root))
    with subprocess.Popen(["tar", "--directory", str(root), "--create", "."], stdout=subprocess.PIPE) as tar:
        _run(["docker", "import", "-", BASE], stdin=tar.stdout)
    shutil.rmtree(root)
    build = ["/usr/bin/docker", "build", "--network=host", "--tag", tag, "--file", "docker/Dockerfile", "."]
    _run(build, cwd=REPO, env={**os.environ, "DOCKER_BUILDKIT": "1"})


def _pip_conf(root: Path) -> str:
    """Return this machine's configuration of pip, whose CA bundle is copied to the base's own place.

    What else it names of this machine's files (constraints, wheels, an index) is not in the image, and left out.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    options = dict(line.split("=", 1) for line in result.stdout.splitlines())
    values = {name.rpartition(".")[2]: ast.literal_eval(value) for name, value in options.items()}
    bundle = values.get("cert") or os.environ.get("SSL_CERT_FILE") or _CA_BUNDLE
    shutil.copyfile(bundle, f"{root}{_CA_BUNDLE}")
    there = {name: value for name, value in values.items() if not re.match(r"/|file:", str(value))}
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in {**there, "cert": _CA_BUNDLE}.items()), ""])


@contextlib.contextmanager
def compose_2() -> Iterator[None]:
    """Let Docker's client have its plugin ``compose`` while the context lasts, without which tfps takes 1.29."""
    plugins = Path(os.environ["DOCKER_CONFIG"]) / "cli-plugins"
    plugins.parent.mkdir(exist_ok=True)
    plugins.symlink_to(COMPOSE_2)
    try:
        assert docker("compose", "version", "--short").startswith("2.")
        yield
    finally:
        plugins.unlink()


def _run(argv: Sequence[str], **options: Any) -> None:
    """Run a long command; fails with its last words."""
    ended = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800, check=False, **options)
    assert ended.returncode == 0, f"{argv[0]}: {ended.stdout.decode(errors='replace')[-3000:]}"


def volume(name: str) -> Path:
    """Return where a volume is on this machine."""
    return Path(docker("volume", "inspect", "--format={{.Mountpoint}}", name).strip())
