"""Rewrites of runs of regions, one a file, grouped by region; `catalog.toml` gives the order they are proposed in."""
