"""What ``--mode=async`` does about stale gradients, if a flag asks for it."""
