"""What ``tfps doctor`` checks on this machine."""
