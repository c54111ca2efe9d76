"""The comment at the head of a manifest: how its job ends, and who can reach its pods."""

import textwrap

from tfps.config.launch_protocol import TOKEN
from tfps.jobs.spec import PORT, Job
from tfps.launchers.common import containers
from tfps.launchers.kubernetes import manifests
from tfps.text import plural, show

_RESTARTS = "A task that is killed, or ends as another is lost,"  # after what a launcher says of the end of PS
_SERVICE_ENDS = """The service ends with 0 after --max_steps updates; without that flag, it runs until tfps cancel,
which saves. The job has succeeded when all servers have ended with 0."""


def comment_of(job: Job, platform: str, why: str) -> str:
    """Return the comment of a job with container paths.

    Args:
        job: The job.
        platform: The launcher's name.
        why: Why the parameter servers of a training job end, and what restarts tasks.
    """
    others = "a parameter service" if job.config.serve else plural(job.worker.replicas, "worker")
    handle = f"{platform}:{job.options.namespace or 'NAMESPACE'}/{job.name}"
    head = (
        f"{job.name}: {job.ps.replicas} ps, {others}. kubectl create -f FILE starts it, tfps status {handle} shows it."
    )
    _, restarts, rest = " ".join(why.split()).partition(_RESTARTS)
    if restarts and job.config.serve:
        why = f"{_SERVICE_ENDS} {restarts}{rest}"
    elif restarts and not job.ps.replicas:
        why = f"The chief holds what parameter servers would, and ends last. {restarts}{rest}"
    return f"{head}\n{textwrap.fill(why.strip(), 118)}\n{_of_volumes(job)}"


def _of_volumes(job: Job) -> str:
    found = containers.volumes(job.options)
    claims = ", ".join(volume.source for volume in found if not volume.on_host)
    text = f"Volume claims that must exist: {claims}. This job neither creates nor deletes them.\n" if claims else ""
    for volume in (one for one in found if one.on_host):
        use = "read" if volume.read_only else "write to"
        text += f"The directory {show(volume.source)} must be on every node, for user {manifests.USER} to {use}.\n"
    text += _of_token(job) if job.config.serve else ""
    if not job.options.network_policy:
        can = "change the parameters" if job.config.serve else "run code in them"
        return f"{text}Whoever reaches the job's pods can {can}: no NetworkPolicy keeps others away."
    if job.config.serve:
        return f"{text}Only pods of its namespace can reach its pods, where the network heeds policies."
    reach = "anything, as --data_dir is a URL" if "://" in job.config.data_dir else "those and name servers only"
    return f"{text}Only the job's own pods can reach its pods, which reach {reach}, where the network heeds policies."


def _of_token(job: Job) -> str:
    name = job.options.token_secret
    if name is None:
        return f"Whoever reaches its port {PORT} can change the parameters: give --token_secret.\n"
    return f"The Secret {name} must exist: its key token is the value of {TOKEN} for servers and clients.\n"
