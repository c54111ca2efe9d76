"""Shell lines, one per task, run by hand or over ssh."""
