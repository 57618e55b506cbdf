"""A1111's web API (``/sdapi/v1``)."""
