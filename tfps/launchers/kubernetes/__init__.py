"""Kubernetes: plain Jobs, TFJob, Volcano and JobSet, all through kubectl."""
