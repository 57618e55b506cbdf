"""HTTP code that all routes share: bodies, errors, streams and middleware."""
