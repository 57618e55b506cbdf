"""The Experiment tab: samplers and step counts compared in a grid that fills."""
