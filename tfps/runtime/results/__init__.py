"""What a job leaves beside its checkpoints: evaluations, event files, its summary, exported models."""
