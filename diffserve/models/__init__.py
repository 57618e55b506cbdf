"""What can be known of model and adapter files before any tensor is read. No torch."""
