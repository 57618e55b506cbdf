"""Child processes: signals, message frames, wait policy, and limits on long work."""
