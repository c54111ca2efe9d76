"""Distributions that offer something to tfps, as pip would install them: a module, and its entry points."""

from pathlib import Path


def install(directory: Path, distribution: str, *entry_points: str, group: str = "tfps.launchers") -> None:
    """Write what tells Python of a distribution and of its entry points; ``directory`` is to be on ``sys.path``.

    Args:
        directory: Where; the modules themselves are the caller's.
        distribution: The distribution's name.
        entry_points: Each ``name = module:attribute``.
        group: Of the entry points.
    """
    info = directory / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entry_points, ""]))
