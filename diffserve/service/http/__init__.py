"""What every route has in common: bodies, errors, streams and what guards them."""
