"""What the server keeps for its clients: files, batches, answers to be repeated, history, usage."""
