"""Child processes: signals, messages over a socket, waiting, and places for long work."""
