"""How many GPUs a workload needs: found by simulation, never by a formula alone."""
