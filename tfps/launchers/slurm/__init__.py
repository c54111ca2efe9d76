"""Slurm: an sbatch script with one step."""
