"""Find the number of GPUs that a workload needs, by simulation."""
