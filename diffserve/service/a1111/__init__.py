"""A1111's web API (``/sdapi/v1``), for the apps that speak it."""
