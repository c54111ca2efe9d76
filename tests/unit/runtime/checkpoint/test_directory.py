"""Which checkpoints a directory has."""

from pathlib import Path

from support.checkpoints import Training

from tfps.runtime.checkpoint.directory import list_checkpoints


def test_a_checkpoint_that_is_being_brought_in_is_no_error_elsewhere(tmp_path: Path) -> None:
    """What is listed and then gone, as another process saves meanwhile, is no error of who looks."""
    Training(tmp_path).save(1)
    (tmp_path / ".saving-gone").symlink_to(tmp_path / "nowhere")
    assert list_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-1")]
