"""Who proposes: the catalog, and later language models and coding agents."""
