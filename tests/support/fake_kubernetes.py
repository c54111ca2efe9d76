"""A stand-in for a cluster: an API server on loopback that kubectl can talk to, and whose pods are processes here.

It stores what kubectl creates, does what of controllers tfps relies on (a pod for each task, replaced or not as the
job's policies say, after the back-off of a Job or of each of its indexes; the end of the job; events of refused pods;
objects that a finalizer keeps), and of a kubelet: variables in commands, environments, logs, SIGTERM, and a container
that ends with its first process.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.processes import children_of, environment

from tfps.cluster.ports import held_ports

Object = dict[str, Any]

# By group and version, the resources and their kinds.
SERVED: Mapping[str, Mapping[str, str]] = {
    "v1": {"pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "events": "Event"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "kubeflow.org/v1": {"tfjobs": "TFJob"},
    "batch.volcano.sh/v1alpha1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
}
_COMPONENT = "app.kubernetes.io/component"
_PATH = re.compile(
    r"/(?:api|apis)/(?P<api>v1|[^/]+/v\w+)/namespaces/(?P<namespace>[^/]+)/(?P<resource>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a command as the kubelet makes it: ``$$`` is ``$``, ``$(NAME)`` the variable if there is one."""
    return re.sub(
        r"\$(?:(\$)|\(([^)]*)\))", lambda match: match[1] or variables.get(match[2], f"$({match[2]})"), text, flags=re.S
    )


class Pod:
    """A pod: what the API says of it, what it has said, and its process, if it has one.

    Attributes:
        cut_after: How many lines a reader of its log gets before the connection ends, once.
    """

    def __init__(self, manifest: Object, owner: Object, made: Object) -> None:
        self.manifest, self.owner, self.made = manifest, owner, made
        self.cut_after: int | None = None
        self.lines: list[tuple[str, str]] = []  # each with its stamp
        self.process: subprocess.Popen[str] | None = None
        self.reader: threading.Thread | None = None
        self.set("Pending", {"waiting": {"reason": "ContainerCreating"}})

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self.manifest["status"]["phase"] in ("Succeeded", "Failed")

    def set(self, phase: str, state: Object, **more: Any) -> None:
        """Change what the API says of it."""
        container = {"name": "tensorflow", "state": state, "restartCount": 0, "ready": phase == "Running"}
        self.manifest["status"] = {"phase": phase, "containerStatuses": [container], **more}

    def run(self) -> None:
        """Say that it runs."""
        self.manifest["spec"]["nodeName"] = "node-1"
        self.set("Running", {"running": {"startedAt": _now()}})

    def say(self, line: str) -> None:
        """Log a line."""
        self.lines.append((_stamp(), line))

    def kill(self) -> None:
        """Kill its container: the first process, and with it all that are below."""
        assert self.process is not None
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, code: int) -> None:
        """Say that it has ended."""
        why = {"exitCode": code, "reason": "Completed" if code == 0 else "OOMKilled" if code == 137 else "Error"}
        self.set("Failed" if code else "Succeeded", {"terminated": why})


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


