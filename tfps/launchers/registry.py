"""The launchers by name. This module does not import them.

A distribution offers a launcher with an entry point of the group ``tfps.launchers``; in its ``pyproject.toml``::

    [project.entry-points."tfps.launchers"]
    pbs = "my_package.pbs:PbsLauncher"
"""

from tfps.launchers.base import Launcher, Plan
from tfps.plugins import Registry

LAUNCHERS: Registry[Launcher[Plan]] = Registry(
    Launcher,
    "launcher",
    "to",
    {
        "compose": "tfps.launchers.docker.compose:ComposeLauncher",
        "hosts": "tfps.launchers.ssh.launcher:HostsLauncher",
        "kubernetes": "tfps.launchers.kubernetes.jobs:JobsLauncher",
        "tfjob": "tfps.launchers.kubernetes.tfjob:TFJobLauncher",
        "volcano": "tfps.launchers.kubernetes.volcano:VolcanoLauncher",
        "jobset": "tfps.launchers.kubernetes.jobset:JobSetLauncher",
        "ray": "tfps.launchers.ray.launcher:RayLauncher",
        "slurm": "tfps.launchers.slurm.launcher:SlurmLauncher",
    },
    "tfps.launchers",
)
