"""Fine-tuning on the tasks of GLUE."""