class Cluster:
    """What is in the cluster. ``runs`` says whether pods are processes; else a test moves them.

    Attributes:
        refused: By kind, the message with which creating one is refused; of pods, that of an event.
        warned: By kind, what creating one is warned of.
        stuck: Kinds and names of objects that a finalizer, or a pod on a lost node, keeps from going.
        backoff_secs: The first and the longest pause before a Job makes a pod anew; Kubernetes' own are 10 and 600 s.
        missing: API groups that are not installed.
        secrets: The values of Secrets, by name and key.
        received: Every object as it was sent.
        requests: Each request's method and path.
    """

    def __init__(self, directory: Path, runs: bool = False) -> None:
        self.directory = directory
        self.runs = runs
        self.refused: dict[str, str] = {}
        self.warned: dict[str, str] = {}
        self.stuck: set[tuple[str, str]] = set()
        self.backoff_secs = (0.0, 0.0)
        self._failures: dict[tuple[str, str, int], int] = {}  # by namespace and name of a Job, and its index
        self.missing: set[str] = set()
        self.secrets: dict[tuple[str, str], str] = {}
        self.received: list[Object] = []
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[tuple[str, str, str, str], Object] = {}  # by group and version, resource, namespace, name
        self.pods: dict[tuple[str, str], Pod] = {}
        self.lock = threading.RLock()
        self._count = 0
        self._closed = False
        self._hosts: dict[str, str] = {}
        self._free: list[int] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        self._free = self._stack.enter_context(held_ports(12)) if self.runs else []
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self._closed = True  # what ends from now on is not started again
            left = list(self.pods.values())
        for pod in left:
            if pod.process and pod.reader:
                pod.kill()
                pod.reader.join(30)
        self._stack.close()

    def pod(self, role: str, index: int) -> Pod:
        """Return the newest pod of a task."""
        return [pod for pod in self.pods.values() if (pod.made["role"], pod.made["index"]) == (role, index)][-1]

    def kinds(self) -> list[str]:
        """Return the kinds of the objects that are there, in the order in which they came."""
        return [found["kind"] for found in self.objects.values()]

    def create(self, api: str, resource: str, namespace: str, given: Object) -> Object:
        """Store an object, and make the pods of a job."""
        with self.lock:
            self._count += 1
            metadata = given["metadata"]
            metadata.update(
                namespace=namespace, uid=f"uid-{self._count}", creationTimestamp=_now(), resourceVersion="1"
            )
            self.objects[api, resource, namespace, metadata["name"]] = given
            for made in _made_of(given):
                self._start(given, made)
            return given

    def _start(self, owner: Object, made: Object) -> None:
        """Make a pod, and run it; where pods are refused, say so in an event."""
        self._count += 1
        namespace = owner["metadata"]["namespace"]
        if "Pod" in self.refused:
            self._say_refused(owner, made)
            return
        template = json.loads(json.dumps(made["template"]))
        metadata = {**template["metadata"], "name": made["name"].replace("?", f"{self._count:05d}")}
        metadata["labels"] = {**metadata["labels"], **made.get("labels", {})}
        metadata |= {"namespace": namespace, "uid": f"uid-{self._count}", "creationTimestamp": _stamp()}
        metadata["annotations"] = {**metadata.get("annotations", {}), **made["annotations"]}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        pod = Pod(manifest, owner, made)
        self.pods[namespace, pod.name] = pod
        if self.runs:
            self._run(pod)

    def _say_refused(self, owner: Object, made: Object) -> None:
        """Add the event with which a controller tells that it could not make a pod."""
        name = made["name"].rpartition("-?")[0].rpartition("-")[0] or owner["metadata"]["name"]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{self._count}", "namespace": owner["metadata"]["namespace"]},
            "involvedObject": {"kind": owner["kind"], "name": name},
            "reason": "FailedCreate",
            "message": f"Error creating: {self.refused['Pod']}",
            "lastTimestamp": _stamp(),
            "type": "Warning",
        }
        self.objects["v1", "events", event["metadata"]["namespace"], event["metadata"]["name"]] = event

    def variables(self, pod: Pod) -> dict[str, str]:
        """Return a container's environment, as the kubelet makes it; addresses are those of this machine."""
        namespace, found = pod.manifest["metadata"]["namespace"], dict(pod.made["env"])
        for one in pod.manifest["spec"]["containers"][0]["env"]:
            found[one["name"]] = self._value(pod, namespace, one)
        if not self.runs:
            return found
        return {name: re.sub(r"[a-z0-9.-]+:2222", lambda m: self._address(m[0]), text) for name, text in found.items()}

    def _value(self, pod: Pod, namespace: str, variable: Object) -> str:
        """Return the value of a container's variable."""
        source = variable.get("valueFrom", {"value": variable.get("value")})
        [(kind, wanted)] = source.items()
        if kind == "configMapKeyRef":
            return self.file(namespace, wanted)
        if kind == "secretKeyRef":
            return self.secrets[wanted["name"], wanted["key"]]
        if kind == "fieldRef":
            return str(pod.manifest["metadata"]["labels"][wanted["fieldPath"].split("'")[1]])
        return str(wanted)

    def address_of(self, host: str) -> str:
        """Return where a host and port of the cluster are on this machine."""
        return self._address(host)

    def file(self, namespace: str, wanted: Mapping[str, str]) -> str:
        """Return a key of a ConfigMap."""
        return str(self.objects["v1", "configmaps", namespace, wanted["name"]]["data"][wanted["key"]])

    def _address(self, host: str) -> str:
        if host not in self._hosts:
            self._hosts[host] = f"127.0.0.1:{self._free[len(self._hosts)]}"
        return self._hosts[host]

    def argv(self, pod: Pod) -> list[str]:
        """Return a container's command, as the kubelet makes it."""
        variables = self.variables(pod)
        return [expand(word, variables) for word in pod.manifest["spec"]["containers"][0]["command"]]

    def _run(self, pod: Pod) -> None:
        argv = [word.replace("/opt/model", str(self._model(pod)), 1) for word in self.argv(pod)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        pod.process = subprocess.Popen(
            [sys.executable if argv[0] == "python" else argv[0], *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.directory,
            env=environment(PATH=path, **self.variables(pod)),
            start_new_session=True,
        )
        pod.run()
        pod.reader = threading.Thread(target=self._see_through, args=(pod,), daemon=True)
        pod.reader.start()

    def _model(self, pod: Pod) -> Path:
        """Return a directory with the files that a pod mounts from a ConfigMap."""
        directory = self.directory / f"model-{pod.name}"
        for volume in pod.manifest["spec"]["volumes"]:
            for item in volume.get("configMap", {}).get("items", []):
                wanted = {"name": volume["configMap"]["name"], "key": item["key"]}
                directory.mkdir(exist_ok=True)
                (directory / item["path"]).write_text(self.file(pod.manifest["metadata"]["namespace"], wanted))
        return directory

    def _see_through(self, pod: Pod) -> None:
        """Run in a thread: take what a process says, and do what its end asks for."""
        assert pod.process is not None
        assert pod.process.stdout is not None
        for line in pod.process.stdout:
            pod.say(line.rstrip("\n"))
        code = pod.process.wait()
        self.end(pod, 128 - code if code < 0 else code)

    def end(self, pod: Pod, code: int) -> None:
        """End a pod, and do what its controller does then."""
        owner = pod.owner
        with self.lock:
            pod.end(code)
            if self._closed or owner["metadata"].get("deletionTimestamp") or owner.get("status", {}).get("over"):
                return
            action = _action(owner, pod, code) if code else ""
            if action == "replace":
                self._replace(pod)
            elif action == "restart":
                self._restart(owner)
            elif code:
                self._finish(owner, "Failed", f"{pod.name} ended with exit code {code}")
            elif self._complete(owner):
                self._finish(owner, "Completed", "")

    def _replace(self, pod: Pod) -> None:
        """Make a pod anew after the back-off, unless its Job has had enough of them."""
        owner, made = pod.owner, pod.made
        namespace, name = owner["metadata"]["namespace"], made["name"].rpartition("-?")[0].rpartition("-")[0]
        if not name:  # an operator's pod has the same name again, at once and without end
            self.pods.pop((namespace, pod.name), None)
            self._start(owner, made)
            return
        limit, per_index = made["limits"]
        key = (namespace, name, made["index"] if per_index else -1)  # one count, and one pause, of all its indexes
        failed = self._failures[key] = self._failures.get(key, 0) + 1
        if failed > limit:
            self._finish(owner, "Failed", f"{name} has reached the specified backoff limit")
            return
        first, longest = self.backoff_secs
        pause = min(first * 2 ** (failed - 1), longest)
        if pause:
            timer = threading.Timer(pause, self._start_later, (owner, made))
            timer.daemon = True
            timer.start()
        else:
            self._start(owner, made)

    def _start_later(self, owner: Object, made: Object) -> None:
        with self.lock:
            gone = owner["metadata"].get("deletionTimestamp") or owner.get("status", {}).get("over")
            if not (self._closed or gone):
                self._start(owner, made)

    def _restart(self, owner: Object) -> None:
        """Start a whole job again, as Volcano does."""
        for key, pod in [(key, pod) for key, pod in self.pods.items() if _belongs(pod, owner)]:
            if pod.process and not pod.ended:
                pod.kill()
            del self.pods[key]
        for made in _made_of(owner):
            self._start(owner, made)

    def _complete(self, owner: Object) -> bool:
        """Return whether all tasks that decide have ended well."""
        wanted = sum(made["decides"] for made in _made_of(owner))
        done = [p for p in self.pods.values() if p.manifest["status"]["phase"] == "Succeeded" and _belongs(p, owner)]
        return bool(wanted) and sum(pod.made["decides"] for pod in done) == wanted

    def _finish(self, owner: Object, how: str, message: str) -> None:
        """End a job: say so, and end its other pods."""
        names = {"batch/v1": "Complete", "kubeflow.org/v1": "Succeeded"}
        name = names.get(owner["apiVersion"], "Completed") if how == "Completed" else how
        condition = {"type": name, "status": "True", "reason": f"Job{how}", "message": message}
        phase = "Terminated" if how == "Failed" else how
        owner["status"] = {"over": True, "conditions": [condition], "state": {"phase": phase, "message": message}}
        for pod in [pod for pod in self.pods.values() if _belongs(pod, owner) and not pod.ended]:
            if pod.process:
                pod.process.send_signal(signal.SIGTERM)
            elif pod.manifest["status"]["phase"] == "Running":
                pod.end(143)

    def delete(self, api: str, resource: str, namespace: str, name: str) -> Object:
        """Delete an object and, of a job, its pods, which get SIGTERM."""
        found = self.objects[api, resource, namespace, name]
        found["metadata"]["deletionTimestamp"] = _now()
        if (found["kind"], name) in self.stuck:
            return found
        mine = [key for key, pod in list(self.pods.items()) if _made_of(found) and _belongs(pod, found)]
        for process in [p for key in mine if (p := self.pods[key].process)]:
            process.send_signal(signal.SIGTERM)
        for key in mine:
            pod = self.pods[key]
            if pod.process and pod.reader:
                pod.process.wait(100)
                pod.reader.join(30)
            del self.pods[key]
        return self.objects.pop((api, resource, namespace, name))


def _action(owner: Object, pod: Pod, code: int) -> str:
    """Return what a controller does about a pod that has failed: ``replace``, ``restart`` the job, or ``fail`` it."""
    if owner["kind"] == "TFJob":
        return "replace" if code >= 128 else "fail"
    if owner["apiVersion"].startswith("batch.volcano.sh"):
        policies = owner["spec"]["policies"]
        fits = [one for one in policies if one.get("exitCode") == code or "PodFailed" in one.get("events", [])]
        return "restart" if fits and fits[0]["action"] == "RestartJob" else "fail"
    for rule in pod.made["rules"]:
        if (codes := rule.get("onExitCodes")) and (code in codes["values"]) == (codes["operator"] == "In"):
            return {"FailJob": "fail", "Ignore": "replace"}[rule["action"]]
    return "replace"


def _belongs(pod: Pod, owner: Object) -> bool:
    """Return whether a pod is a job's: it has all labels that the job has."""
    labels = pod.manifest["metadata"]["labels"]
    return owner["metadata"]["labels"].items() <= labels.items()


def _made_of(owner: Object) -> list[Object]:
    """Return the pods that a job's controller makes: names (``?`` for random letters), templates, variables."""
    name, api, spec = owner["metadata"]["name"], owner["apiVersion"], owner.get("spec", {})
    if (api, owner["kind"]) == ("batch/v1", "Job"):
        return _indexed(name, owner["metadata"]["labels"][_COMPONENT], spec, decides=True)
    if owner["kind"] == "JobSet":
        sets = [(one["name"], one["template"]["spec"]) for one in spec["replicatedJobs"]]
        deciding = spec["successPolicy"]["targetReplicatedJobs"]
        return [made for role, job in sets for made in _indexed(f"{name}-{role}-0", role, job, role in deciding)]
    if owner["kind"] == "TFJob":
        sets = [(kind.lower(), one) for kind, one in spec["tfReplicaSpecs"].items()]
        domain = f"{owner['metadata']['namespace']}.svc"
        return _with_tf_config(name, sets, domain, in_name=False, deciding=("worker",))  # its PS never count
    if owner["kind"] == "Job":
        completes = [{"event": "TaskCompleted", "action": "CompleteJob"}]
        deciding = [one["name"] for one in spec["tasks"] if one.get("policies") == completes]
        return _with_tf_config(name, [(one["name"], one) for one in spec["tasks"]], name, True, deciding)
    return []


def _indexed(name: str, role: str, spec: Object, decides: bool) -> list[Object]:
    key = "batch.kubernetes.io/job-completion-index"
    return [
        {
            "name": f"{name}-{index}-?",
            "role": role,
            "index": index,
            "template": spec["template"],
            "annotations": {key: str(index)},
            "decides": decides,
            "env": {"JOB_COMPLETION_INDEX": str(index)},
            "rules": spec.get("podFailurePolicy", {}).get("rules", []),
            "limits": (spec.get("backoffLimitPerIndex", spec.get("backoffLimit", 6)), "backoffLimitPerIndex" in spec),
        }
        for index in range(spec["completions"])
    ]


def _with_tf_config(
    name: str, sets: list[tuple[str, Object]], domain: str, in_name: bool, deciding: Sequence[str]
) -> list[Object]:
    """Return the pods of an operator that sets TF_CONFIG, except for a pod alone."""
    is_alone = sum(one["replicas"] for _, one in sets) == 1
    cluster = {role: [f"{name}-{role}-{n}.{domain}:2222" for n in range(one["replicas"])] for role, one in sets}
    return [
        {
            "name": f"{name}-{role}-{index}",
            "role": one["template"]["metadata"]["labels"][_COMPONENT],
            "index": index,
            "template": one["template"],
            "decides": role in deciding,
            "labels": {} if in_name else {"training.kubeflow.org/replica-index": str(index)},
            "annotations": {"volcano.sh/task-index": str(index)} if in_name else {},
            "env": {} if is_alone else {"TF_CONFIG": json.dumps({"cluster": cluster, "task": _place(role, index)})},
        }
        for role, one in sets
        for index in range(one["replicas"])
    ]


def _place(role: str, index: int) -> Object:
    return {"type": role, "index": index}


class _Handler(BaseHTTPRequestHandler):
    """Answers kubectl."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        """Answer discovery, get, list and logs."""
        path, query, match = self._read()
        served = {api: of for api, of in SERVED.items() if api.partition("/")[0] not in self.cluster.missing}
        if path.startswith("/openapi"):
            self._send(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        elif path in ("/api", "/apis") or path.removeprefix("/apis/").removeprefix("/api/") in served:
            self._json(200, _discovery(path, served))
        elif not match or match["api"] not in served:
            self._fail(404, "NotFound", "the server could not find the requested resource")
        elif match["log"]:
            self._log(query)
        elif match["name"]:
            self._one(match)
        else:
            self._json(200, self._list(match, query))

    def do_POST(self) -> None:
        """Create an object."""
        _, _, match = self._read()
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.cluster.received.append(json.loads(json.dumps(given)))
        if not match or match["api"].partition("/")[0] in self.cluster.missing:
            self._fail(404, "NotFound", "the server could not find the requested resource")
        elif given["kind"] in self.cluster.refused:
            self._fail(403, "Forbidden", self.cluster.refused[given["kind"]])
        elif (key := (match["api"], match["resource"], match["namespace"], given["metadata"]["name"])) in (
            self.cluster.objects
        ):
            self._fail(409, "AlreadyExists", f'{match["resource"]} "{key[3]}" already exists')
        else:
            made = self.cluster.create(match["api"], match["resource"], match["namespace"], given)
            self._json(201, made, self.cluster.warned.get(given["kind"], ""))

    def do_PATCH(self) -> None:
        """Merge metadata into an object."""
        _, _, match = self._read()
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert match is not None
        key = (match["api"], match["resource"], match["namespace"], match["name"])
        if key not in self.cluster.objects:
            self._fail(404, "NotFound", f'{match["resource"]} "{match["name"]}" not found')
        else:
            self.cluster.objects[key]["metadata"].update(given["metadata"])
            self._json(200, self.cluster.objects[key])

    def do_DELETE(self) -> None:
        """Delete an object."""
        _, _, match = self._read()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert match is not None
        key = (match["api"], match["resource"], match["namespace"], match["name"])
        if key not in self.cluster.objects:
            self._fail(404, "NotFound", f'{match["resource"]} "{match["name"]}" not found')
        else:
            self._json(200, self.cluster.delete(*key))

    def _read(self) -> tuple[str, dict[str, str], re.Match[str] | None]:
        url = urllib.parse.urlsplit(self.path)
        self.cluster.requests.append((self.command, self.path))
        return url.path, dict(urllib.parse.parse_qsl(url.query)), _PATH.fullmatch(url.path)

    def _found(self, api: str, resource: str, namespace: str) -> list[Object]:
        if resource == "pods":
            return [pod.manifest for (where, _), pod in self.cluster.pods.items() if where == namespace]
        return [found for key, found in self.cluster.objects.items() if key[:3] == (api, resource, namespace)]

    def _list(self, match: re.Match[str], query: Mapping[str, str]) -> Object:
        with self.cluster.lock:
            found = self._found(match["api"], match["resource"], match["namespace"])
        labels = [term.split("=") for term in query.get("labelSelector", "").split(",") if term]
        name = query.get("fieldSelector", "").partition("metadata.name=")[2]
        reason = query.get("fieldSelector", "").partition("reason=")[2]
        kept = [
            one
            for one in found
            if all(one["metadata"].get("labels", {}).get(key) == value for key, value in labels)
            and name in ("", one["metadata"]["name"])
            and reason in ("", one.get("reason"))
        ]
        kind = f"{SERVED[match['api']][match['resource']]}List"
        return {"apiVersion": match["api"], "kind": kind, "metadata": {"resourceVersion": "1"}, "items": kept}

    def _one(self, match: re.Match[str]) -> None:
        found = self._found(match["api"], match["resource"], match["namespace"])
        one = [it for it in found if it["metadata"]["name"] == match["name"]]
        if one:
            self._json(200, one[0])
        else:
            self._fail(404, "NotFound", f'{match["resource"]} "{match["name"]}" not found')

    def _log(self, query: Mapping[str, str]) -> None:
        """Send a pod's log, with ``follow`` until it has ended."""
        match = _PATH.fullmatch(urllib.parse.urlsplit(self.path).path)
        assert match is not None
        pod = self.cluster.pods[match["namespace"], match["name"]]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for stamp, line in _follow(pod, query.get("follow") == "true"):
                if stamp[:19] >= query.get("sinceTime", "")[:19]:
                    text = f"{stamp} {line}\n" if query.get("timestamps") == "true" else f"{line}\n"
                    self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    def _fail(self, code: int, reason: str, message: str) -> None:
        answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
        self._json(code, {**answer, "reason": reason, "message": message})

    def _json(self, code: int, answer: Object, warning: str = "") -> None:
        self._send(code, json.dumps(answer).encode(), "application/json", warning)

    def _send(self, code: int, body: bytes, kind: str, warning: str = "") -> None:
        self.send_response(code)
        if warning:
            self.send_header("Warning", f'299 - "{warning}"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _follow(pod: Pod, follow: bool) -> Iterator[tuple[str, str]]:
    sent = 0
    while True:
        over = pod.ended or not follow
        while sent < len(pod.lines):
            yield pod.lines[sent]
            sent += 1
            if sent == pod.cut_after:
                pod.cut_after = None
                return
        if over:
            return
        time.sleep(0.05)


def _discovery(path: str, served: Mapping[str, Mapping[str, str]]) -> Object:
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        groups = [{"groupVersion": api, "version": api.partition("/")[2]} for api in served if "/" in api]
        answer = [
            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
            for one in groups
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": answer}
    api = path.removeprefix("/apis/").removeprefix("/api/")
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": verbs}
        for name, kind in served[api].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}


@contextlib.contextmanager
def serve(directory: Path, runs: bool = False) -> Iterator[tuple[Cluster, Path]]:
    """Serve a cluster; yields it and the KUBECONFIG file with which kubectl finds it."""
    with Cluster(directory, runs) as cluster:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield cluster, kubeconfig(directory, server.server_address[1])
        finally:
            server.shutdown()
            thread.join(10)
            server.server_close()


def kubeconfig(directory: Path, port: int) -> Path:
    """Write the configuration of a kubectl whose cluster is on a port of this machine, its namespace ``team``."""
    path = directory / "kubeconfig"
    answer = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "", "namespace": "team"}}],
    }
    path.write_text(json.dumps(answer))
    return path
