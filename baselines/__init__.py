"""Models to start from and figures to compare with; each model is a folder with a `build(workload)`."""
