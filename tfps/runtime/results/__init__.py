"""The results of a job beside its checkpoints: evaluations, event files, its summary, and exported models."""
