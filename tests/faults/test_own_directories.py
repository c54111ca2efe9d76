"""A PS for which ``--model_dir`` is another directory than the chief's, or one that it must not write to."""

import shlex
from pathlib import Path

import pytest
from support.processes import POWERS, by_hand, load_variable

APART = "mount -t tmpfs tmpfs {dir}"
READ_ONLY = "mount --bind {dir} {dir} && mount --bind {dir}/logs {dir}/logs && mount -o remount,bind,ro {dir}"
INDEX_ONLY = "mkdir -p {dir}-kept; cp {dir}/*.index {dir}-kept; mount -t tmpfs tmpfs {dir}; cp {dir}-kept/* {dir}; true"
OTHERS = f"{INDEX_ONLY}; for index in {{dir}}/*.index; do echo >> $index; done"


def _in_own_mounts(mount: str, directory: Path) -> list[str]:
    """Return a command that starts another one, for which a directory is mounted otherwise."""
    done = mount.format(dir=shlex.quote(str(directory)))
    return ["unshare", "--mount", "--", "sh", "-c", f'{done} && exec "$@"', "sh"]


@pytest.mark.parametrize(
    ("mount", "shards"),
    [(None, 2), (APART, 1), (READ_ONLY, 1), (INDEX_ONLY, 1), (OTHERS, 1)],
    ids=["shared", "apart", "read-only", "index-only", "others"],
)
def test_a_checkpoint_is_whole_whoever_can_write_it(tmp_path: Path, mount: str | None, shards: int) -> None:
    """Each PS writes its own shard where all share the directory; otherwise the chief writes all; both are resumed."""
    model, model_dir = tmp_path / "powers.py", tmp_path / "m"
    model.write_text(POWERS)
    (model_dir / "logs").mkdir(parents=True)
    under = {"ps/1": _in_own_mounts(mount, model_dir)} if mount else {}
    for max_steps in (3, 5):
        flags = (f"--model={model}", f"--model_dir={model_dir}", f"--max_steps={max_steps}")
        with by_hand(tmp_path, 2, 1, *flags, under=under) as tasks:
            said = {name: (task.wait(120), task.output()) for name, task in tasks.items()}
        assert [code for code, _ in said.values()] == [0, 0, 0], said
        assert ("the chief saves, because a PS cannot" in said["worker/0"][1]) == (mount == READ_ONLY)
        assert len(list(model_dir.glob(f"model.ckpt-{max_steps}.data-*"))) == shards
        assert not list(model_dir.glob(".saving-*"))
        assert load_variable(model_dir, "weight") == -max_steps
    assert "resumed from" in said["worker/0"][1]
    assert ("because a PS cannot: " in said["worker/0"][1]) == (mount in (READ_ONLY, INDEX_ONLY))
    assert (f"the chief has read {model_dir}/model.ckpt-3" in said["worker/0"][1]) == (mount == INDEX_ONLY)
