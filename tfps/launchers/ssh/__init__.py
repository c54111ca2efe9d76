"""Shell lines, one per task, started by hand or over ssh."""
