"""The Experiment tab: comparison of samplers and step counts."""
