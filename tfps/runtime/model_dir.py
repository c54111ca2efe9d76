"""What ``--model_dir`` holds, told by its file names. Does not import TensorFlow."""

import re
import time
from pathlib import Path

from tfps.config import JobConfig, show
from tfps.errors import CheckpointError
from tfps.report import SUMMARY, read_json

_NAME = re.compile(r"model\.ckpt-(\d+)\.index")


def existing(model_dir: str | None) -> list[str]:
    """Return the paths of a directory's checkpoints, by their steps, the newest last.

    The files count, not the ``checkpoint`` state file: a damaged one must not send a job back to step 0.
    """
    if not model_dir or not Path(model_dir).is_dir():
        return []
    steps = [int(match[1]) for path in Path(model_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [str(Path(model_dir) / f"model.ckpt-{step}") for step in sorted(steps)]


def ended(config: JobConfig) -> bool:
    """Tell whether the job has come to its end, and not long ago, as its summary says.

    A task that was lost near the end of its job and is started again finds nobody.
    """
    path = Path(config.model_dir or ".") / SUMMARY
    summary = read_json(path) if config.model_dir else None
    if not summary or summary.get("status") != "done" or summary.get("max_steps") != config.max_steps:
        return False
    return time.time() - path.stat().st_mtime < config.patience_secs


def chosen(config: JobConfig) -> str:
    """Return the checkpoint that ``--checkpoint_path`` or ``--model_dir`` means.

    Raises:
        CheckpointError: If there is none.
    """
    path = config.checkpoint_path or next(reversed(existing(config.model_dir)), None)
    if path is None:
        given = show(config.model_dir or "", 200)
        raise CheckpointError(f"--model_dir={given} holds no checkpoint (model.ckpt-*): train first.")
    if not Path(f"{path}.index").is_file():
        given, index = show(path, 200), show(f"{path}.index", 200)
        raise CheckpointError(f"--checkpoint_path={given} is not a checkpoint: there is no {index}.")
    return path
