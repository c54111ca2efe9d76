"""Where jobs run: the table of the launchers that are built in, and those that other distributions offer.

Nothing is imported before it is asked for, and what other distributions offer is read only by the commands that name a
launcher: ``tfps run`` starts without. A distribution offers a launcher by an entry point of the group ``GROUP``; in
its ``pyproject.toml``::

    [project.entry-points."tfps.launchers"]
    pbs = "my_package.pbs:PbsLauncher"
"""

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tfps.errors import ConfigError
from tfps.launchers.base import Launcher, Plan

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "tfps.launchers"
LAUNCHERS: Mapping[str, str] = {
    "compose": "tfps.launchers.docker.compose:ComposeLauncher",
    "hosts": "tfps.launchers.ssh.launcher:HostsLauncher",
    "kubernetes": "tfps.launchers.kubernetes.jobs:JobsLauncher",
    "tfjob": "tfps.launchers.kubernetes.tfjob:TFJobLauncher",
    "volcano": "tfps.launchers.kubernetes.volcano:VolcanoLauncher",
    "jobset": "tfps.launchers.kubernetes.jobset:JobSetLauncher",
    "ray": "tfps.launchers.ray.launcher:RayLauncher",
    "slurm": "tfps.launchers.slurm.launcher:SlurmLauncher",
}


class LauncherNames(Collection[str]):
    """The names of all launchers, the built-in ones first. Reads what is installed when it is first asked."""

    def __init__(self) -> None:
        self._names: Sequence[str] | None = None

    def _read(self) -> Sequence[str]:
        if self._names is None:
            self._names = [*LAUNCHERS, *sorted({point.name for point in _entry_points()} - set(LAUNCHERS))]
        return self._names

    def __contains__(self, name: object) -> bool:
        return name in LAUNCHERS or name in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def load(name: str) -> Launcher[Plan]:
    """Return the launcher of a platform.

    Args:
        name: One of ``LauncherNames``.

    Raises:
        ConfigError: If a distribution offers it that cannot be imported, or is no launcher, or more than one offers it;
            names the distribution.

    Example::

        plan = registry.load("slurm").plan(job)
    """
    offered = [point for point in _entry_points() if point.name == name]
    if len(offered) + (name in LAUNCHERS) > 1:
        others = ", ".join(map(_origin, offered))
        whose = f"tfps itself and {others} offer" if name in LAUNCHERS else f"{others} offer"
        raise ConfigError(f"--to={name}: {whose} a launcher of this name: uninstall one, or rename it.")
    found = _load_offered(offered[0]) if offered else _load_built_in(name)
    launcher: Launcher[Plan] = found()  # it takes the plans that it made itself
    return launcher


def _entry_points() -> Sequence["EntryPoint"]:
    """Return what distributions offer."""
    from importlib import metadata  # noqa: PLC0415  tfps run has no use for it

    return list(metadata.entry_points(group=GROUP))


def _load_built_in(name: str) -> type[Launcher[Plan]]:
    module, _, attribute = LAUNCHERS[name].partition(":")
    found: type[Launcher[Plan]] = getattr(importlib.import_module(module), attribute)
    return found


def _load_offered(point: "EntryPoint") -> type[Launcher[Plan]]:
    """Import the launcher of an entry point, and look whether it is one."""
    told = f"the launcher {point.name} of {_origin(point)}, {point.value},"
    try:
        found = point.load()
    except Exception as error:  # a module may raise anything as it is imported
        fix = "repair that distribution, or uninstall it"
        raise ConfigError(f"{told} cannot be imported: {type(error).__name__}: {error}: {fix}.") from error
    if not (isinstance(found, type) and issubclass(found, Launcher)):
        raise ConfigError(f"{told} is no subclass of tfps.launchers.base.Launcher: {found!r}.")
    if inspect.isabstract(found):
        raise ConfigError(f"{told} lacks {', '.join(sorted(found.__abstractmethods__))}.")
    if getattr(found, "name", None) != point.name:
        raise ConfigError(f"{told} has another name, {getattr(found, 'name', None)!r}: handles begin with it.")
    return found


def _origin(point: "EntryPoint") -> str:
    """Return the distribution that offers an entry point."""
    return f"the distribution {point.dist.name} {point.dist.version}" if point.dist else "a distribution without a name"
