"""Where jobs run: one file per platform, this one lazy table. Launchers import neither TensorFlow nor the runtime.

The module of a platform that jobs are submitted to has

- ``FLAGS``: which flags of ``tfps submit`` it understands, beside those that every platform does;
- ``plan(job) -> Plan``: pure; ``str(plan)`` is the script or manifest, all that is sent. Raises ConfigError for what
  the platform would refuse;
- ``sends(job) -> bool``: whether there is something to send, or the plan is only printed;
- ``submit(plan) -> SubmittedJob``: sends it, all or nothing. Raises ConfigError in the platform's own words;
- ``find(id) -> SubmittedJob``: the job of a handle ``PLATFORM:ID``; does not ask the platform yet.

Every plan starts its tasks with ``python -m tfps run`` and the flags of ``JobConfig.to_argv()``, which starts a lost
task again (``supervisor``). A platform's own retries are for containers that were killed and nodes that were lost.
"""

from collections.abc import Mapping

LAUNCHERS: Mapping[str, str] = {
    "compose": "tfps.launchers.docker.compose",
    "hosts": "tfps.launchers.ssh.launcher",
    "kubernetes": "tfps.launchers.kubernetes.jobs",
    "tfjob": "tfps.launchers.kubernetes.tfjob",
    "volcano": "tfps.launchers.kubernetes.volcano",
    "jobset": "tfps.launchers.kubernetes.jobset",
    "ray": "tfps.launchers.ray.launcher",
    "slurm": "tfps.launchers.slurm.launcher",
}
